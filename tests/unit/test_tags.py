"""The names of tags: one module, one meaning each."""

import ast
import re

from gpukiln.catalog.load import ROOT
from gpukiln.clouds import tags

PACKAGE = ROOT / "gpukiln"
# a program that runs on a machine without the package, and properties of CycloneDX, which are no tags
OTHERS = ("clouds/tags.py", "workspaces/agent.py", "attest/sbom.py")


def names() -> dict[str, str]:
    return {name: value for name, value in vars(tags).items() if re.fullmatch(r"(?!OLD_)\w+_TAG", name)}


def test_every_tag_has_one_name() -> None:
    assert len(set(names().values())) == len(names())
    assert all(value.startswith("gpukiln:") for value in names().values())


def test_no_other_module_writes_a_tags_name() -> None:
    """EC2 shows a misspelt tag as absent, so that a second spelling is found by nobody."""
    repeated = [
        f"{path}: {node.value}"
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in OTHERS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.removeprefix("tag:") in names().values()
    ]
    assert not repeated
