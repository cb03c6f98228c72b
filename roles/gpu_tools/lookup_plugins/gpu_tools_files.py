"""The files of gpukiln-gpu, made of this checkout on the machine that runs Ansible."""

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.lookup import LookupBase

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTATION = """
name: gpu_tools_files
short_description: The files of gpukiln-gpu
description: Makes them where they are not those of this checkout.
options: {}
"""
RETURN = """
_raw:
  description: A folder that has them as the root of a machine does.
  type: list
  elements: str
"""


class LookupModule(LookupBase):  # type: ignore[misc] # Ansible has no types
    """What Ansible looks for in this file."""

    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[str]:
        """Make the files; returns their folder."""
        del terms, variables, kwargs
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        from gpukiln.gpus import zipapp  # noqa: PLC0415 - of this checkout
        from gpukiln.state import state_home  # noqa: PLC0415

        return [str(zipapp.tree(state_home() / "gpu-tools"))]
