"""What the look modules read and node_settings writes: on this machine, in folders of the test's own."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from gpukiln.catalog.load import ROOT
from tests.support.roles import play


def module(path: str) -> ModuleType:
    # With the name that Ansible gives it: it imports what is in module_utils relative to that.
    name = f"ansible.{path.removesuffix('.py').replace('/', '.')}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "ansible/plugins" / path)
    assert spec
    assert spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


look = module("module_utils/look.py")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What programs say, by their names."""
    answers: dict[str, str] = {}

    def run(argv: list[str], **_: object) -> dict[str, object]:
        return {"rc": 0 if argv[0] in answers else 127, "stdout": answers.get(argv[0], ""), "stderr": ""}

    monkeypatch.setattr(look, "run", run)
    return answers


def test_what_dpkg_knows(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "uses_dpkg", lambda: True)
    said["dpkg-query"] = (
        "ii |docker.io|20.10.24+dfsg1-1+deb12u1+b6|amd64\nhi |toolkit|1:1.19.1-1|amd64\n"
        "rc |nvidia-docker2|2.13.0-1|all\nun |docker-ce||\n"
    )
    assert look.packages(["*"]) == {
        "docker.io": [{"version": "20.10.24+dfsg1-1+deb12u1+b6", "arch": "amd64", "held": False}],
        "toolkit": [{"version": "1:1.19.1-1", "arch": "amd64", "held": True}],
    }
    assert look.packages([]) == {}


def test_what_rpm_knows(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "uses_dpkg", lambda: False)
    locks = "# Added lock on ...\ntoolkit-0:1.19.1-1.*\n\n!containerd.io-0:2.2.2-1.el9.*\n"
    monkeypatch.setattr(look, "read", lambda path: locks if path == look.LOCKS else None)
    said["rpm"] = (
        "kernel|0:5.14.0-1.el9|x86_64\nkernel|0:5.14.0-2.el9|x86_64\n"
        "toolkit|0:1.19.1-1|x86_64\ncontainerd.io|3:2.2.1-1.el9|x86_64\n"
    )
    found = look.packages(["*"])
    assert [one["version"] for one in found["kernel"]] == ["5.14.0-1.el9", "5.14.0-2.el9"]
    assert {name: (one[0]["version"], one[0]["held"]) for name, one in found.items() if name != "kernel"} == {
        "containerd.io": ("3:2.2.1-1.el9", False),
        "toolkit": ("1.19.1-1", True),
    }


@pytest.mark.parametrize(
    ("text", "dpkg"),
    [
        ("ID=debian\n", True),
        ("ID=ubuntu\nID_LIKE=debian\n", True),
        ('ID="amzn"\nID_LIKE="fedora"\n', False),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', False),
    ],
)
def test_which_packages_a_system_has(text: str, dpkg: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "read", lambda _: text)
    assert look.uses_dpkg() is dpkg


def test_units(said: dict[str, str]) -> None:
    said["systemctl"] = (
        "Id=a.service\nLoadState=loaded\nUnitFileState=enabled\nActiveState=active\nNeedDaemonReload=yes\n\n"
        "Id=b.service\nLoadState=not-found\nUnitFileState=\nActiveState=inactive\nNeedDaemonReload=no\n"
    )
    assert look.units(["a.service", "b.service"]) == {
        "a.service": {"there": True, "enabled": "enabled", "active": "active", "reload": True},
        "b.service": {"there": False, "enabled": "", "active": "inactive", "reload": False},
    }


def test_files_and_folders(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"text\n")
    file.chmod(0o640)
    facts = look.file_facts(str(file))
    assert (facts["mode"], facts["text"], facts["uid"]) == ("0640", "text\n", os.getuid())
    assert "text" not in look.file_facts(str(file), text=False)
    assert look.file_facts(str(tmp_path / "b")) is None
    assert look.file_facts(str(tmp_path)) is None
    assert look.folder_facts(str(file)) is None
    assert look.folder_facts(str(tmp_path))["uid"] == os.getuid()
    (tmp_path / "dangling").symlink_to("nowhere")
    assert look.matches(f"{tmp_path}/*") == [f"{tmp_path}/a", f"{tmp_path}/dangling"]


def test_keys_accounts_and_programs(said: dict[str, str], tmp_path: Path) -> None:
    said["gpg"] = f"tru::1\npub:-:4096:1:X:0:::\nfpr:::::::::{'A' * 40}:\nsub:-\nfpr:::::::::{'B' * 40}:\n"
    assert look.keyring("x") == ["A" * 40]
    assert look.account("nobody-of-this-name") is None
    assert look.account("root")["home"] == "/root"
    fresh = module("module_utils/look.py")
    assert fresh.run(["no-such-program"]) == {
        "rc": 127,
        "stdout": "",
        "stderr": "found no program no-such-program",
    }
    assert fresh.run(["sleep", "5"], seconds=0.1)["rc"] == 124
    assert fresh.run(["sh", "-c", "echo $LC_ALL; exit 3"]) == {"rc": 3, "stdout": "C\n", "stderr": ""}
    assert fresh.keyring(str(tmp_path / "none")) == []


def test_gpus_are_those_that_the_probe_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, vendor, kind, number in (
        ("0000:00:1e.0", "0x10de", "0x030200", "0x1eb8"),
        ("0000:00:1e.1", "0x10de", "0x040300", "0x10f8"),  # its audio
        ("0000:00:02.0", "0x10de", "0x068000", "0x22a3"),
        ("0000:00:03.0", "0x1d0f", "0x020000", "0xec20"),
    ):
        folder = tmp_path / address
        folder.mkdir()
        for name, value in (("vendor", vendor), ("class", kind), ("device", number)):
            (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(look, "PCI", str(tmp_path))
    assert look.pci_devices() == {
        "gpus": [{"address": "0000:00:1e.0", "id": "0x1eb8"}],
        "switches": [{"address": "0000:00:02.0", "id": "0x22a3"}],
    }


STATUS = """\
nvidia-current/535.309.01, 6.1.0-9-amd64, x86_64: installed
nvidia-current/535.309.01, 6.1.0-10-amd64, x86_64: built
nvidia-srv/580.178.04, 6.1.0-12-amd64, x86_64: installed (WARNING! Diff between built and installed module!)
nvidia/580.178.04: added
"""
MODINFO = """\
filename:       /lib/modules/6.1.0-9-amd64/updates/dkms/nvidia-current.ko
version:        535.309.01
sig_key:        3A:0B
filename:       /lib/modules/6.1.0-9-amd64/updates/dkms/nvidia-current-uvm.ko
version:        535.309.01
"""


def test_what_a_node_has_of_a_driver(said: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "uses_dpkg", lambda: True)
    monkeypatch.setitem(sys.modules, "ansible.module_utils.look", look)
    facts = module("modules/driver_facts.py")
    said |= {"dkms": STATUS, "modinfo": MODINFO}
    said["dpkg-query"] = (
        "ii |gcc-12|\nii |tcc|c-compiler\nii |binutils|\nrc |gcc-11|c-compiler\nii |gpukiln-no-compiler|"
        "c-compiler\nii |g++-12|c++-compiler, c++abi2-dev\n"
    )
    assert facts.module_facts("6.1.0-9-amd64", "nvidia-current") == {
        "filename": "/lib/modules/6.1.0-9-amd64/updates/dkms/nvidia-current.ko",
        "version": "535.309.01",
        "sig_key": "3A:0B",
    }
    assert [(row["kernel"], row["state"]) for row in facts.dkms_rows()] == [
        ("6.1.0-9-amd64", "installed"),
        ("6.1.0-10-amd64", "built"),
        ("6.1.0-12-amd64", "installed"),
    ]
    assert facts.compilers() == ["tcc", "binutils", "g++-12"]
    kernels = ["/boot/vmlinuz-6.1.0-9-amd64", "/boot/vmlinuz-0-rescue-9a8b", "/boot/vmlinuz-6.18.44"]
    assert [bool(facts.KERNEL.match(path)) for path in kernels] == [True, False, True]
    del said["modinfo"]
    assert facts.module_facts("6.1.0-9-amd64", "nvidia") is None
    assert facts.initramfs_written("no-such-kernel") is None


SETTINGS = """\
- hosts: localhost
  connection: local
  gather_facts: false
  tasks:
    - node_settings:
        folders: "{{ {folder ~ '/made': '0700'} }}"
        files:
          - {path: "{{ folder }}/deep/er/file", text: "{{ text }}", mode: "0640"}
          - {path: "{{ folder }}/secret", text: "the {{ text }} one", mode: "0600", secret: true}
        absent: ["{{ folder }}/gone", "{{ folder }}/link"]
"""


@pytest.mark.skipif(os.getuid() != 0, reason="what it writes is root's")
def test_settings_are_written_once_and_removed(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone/file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    values = {"folder": str(tmp_path), "text": "first"}
    done = play(tmp_path, SETTINGS, values, {"ANSIBLE_DIFF_ALWAYS": "1"})
    assert "changed=1" in done.stdout, done.stdout + done.stderr
    assert "the first one" not in done.stdout
    file = tmp_path / "deep/er/file"
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("first", 0o640)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.glob("gone"))
    assert not (tmp_path / "link").is_symlink()
    assert "changed=0" in play(tmp_path, SETTINGS, values).stdout
    file.chmod(0o644)
    assert "changed=1" in play(tmp_path, SETTINGS, values).stdout
    assert file.stat().st_mode & 0o777 == 0o640
    assert not list(tmp_path.rglob(".gpukiln-*"))


@pytest.mark.skipif(os.getuid() != 0, reason="what it writes is root's")
def test_what_systemd_refuses_is_told(tmp_path: Path) -> None:
    task = "    - node_settings: {start: [no-such-unit-of-ours.service]}\n"
    done = play(tmp_path, SETTINGS[: SETTINGS.index("    - node_settings")] + task, {})
    assert done.returncode == 2
    assert "systemctl start no-such-unit-of-ours.service" in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="what it writes is root's")
def test_a_file_that_its_reader_does_not_accept_is_not_written(tmp_path: Path) -> None:
    file = tmp_path / "settings"
    file.write_text("before")
    task = """\
    - node_settings:
        files:
          - {path: "{{ folder }}/settings", text: "{{ text }}", validate: [grep, --quiet, good, "%s"]}
"""
    playbook = SETTINGS[: SETTINGS.index("    - node_settings")] + task
    done = play(tmp_path, playbook, {"folder": str(tmp_path), "text": "bad"})
    assert done.returncode == 2
    assert f"grep does not accept what {file} would be" in done.stdout
    assert [path.read_text() for path in tmp_path.glob("*settings*")] == ["before"]
    assert play(tmp_path, playbook, {"folder": str(tmp_path), "text": "good"}).returncode == 0
    assert file.read_text() == "good"


def test_files_are_named_by_patterns(tmp_path: Path) -> None:
    for name in ("a.toml", "below/b.toml", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "d.toml").mkdir()
    found = look.named(f"{tmp_path}/**/*.toml")
    assert found == [f"{tmp_path}/a.toml", f"{tmp_path}/below/b.toml"]
    assert look.named(f"{tmp_path}/none") == [f"{tmp_path}/none"]
