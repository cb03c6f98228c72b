"""A workspace's entry in OpenSSH's configuration, held against OpenSSH itself (`ssh -G`)."""

import stat
import subprocess
from pathlib import Path

import pytest

from gpukiln.errors import RefusedError
from gpukiln.ssh import HostKeys, Ssh
from gpukiln.workspaces import ssh_config

VISION = Ssh("192.0.2.7", 2222, "ubuntu", Path("/k y/id"), HostKeys.FIRST_SEEN, Path("/k y/known"), "i-0abc")


def resolved(file: Path, name: str) -> dict[str, str]:
    asked = subprocess.run(["ssh", "-G", "-F", str(file), name], capture_output=True, text=True, check=True)
    return dict(line.split(" ", 1) for line in asked.stdout.splitlines() if " " in line)


def test_ssh_reaches_a_workspace_by_its_name(tmp_path: Path) -> None:
    seen = resolved(ssh_config.write_entry(tmp_path, "vision", VISION), "vision")
    assert (seen["hostname"], seen["port"], seen["user"]) == ("192.0.2.7", "2222", "ubuntu")
    assert (seen["identityfile"], seen["hostkeyalias"]) == ("/k y/id", "i-0abc")
    assert (seen["userknownhostsfile"], seen["stricthostkeychecking"]) == ("/k y/known", "accept-new")
    assert stat.S_IMODE((tmp_path / ".ssh/gpukiln.d").stat().st_mode) == 0o700


def test_a_session_through_session_manager_is_an_entry_too(tmp_path: Path) -> None:
    proxy = "aws ssm start-session --target i-1 --parameters portNumber=%p"
    file = ssh_config.write_entry(tmp_path, "vision", Ssh("i-1", 22, "ubuntu", proxy=proxy))
    assert resolved(file, "vision")["proxycommand"] == proxy


def test_another_host_of_that_name_is_not_hidden(tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text("Host vis*\n  HostName 198.51.100.9\n")
    with pytest.raises(RefusedError, match=r"has a host vision already \(198\.51\.100\.9\)"):
        ssh_config.write_entry(tmp_path, "vision", VISION)
    assert not (tmp_path / ".ssh/gpukiln.d").exists()
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
    assert kept.read_text() == f"{ssh_config.INCLUDE}\nHost *\n  User ann\n"
    assert linked.is_symlink()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o644
    assert resolved(linked, "other")["user"] == "ann"  # OpenSSH reads the file still


@pytest.mark.parametrize(
    ("text", "included"),
    [
        ("Include gpukiln.d/*.conf\n", True),
        ("include other ~/.ssh/gpukiln.d/*.conf\n", True),
        ("# Include gpukiln.d/*.conf\n", False),
        ("Include gpukiln.d.old/*.conf\n", False),
    ],
)
def test_an_include_is_recognised(text: str, included: bool, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(text)
    assert ssh_config.is_included(tmp_path) is included


def test_an_entry_goes_alone(tmp_path: Path) -> None:
    ssh_config.include(tmp_path)
    stays = ssh_config.write_entry(tmp_path, "speech", VISION)
    gone = ssh_config.write_entry(tmp_path, "vision", VISION)
    for _ in range(2):
        ssh_config.remove_entry(tmp_path, "vision")
    assert stays.exists()
    assert not gone.exists()
    assert ssh_config.is_included(tmp_path)
