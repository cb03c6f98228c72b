"""Lists the checks of tests/host. `python -m gpukiln.verify.catalog > docs/checks.md` makes their table."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpukiln.verify.checks import LAYERS, PROFILES, Check, declaration
from gpukiln.verify.needs import NEEDS
from gpukiln.verify.suite import SUITE


def load_checks(folder: Path = SUITE) -> dict[str, tuple[Check, Callable[..., Any]]]:
    """Load every check of a suite without running pytest.

    Args:
        folder: Folder with test_*.py.

    Returns:
        Id to declaration and function, in the order of the layers.

    Raises:
        ValueError: A test has no declaration, or two have the same id.
    """
    checks: dict[str, tuple[Check, Callable[..., Any]]] = {}
    for path in sorted(folder.glob("test_*.py")):
        # Loaded by path, because tests/host is no package of an installed gpukiln.
        spec = importlib.util.spec_from_file_location(f"gpukiln_host_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{path} can't be loaded as Python")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for name, function in vars(module).items():
            if not name.startswith("test_"):
                continue
            check = declaration(function)
            if check is None:
                raise ValueError(f"{path.name}: {name} is not declared with @check(...)")
            if check.id in checks:
                raise ValueError(f"{path.name}: check id {check.id} exists already")
            checks[check.id] = (check, function)
    order = list(LAYERS)
    return dict(sorted(checks.items(), key=lambda row: order.index(row[1][0].layer)))


def markdown() -> str:
    """The text of docs/checks.md."""
    checks = [check for check, _function in load_checks().values()]
    lines = [
        "# What is checked",
        "",
        "<!-- Generated: python -m gpukiln.verify.catalog > docs/checks.md -->",
        "",
        f"{len(checks)} checks verify a machine. Each passes, fails, or is *not run* with a reason;",
        "not run is never counted as passed. A check is not run where something that it needs is",
        "legitimately missing; it fails where the profile expects it.",
        "",
        "| Profile | Stands for | GPUs expected |",
        "|---|---|---|",
        *(f"| `{p.name}` | {p.title} | {p.min_gpus or 'none'} |" for p in PROFILES.values()),
        "",
        "| Need | What must be there |",
        "|---|---|",
        *(f"| `{name}` | {need.text} |" for name, need in NEEDS.items()),
        "| `component:NAME` | the component NAME of components.yaml, by the image's record or its package |",
        "",
        "Two checks compare with the expectations of the node, in `/etc/gpukiln/expected.json`. The",
        "role gpu_bootstrap writes that file, into images and on live nodes, from its variables. Without the",
        "file, the last column holds.",
        "",
        "| Check | Variable of gpu_bootstrap | Without it |",
        "|---|---|---|",
        "| `gpu.mig` | `gpu_bootstrap_mig`: `disabled`, `enabled`, `any` | only a pending change fails |",
        "| `compute.bandwidth` | `gpu_bootstrap_bandwidth_share`, of the link's theoretical rate | 0.5 |",
    ]
    for layer, title in LAYERS.items():
        lines += ["", f"## {layer}", "", f"{title[0].upper()}{title[1:]}.", ""]
        lines += ["| Check | What is true when it passes | Profiles | Needs | Fix |", "|---|---|---|---|---|"]
        for check in checks:
            if check.layer == layer:
                needs = ", ".join(f"`{n}`" for n in check.needs) or "-"
                # A vertical bar would end the cell of a Markdown table.
                fix = check.fix.replace("|", "\\|").replace("\n", " ")
                row = (f"`{check.id}`", check.title, ", ".join(check.profiles), needs, fix)
                lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
