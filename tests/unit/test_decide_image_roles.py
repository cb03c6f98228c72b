"""What the roles of images decide: their record, how a node differs from it, and who could log in."""

import fnmatch
import json
from collections.abc import Mapping
from typing import Any

import pytest

from roles.gpu_tools import decide as gpu_tools
from roles.image_hygiene import decide as image_hygiene
from roles.image_record import decide as image_record
from roles.image_record.record import image_record as made_of
from roles.image_record.record import installed, package_drift
from roles.plan import Node
from tests.support.roles import asked, node

COMPONENTS = {
    "nvidia_driver": {
        "branch": 535,
        "modules": "proprietary",
        "keep_build_tools": False,
        "packages": {"debian": "nvidia-kernel-dkms", "ubuntu": "nvidia-dkms-{branch}-server"},
    },
    "docker": {"packages": {"debian": "docker.io", "ubuntu": "docker.io"}},
    "nvtop": {"packages": {"debian": "nvtop", "ubuntu": "nvtop"}},
    "kubernetes": {},
}
IMAGE = {
    "schema": 1,
    "components": {
        "nvidia_driver": {"version": "535.309.01", "branch": 535, "status": "install"},
        "docker": {"version": None, "status": "install"},
        "nvtop": {"version": None, "status": "install"},
        "kubernetes": {"version": "1.34", "status": "left_out", "reason": "the base has none"},
    },
}
OLDER, NEWER = "6.1.0-9-cloud-amd64", "6.1.0-56-cloud-amd64"
DEBIAN = ("debian", "debian")


def test_record_says_what_is_there() -> None:
    packages = {
        "nvidia-kernel-dkms": "535.309.01-0+deb12u1",
        "docker.io": "20.10.24+dfsg1-1+deb12u1+b6",
    }
    made = made_of(IMAGE, COMPONENTS, DEBIAN, packages, {OLDER: "", NEWER: "535.309.01"})
    assert made["kernel"] == NEWER
    assert made["kernels"] == [NEWER, OLDER]
    assert made["modules"] == {"nvidia": {NEWER: "535.309.01"}}
    assert made["packages"] == packages
    states = {name: said["status"] for name, said in made["components"].items()}
    assert states == {
        "nvidia_driver": "installed",
        "docker": "installed",
        "nvtop": "install",
        "kubernetes": "left_out",
    }
    assert made["components"]["docker"]["version"] == "20.10.24+dfsg1"
    assert made["components"]["nvidia_driver"]["keep_build_tools"] is False
    assert "keep_build_tools" not in made["components"]["docker"]


def rpm(version: str, arch: str = "x86_64") -> dict[str, Any]:
    return {"version": version, "arch": arch, "held": False}


def test_record_of_an_rpm_system() -> None:
    """A package's release belongs to its version, and several kernels are installed at once."""
    there = {
        "docker-ce": [rpm("3:28.5.2-1.el9")],
        "kernel-core": [rpm("5.14.0-9.el9"), rpm("5.14.0-10.el9")],
    }
    packages = installed(there, "x86_64", apt=False)
    assert packages == {"docker-ce": "28.5.2-1.el9", "kernel-core": "5.14.0-10.el9, 5.14.0-9.el9"}
    components = {
        "docker": {"packages": {"amazon": "docker", "redhat": "docker-ce"}},
        "nvtop": {"packages": {"amazon": None, "redhat": "nvtop"}},
    }
    image = {"components": {name: {"version": None, "status": "install"} for name in components}}
    made = made_of(image, components, ("rocky", "redhat"), packages, {})
    assert made["components"]["docker"] == {
        "version": "28.5.2",
        "status": "installed",
        "package": {"name": "docker-ce", "version": "28.5.2-1.el9"},
    }
    assert made["components"]["nvtop"]["status"] == "install"
    assert not package_drift(made["packages"], packages)
    del there["kernel-core"][1]
    assert package_drift(made["packages"], installed(there, "x86_64", apt=False)) == [
        "-kernel-core 5.14.0-10.el9, 5.14.0-9.el9",
        "+kernel-core 5.14.0-9.el9",
    ]
    made = made_of(image, components, ("amazon", "redhat"), {"docker": "25.0-1", "nvtop": "3-1"}, {})
    assert [said["status"] for said in made["components"].values()] == ["installed", "install"]


def test_a_foreign_architecture_has_entries_of_its_own() -> None:
    there = {"libc6": [rpm("1:2.36-9", "amd64"), rpm("1:2.36-8", "i386")], "tzdata": [rpm("2026a", "all")]}
    assert installed(there, "x86_64", apt=True) == {
        "libc6": "1:2.36-9",
        "libc6:i386": "1:2.36-8",
        "tzdata": "2026a",
    }


SOURCES = "libc6\tglibc\t2.36-9\t12986\tamd64\ngone\tgone\t1\t\tall\nempty\tempty\t1\t\tall\n"
LICENSES = (
    "/usr/share/doc/libc6/copyright:License: LGPL-2.1+\n/usr/share/doc/libc6/copyright:License:  GPL-2+\n"
    "/usr/share/doc/libc6/copyright:License: GPL-2+\n/usr/share/doc/empty/copyright:License:\n"
)


def test_record_has_source_size_and_licences_of_what_is_installed() -> None:
    packages = {"libc6": "2.36-9+b1", "empty": "1"}
    made = made_of(IMAGE, COMPONENTS, DEBIAN, packages, {}, SOURCES, LICENSES)
    assert made["package_details"] == {
        "empty": {
            "source": "empty",
            "source_version": "1",
            "architecture": "all",
            "installed_kib": 0,
            "licenses": [],
        },
        "libc6": {
            "source": "glibc",
            "source_version": "2.36-9",
            "architecture": "amd64",
            "installed_kib": 12986,
            "licenses": ["GPL-2+", "LGPL-2.1+"],
        },
    }


def test_record_knows_precompiled_modules() -> None:
    packages = {"nvidia-headless-no-dkms-535-server": "535.309.01-0ubuntu0.22.04.1"}
    made = made_of(IMAGE, COMPONENTS, ("ubuntu", "debian"), packages, {})
    assert made["components"]["nvidia_driver"]["status"] == "installed"
    assert made["kernel"] is None


PLANNED = {"schema": 1, "components": {"docker": {"version": None, "status": "install"}}}
ANSWERED = {"rc": 0, "stdout": "", "stderr": ""}
BUILT: dict[str, Any] = {"image": PLANNED, "components": COMPONENTS}


def an_image(packages: Mapping[str, str], **answers: Any) -> Node:
    modules = {f"modinfo {NEWER} nvidia-current": {**ANSWERED, "stdout": "535.309.01\n"}}
    modules[f"modinfo {NEWER} nvidia"] = {**ANSWERED, "rc": 1}
    return node(
        packages,
        globs={image_record.KERNELS: [f"/lib/modules/{NEWER}/modules.dep"]},
        answers={"sources": ANSWERED, "copyright": {**ANSWERED, "rc": 2}, **modules, **answers},
    )


def test_the_record_is_written_once() -> None:
    role, there = asked("image_record", **BUILT), an_image({"docker.io": "20.10.24-1"})
    there["files"][image_record.GPU_TOOLS] = {"sha256": "ab"}
    plan = image_record.decide(role, there)
    [file] = plan.files
    record = json.loads(file.text)
    assert (file.path, plan.folders) == ("/etc/gpukiln/image.json", {"/etc/gpukiln": "0755"})
    assert record["components"]["docker"]["status"] == "installed"
    assert (record["modules"], record["gpu_tools"]) == ({"nvidia": {NEWER: "535.309.01"}}, {"sha256": "ab"})
    there["files"] |= node(files={file.path: file.text})["files"]
    there["folders"]["/etc/gpukiln"] = {"mode": "0755", "uid": 0, "gid": 0}
    assert not image_record.decide(role, there).acts


def test_modules_are_asked_for_when_the_kernels_are_known() -> None:
    there = an_image({"docker.io": "1-1"})
    del there["answers"][f"modinfo {NEWER} nvidia"]
    asks = image_record.decide(asked("image_record", **BUILT), there).ask["commands"]
    assert asks[f"modinfo {NEWER} nvidia"][-3:] == ["--field", "version", "nvidia"]


def test_without_a_plan_there_is_no_record() -> None:
    role = asked("image_record")
    assert not image_record.look(role)
    assert not image_record.decide(role, {}).acts


@pytest.mark.parametrize(
    ("packages", "answers", "found"),
    [
        ({}, {}, "Found no package of docker, wanted it installed as the plan decided."),
        ({"docker.io": "1-1"}, {"copyright": {**ANSWERED, "rc": 127}}, "Found that copyright fails with 127"),
        ({"docker.io": "1-1"}, {"sources": {**ANSWERED, "rc": 2}}, "Found that sources fails with 2"),
        (
            {"docker.io": "1-1"},
            {f"modinfo {NEWER} nvidia": {**ANSWERED, "rc": 124, "stderr": "no answer in 120 s"}},
            f"Found that modinfo {NEWER} nvidia fails with 124: no answer in 120 s",
        ),
    ],
)
def test_what_the_record_refuses(packages: dict[str, str], answers: dict[str, Any], found: str) -> None:
    assert found in image_record.decide(asked("image_record", **BUILT), an_image(packages, **answers)).refusal
    if not packages:
        assert not image_record.decide(asked("image_record", check=True, **BUILT), an_image({})).refusal


RECORDED = {
    "packages": {"a": "1-1", "b": "2-1"},
    "components": {"x": {"status": "left_out"}, "y": {"status": "installed"}},
}


def test_drift_from_the_record() -> None:
    role = asked("image_record", check=True)
    files, never = {role["path"]: json.dumps(RECORDED)}, {image_record.LIVE: []}
    plan = image_record.decide_drift(role, node({"a": "1-1", "c": "3-1"}, files, globs=never))
    assert (plan.lines, plan.do) == (["-b 2-1", "+c 3-1"], {"left_out": ["x"], "live": False})
    without = image_record.decide_drift(role, node({"a": "1-1"}, globs=never))
    assert (without.lines, without.do) == ([], {"left_out": None, "live": False})
    converged = {image_record.LIVE: [f"{gpu_tools.UNITS}/{gpu_tools.HEALTH_TIMER}"]}
    assert image_record.decide_drift(role, node(files=files, globs=converged)).do["live"]
    assert fnmatch.fnmatch(*converged[image_record.LIVE], image_record.LIVE)


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_record_that_cannot_be_read_is_refused(text: str) -> None:
    role = asked("image_record", check=True)
    there = node(files={role["path"]: text}, globs={image_record.LIVE: []})
    said = image_record.decide_drift(role, there).refusal
    assert said.startswith("Found /etc/gpukiln/image.json that can't be read")


CFG = "/etc/cloud/cloud.cfg.d/90_keys.cfg"


@pytest.mark.parametrize(
    ("cloud_init", "text", "found"),
    [
        (True, "a: 1\nssh_deletekeys: true\n", ""),
        (True, "a: 1\n  ssh_deletekeys: false\n", f"Found ssh_deletekeys switched off in {CFG}, wanted"),
        (True, "ssh_deletekeys:   0\n", f"Found ssh_deletekeys switched off in {CFG}, wanted"),
        (True, "# ssh_deletekeys: false\n", ""),
        (False, "", "Found no cloud-init, wanted cloud-init to make host keys"),
    ],
)
def test_an_image_that_nobody_could_log_in_to_is_refused(cloud_init: bool, text: str, found: str) -> None:
    globs = {image_hygiene.CLOUD_INIT: [image_hygiene.CLOUD_INIT] * cloud_init}
    said = image_hygiene.decide(asked("image_hygiene"), node(files={CFG: text}, globs=globs)).refusal
    assert found in said
    assert bool(said) == bool(found)
