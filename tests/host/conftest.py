"""A suite of checks: every test here is declared with `@check`, see gpukiln/verify/checks.py.

pytest tests/host --hosts=ssh://admin@192.0.2.1 --profile image
pytest tests/host --hosts=local:// --profile node --layer versions --layer modules
pytest tests/host --hosts=local:// --layer gpu --layer compute     (computes on the GPUs, changes nothing)

The user needs passwordless sudo (or is root), the machine needs python3. All facts are gathered in one
round trip; the checks are functions of these facts.
"""

from pathlib import Path

import pytest

pytest_plugins = ["gpukiln.verify.plugin"]


def pytest_configure(config: pytest.Config) -> None:
    plugin = config.pluginmanager.get_plugin("gpukiln.verify.plugin")
    assert plugin is not None, "run pytest with tests/host as an argument of its own: it adds options"
    plugin.add_suite(config, Path(__file__).parent)
