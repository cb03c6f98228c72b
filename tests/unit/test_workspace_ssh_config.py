"""A workspace's entry in OpenSSH's configuration, held against OpenSSH itself (`ssh -G`)."""

import stat
import subprocess
from pathlib import Path

import pytest

from gpukiln.errors import RefusedError
from gpukiln.ssh import HostKeys, Ssh
from gpukiln.workspaces import ssh_config

VISION = Ssh("192.0.2.7", 2222, "ubuntu", Path("/k y/id"), HostKeys.FIRST_SEEN, Path("/k y/known"), "i-0abc")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path / "sta te"))
    return tmp_path / "sta te/ssh_config.d"


def resolved(file: Path, name: str) -> dict[str, str]:
    asked = subprocess.run(["ssh", "-G", "-F", str(file), name], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)


def test_ssh_reaches_a_workspace_by_its_name(tmp_path: Path, state: Path) -> None:
    ssh_config.write_entry(tmp_path, "vision", VISION)
    ssh_config.include(tmp_path)
    seen = resolved(tmp_path / ".ssh/config", "vision")
    assert (seen["hostname"], seen["port"], seen["user"]) == ("192.0.2.7", "2222", "ubuntu")
    assert (seen["identityfile"], seen["hostkeyalias"]) == ("/k y/id", "i-0abc")
    assert (seen["userknownhostsfile"], seen["stricthostkeychecking"]) == ("/k y/known", "accept-new")
    assert stat.S_IMODE(state.stat().st_mode) == 0o700


def test_a_session_through_session_manager_is_an_entry_too(tmp_path: Path) -> None:
    proxy = "aws ssm start-session --target i-1 --parameters portNumber=%p"
    file = ssh_config.write_entry(tmp_path, "vision", Ssh("i-1", 22, "ubuntu", proxy=proxy))
    assert resolved(file, "vision")["proxycommand"] == proxy


def test_another_host_of_that_name_is_not_hidden(tmp_path: Path, state: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host vis*\n  HostName 198.51.100.9\n")
    with pytest.raises(RefusedError, match=r"has a host vision already \(198\.51\.100\.9\)"):
        ssh_config.write_entry(tmp_path, "vision", VISION)
    assert not state.exists()
    ssh_config.write_entry(tmp_path, "speech", VISION)


def test_the_line_is_added_once_above_every_host(tmp_path: Path) -> None:
    kept, linked = tmp_path / "dotfiles", tmp_path / ".ssh/config"
    kept.write_text("Host *\n  User ann\n")
    kept.chmod(0o644)
    linked.parent.mkdir()
    linked.symlink_to(kept)
    assert not ssh_config.is_included(tmp_path)
    for _ in range(2):
        ssh_config.include(tmp_path)
    assert kept.read_text().splitlines()[1:] == [ssh_config.include_line(), "", "Host *", "  User ann"]
    assert linked.is_symlink()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644
    assert resolved(linked, "other")["user"] == "ann"  # OpenSSH reads the file still


def test_an_entry_goes_alone(tmp_path: Path) -> None:
    stays = ssh_config.write_entry(tmp_path, "speech", VISION)
    gone = ssh_config.write_entry(tmp_path, "vision", VISION)
    for _ in range(2):
        ssh_config.remove_entry("vision")
    assert stays.exists()
    assert not gone.exists()


def test_who_declined_is_not_asked_again() -> None:
    assert not ssh_config.is_declined()
    ssh_config.decline()
    assert ssh_config.is_declined()
