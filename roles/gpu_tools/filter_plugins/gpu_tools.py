"""Filter of the role gpu_tools: limits and price as gpukiln-gpu reads them."""

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError

ROOT = Path(__file__).resolve().parents[3]
HEAD = "# Written by the role gpu_tools.\n"


def gpu_tools_toml(limits: Mapping[str, Any], price: Mapping[str, Any]) -> str:
    """Text of /etc/gpukiln/gpus.toml.

    Args:
        limits: The role's gpu_tools_limits.
        price: The role's gpu_tools_price.

    Raises:
        AnsibleFilterError: gpukiln-gpu would not understand it.
    """
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from gpukiln.errors import UsageError  # noqa: PLC0415 - of this checkout
    from gpukiln.gpus.config import load  # noqa: PLC0415

    text = HEAD + "".join(_table("limits", limits)) + "".join(_table("price", price))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gpus.toml")
        file.write_text(text, encoding="utf-8")
        try:
            load(file)
        except UsageError as error:
            what = error.message.replace(str(file), "gpu_tools_limits or gpu_tools_price")
            raise AnsibleFilterError(f"{what}; {error.hint}") from error
    return text


def _table(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    """A table of TOML and those in it; a string of JSON is one of TOML (TOML 1.0, String)."""
    plain = {key: value for key, value in values.items() if not isinstance(value, Mapping)}
    if plain:
        yield f"\n[{name}]\n"
        yield from (f"{json.dumps(str(key))} = {json.dumps(value)}\n" for key, value in plain.items())
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _table(f"{name}.{json.dumps(str(key))}", value)


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {"gpu_tools_toml": gpu_tools_toml}
