"""The one place that writes OpenSSH's options, held against OpenSSH itself (`ssh -G`)."""

import subprocess
from pathlib import Path

import pytest

from gpukiln.errors import UsageError
from gpukiln.ssh import HostKeys, Ssh, parse_ssh

KEY, KNOWN = Path("/k y/id"), Path("/k y/known")


def asked(words: list[str]) -> dict[str, list[str]]:
    """What ssh(1) makes of a command line."""
    at = words.index("--")
    told = subprocess.run(
        [words[0], "-G", *words[1 : at + 2]], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, list[str]] = {}
    for line in told.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize(
    ("ssh", "wanted"),
    [
        (
            Ssh("192.0.2.1", 2222, "admin", KEY, HostKeys.NEW_MACHINE),
            {
                "hostname": ["192.0.2.1"],
                "port": ["2222"],
                "user": ["admin"],
                "identityfile": [str(KEY)],
                "identitiesonly": ["yes"],
                "stricthostkeychecking": ["false"],
                "userknownhostsfile": ["/dev/null"],
                "batchmode": ["yes"],
            },
        ),
        (
            Ssh("2001:db8::1", 22, "ann", KEY, HostKeys.FIRST_SEEN, KNOWN, "i-1", proxy="aws ssm --p %p"),
            {
                "hostname": ["2001:db8::1"],
                "hostkeyalias": ["i-1"],
                "stricthostkeychecking": ["accept-new"],
                "userknownhostsfile": [str(KNOWN)],
                "proxycommand": ["aws ssm --p %p"],
            },
        ),
        (Ssh("gpu-1", config=Path("/dev/null")), {"hostname": ["gpu-1"], "stricthostkeychecking": ["ask"]}),
    ],
)
def test_openssh_reads_what_was_meant(ssh: Ssh, wanted: dict[str, list[str]], tmp_path: Path) -> None:
    assert asked(ssh.command("true")).items() >= wanted.items()
    (tmp_path / "config").write_text(ssh.config_text())
    by_file = asked(["ssh", "-F", str(tmp_path / "config"), "--", ssh.host])
    ours = {name: value for name, value in wanted.items() if name not in ("port", "user", "hostname")}
    assert by_file.items() >= ours.items()


def test_a_session_may_ask_and_words_follow_the_host() -> None:
    words = Ssh("gpu-1", config=Path("/dev/null")).command("echo", "-o", batch=False, terminal=True)
    assert words[-4:] == ["--", "gpu-1", "echo", "-o"]
    assert "-t" in words
    assert asked(words)["batchmode"] == ["no"]


@pytest.mark.parametrize("url", ["ssh://ann@two:2222", "ssh://one?ssh_identity_file=/k%20y/id&ssh_config=/c"])
def test_a_url_is_read_and_written(url: str) -> None:
    ssh = parse_ssh(url)
    assert parse_ssh(ssh.url()) == ssh
    assert "controlpersist=0" in ssh.url()


def test_what_is_no_url_is_named() -> None:
    with pytest.raises(UsageError, match=r"'ssh://a b' is not ssh://\[USER@\]HOST\[:PORT\]"):
        parse_ssh("ssh://a b")
