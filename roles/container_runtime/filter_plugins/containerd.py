"""Filters of the role container_runtime: containerd's main configuration file and version."""

import re
from typing import Any

DROP_INS = "/etc/containerd/conf.d/*.toml"


def containerd_with_imports(text: str, version: int) -> str:
    """Make containerd's main file read the drop-in folder, and change nothing else.

    Args:
        text: The file; empty when there is none.
        version: The schema for a new file: 2 for containerd 1.x, 3 for 2.x.

    Returns:
        The file with an import of /etc/containerd/conf.d/*.toml.
    """
    if not text.strip():
        return f'version = {version}\nimports = ["{DROP_INS}"]\n'
    # Keys of the top level stand before the first table.
    table = re.search(r"(?m)^[ \t]*\[{1,2}[A-Za-z\"'][^\n,]*\]{1,2}[ \t]*(#.*)?$", text)
    head, rest = (text[: table.start()], text[table.start() :]) if table else (text, "")
    found = re.search(r"(?m)^imports[ \t]*=[ \t]*\[([^]]*)\]", head)
    if found is None:
        line = f'imports = ["{DROP_INS}"]\n'
        schema = re.search(r"(?m)^version[ \t]*=.*\n?", head)
        at = schema.end() if schema else 0
        gap = "" if not at or head[at - 1] == "\n" else "\n"
        return f"{head[:at]}{gap}{line}{head[at:]}{rest}"
    if f'"{DROP_INS}"' in found[1] or f"'{DROP_INS}'" in found[1]:
        return text
    items = found[1].rstrip().rstrip(",").rstrip()
    items = f'{items}, "{DROP_INS}"' if items.strip() else f'"{DROP_INS}"'
    return f"{head[: found.start(1)]}{items}{head[found.end(1) :]}{rest}"


def containerd_major(packages: dict[str, Any]) -> int:
    """Tell containerd's major version.

    Args:
        packages: The facts of `ansible.builtin.package_facts`.

    Returns:
        1 or more; 1 when it is not installed.
    """
    for name in ("containerd", "containerd.io", "moby-containerd"):
        for found in packages.get(name, []):
            return int(re.sub(r"^\d+:", "", found["version"]).split(".")[0])
    return 1


class FilterModule:
    """What Ansible looks for in this file."""

    def filters(self) -> dict[str, Any]:
        """The filters by name.

        Returns:
            Name to function.
        """
        return {"containerd_with_imports": containerd_with_imports, "containerd_major": containerd_major}
