"""The desktop for the browser: pinned by checksum, baked with --also, known by a tag, asked where it runs."""

import pwd
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.catalog.bases import base
from gpukiln.catalog.components import load_components
from gpukiln.catalog.load import ROOT
from gpukiln.clouds.tags import DESKTOP_TAG
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.images.bake import image_tags
from gpukiln.images.builds import Build
from gpukiln.probe import desktop
from gpukiln.sources.decisions import Decision, Probes, decide_sources
from gpukiln.workspaces.agent import VNC_PORT
from gpukiln.workspaces.plan import require_desktop
from tests.support.plans import OFFLINE, plan

ONLINE = Probes(lambda _: None, OFFLINE.candidates, lambda _: None)
VERSION = load_components()["kasmvnc"].version


def decided(name: str, *, probes: Probes = ONLINE, strict: bool = True, arch: str = "x86_64") -> Decision:
    components = load_components()
    [found] = decide_sources(
        ["kasmvnc"], components, base(name), architecture=arch, strict=strict, probes=probes
    )
    return found


@pytest.mark.parametrize(
    ("system", "arch", "file"),
    [
        ("debian-12", "x86_64", f"kasmvncserver_bookworm_{VERSION}_amd64.deb"),
        ("eks-ubuntu-22.04", "arm64", f"kasmvncserver_jammy_{VERSION}_arm64.deb"),
    ],
)
def test_its_file_is_that_of_the_system(system: str, arch: str, file: str) -> None:
    found = decided(system, arch=arch)
    assert (found.status, found.version) == ("install", VERSION)
    assert found.source == f"https://github.com/kasmtech/KasmVNC/releases/download/v{VERSION}/{file}"


def test_where_no_checksum_is_known_it_is_left_out() -> None:
    found = decided("eks-al2023")
    assert found.status == "left_out"
    assert "no file with a checksum for AWS's standard EKS" in found.reason


def test_a_vendor_out_of_reach() -> None:
    assert decided("debian-12", probes=OFFLINE, strict=False).reason == "no route"
    with pytest.raises(UnavailableError, match="the source of kasmvnc can't be used: no route"):
        decided("debian-12", probes=OFFLINE)


@pytest.mark.usefixtures("debian")
def test_a_build_has_it_also_and_says_so(tmp_path: Path) -> None:
    without, made = plan(probes=ONLINE), plan(probes=ONLINE, also=["kasmvnc"])
    assert "kasmvnc" not in [one.name for one in without.components]
    assert made.component("kasmvnc").status == "install"
    assert made.digest != without.digest
    assert made.inputs["component kasmvnc"] == f"install {VERSION}"
    build = Build(tmp_path / "20261121T060000Z-0123")
    image = {"ImageId": "ami-1", "Tags": [{"Key": k, "Value": v} for k, v in image_tags(made, build).items()]}
    assert require_desktop(image) == VERSION
    assert DESKTOP_TAG not in image_tags(without, build)
    left_out = replace(made, components=(*without.components, decided("eks-al2023")))
    assert DESKTOP_TAG not in image_tags(left_out, build)
    with pytest.raises(IncompatibleError, match="ami-2 has no desktop") as refused:
        require_desktop({"ImageId": "ami-2", "Tags": []})
    assert "invoke ami.build --also kasmvnc" in (refused.value.hint or "")


@pytest.mark.usefixtures("debian")
def test_only_what_is_optional_comes_also() -> None:
    with pytest.raises(UsageError, match="unknown optional component 'kasmvcn'"):
        plan(also=["kasmvcn"])


def test_the_idle_rule_looks_at_the_role_s_port() -> None:
    defaults = yaml.safe_load((ROOT / "roles/kasmvnc/defaults/main.yml").read_text())
    assert defaults["kasmvnc_port"] == VNC_PORT


UNIT = "ExecStart=/usr/bin/kasmvncserver :1 -interface 127.0.0.1 -websocketPort 6800 \\\n"


class Machine:
    """What systemctl and ss say: a desktop that opens its port when it is started."""

    def __init__(self, *, unit: str = UNIT, active: str = "", starts: bool = True, home: Path | None = None):
        self.unit, self.active, self.starts, self.home = unit, active, starts, home
        self.asked: list[str] = []

    def run(self, *argv: str) -> dict[str, Any]:
        words = " ".join(argv)
        self.asked.append(words)
        out = ""
        if words.startswith("systemctl cat"):
            return {"rc": 0 if self.unit else 1, "out": self.unit, "err": ""}
        if words.startswith("systemctl list-units"):
            out = self.active
        elif words.startswith("systemctl start") and self.home:
            (self.home / ".vnc").mkdir()
            (self.home / ".kasmpasswd").write_text("")
        elif words.startswith("ss") and self.starts:
            out = "LISTEN 0 5 127.0.0.1:6800 0.0.0.0:*\nLISTEN 0 5 [::1]:6800 [::]:*\n"
        elif words.startswith("journalctl"):
            out = "No users configured"
        return {"rc": 0, "out": out, "err": ""}


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def look(machine: Machine, *people: int) -> dict[str, Any]:
        monkeypatch.setattr(desktop, "run", machine.run)
        monkeypatch.setattr(desktop, "http_request", lambda *_: {"status": 401})
        monkeypatch.setattr(desktop, "START_S", 0.0)
        rows = [pwd.struct_passwd(("ada", "x", uid, uid, "", str(tmp_path), "/bin/sh")) for uid in people]
        monkeypatch.setattr(desktop.pwd, "getpwall", lambda: rows)
        return desktop.desktop()

    return look


def test_a_desktop_that_runs_is_only_looked_at(looked: Any) -> None:
    machine = Machine(active="kasmvnc@bob.service loaded active running Desktop")
    found = looked(machine, 1000)
    assert (found["unit_of"], found["port"]) == ("kasmvnc@bob.service", 6800)
    assert found["listens"] == ["127.0.0.1", "::1"]
    assert found["http"] == {"status": 401}
    assert not [words for words in machine.asked if " start " in words or " stop " in words]


def test_one_that_does_not_run_is_started_and_leaves_nothing(looked: Any, tmp_path: Path) -> None:
    (tmp_path / ".Xauthority").write_text("mine")
    machine = Machine(home=tmp_path)
    assert looked(machine, 1000)["unit_of"] == "kasmvnc@ada.service"
    assert "systemctl stop kasmvnc@ada.service" in machine.asked
    assert [path.name for path in tmp_path.iterdir()] == [".Xauthority"]


def test_one_that_does_not_start_says_why(looked: Any) -> None:
    found = looked(Machine(starts=False), 1000)
    assert (found["listens"], found["http"], found["log"]) == ([], None, "No users configured")


def test_no_unit_and_nobody_to_start_it_for(looked: Any) -> None:
    assert looked(Machine(unit=""), 1000) == {"unit": False}
    assert looked(Machine(), 0, 65534) == {"unit": True, "unit_of": None}
