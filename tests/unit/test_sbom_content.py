"""An SBOM against the record: each way in which it can lack something, or have too much, is told."""

import json
from typing import Any

import pytest

from gpukiln.attest.sbom import sbom_difference
from gpukiln.images.builds import Bake

DRIVER = {"status": "installed", "version": "535.1"}
LEFT_OUT = {"status": "left_out", "version": "1", "reason": "no route"}
COMPONENTS = {"nvidia_driver": DRIVER, "dcgm": LEFT_OUT}
BAKED = Bake("ami-1", "x", "us-west-2", "6.1", COMPONENTS, {"libc6": "2.36", "odd": "1:2"})


def sbom(**more: Any) -> dict[str, Any]:
    rows = [
        {"name": "debian", "version": "12", "bom-ref": "os:debian-12"},
        {"name": "nvidia_driver", "version": "535.1", "bom-ref": "component:nvidia_driver"},
        {"name": "libc6", "version": "2.36", "bom-ref": "a", "purl": "pkg:deb/debian/libc6@2.36"},
        {"name": "odd", "version": "1:2", "bom-ref": "b", "purl": "pkg:deb/debian/odd@2"},
    ]
    return {"metadata": {"component": {"version": "ami-1"}}, "components": rows, **more}


def without(name: str) -> list[dict[str, Any]]:
    return [row for row in sbom()["components"] if row["name"] != name]


def test_a_whole_one_lacks_nothing() -> None:
    assert sbom_difference(json.dumps(sbom()).encode(), BAKED) == ""


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (sbom(components=[]), "0 packages, the record has 2; wrong: libc6 missing instead of 2.36"),
        (sbom(components=without("odd")), "wrong: odd missing instead of 1:2"),
        (sbom(components=without("nvidia_driver")), "component:nvidia_driver missing instead of 535.1"),
        (
            sbom(
                components=[*sbom()["components"], {"name": "x", "version": "1", "purl": "y", "bom-ref": "c"}]
            ),
            "wrong: x 1 instead of nothing",
        ),
        (sbom(metadata={"component": {"version": "ami-2"}}), "found the SBOM of ami-2, wanted that of ami-1"),
        ({"metadata": {}}, "not a CycloneDX document with components"),
        ([], "not a CycloneDX document with components"),
    ],
)
def test_what_is_wrong_is_told(document: Any, said: str) -> None:
    assert said in sbom_difference(json.dumps(document).encode(), BAKED)


def test_a_record_without_packages_proves_nothing() -> None:
    empty = Bake("ami-1", "x", "us-west-2", "6.1", {}, {})
    assert "lists no package" in sbom_difference(json.dumps(sbom()).encode(), empty)
    assert "not a CycloneDX document" in sbom_difference(b"", BAKED)
