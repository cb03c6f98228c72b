"""What a build leaves behind is found, and nothing else."""

import json
from pathlib import Path

import pytest

from gpukiln.probe import hygiene

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIGJ1aWxkZXI="
OTHER = "AAAAC3NzaC1lZDI1NTE5AAAAIG93bmVyMDA="
ACCESS_KEY = "AKIA" + "A" * 16
PRIVATE = "-----BEGIN OPENSSH " + "PRIVATE KEY-----"  # in two parts: this file has no key


@pytest.fixture
def scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hygiene, "SECRET_DIRS", (str(tmp_path),))
    monkeypatch.setattr(hygiene, "SETTINGS", ())
    monkeypatch.setattr(hygiene, "CREDENTIALS", ())
    return tmp_path


def test_a_secret_is_found_with_its_line_and_kind(scanned: Path) -> None:
    (scanned / "log").write_text(f"one\ntwo\nexport AWS_ACCESS_KEY_ID={ACCESS_KEY}\n")
    (scanned / ".ssh").mkdir()
    (scanned / ".ssh/id").write_text(f"{PRIVATE}\nb3Bl\n")
    (scanned / "credentials").write_text(f"aws_secret_access_key = {'s' * 40}\n")
    (scanned / "well").write_text(f"x{ACCESS_KEY} and AKIA are no key; nor is -----BEGIN PUBLIC KEY-----\n")
    (scanned / "link").symlink_to(scanned / "log")
    found = hygiene.secrets()
    rows = {(Path(row["path"]).name, row["line"], row["kind"]) for row in found["found"]}
    assert rows == {
        ("log", 3, "AWS access key id"),
        ("id", 1, "private key"),
        ("credentials", 1, "AWS secret access key"),
    }
    assert (found["files"], found["complete"]) == (4, True)


def test_a_search_that_a_limit_ended_says_so(scanned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        (scanned / name).write_text("12345")
    monkeypatch.setattr(hygiene, "SCAN_FILES", 2)
    assert hygiene.secrets() == {"found": [], "files": 2, "complete": False}
    monkeypatch.setattr(hygiene, "SCAN_FILES", 9)
    monkeypatch.setattr(hygiene, "SCAN_FILE_BYTES", 5)
    assert hygiene.secrets() == {"found": [], "files": 3, "complete": False}


MADE_UP = "Zm9yLXRlc3RzLW9ubHk"  # made up, as every value here
# A line of settings, and what must never be in the facts.
SETTINGS = {
    "proxy with a password": (f"http_proxy=http://bob:{MADE_UP}@proxy.example.com:3128", True),
    "apt's proxy": (f'Acquire::http::Proxy "http://bob:{MADE_UP}@proxy.example.com:3128/";', True),
    "exported token": (f"export HF_TOKEN={MADE_UP}", True),
    "quoted": (f'WANDB_API_KEY="{MADE_UP}"', True),
    "drop-in": (f"Environment=NGC_API_KEY={MADE_UP}", True),
    "drop-in, quoted": (f'Environment="LANG=C" "DB_PASSWORD={MADE_UP}"', True),
    "pip": (f"index-url = https://ann:{MADE_UP}@pypi.example.com/simple", True),
    "npm": (f"//registry.example.com/:_authToken={MADE_UP}", True),
    "docker": (f'{{"auths": {{"registry.example.com": {{"auth": "{MADE_UP}"}}}}}}', True),
    "dnf": (f"password={MADE_UP}", True),
    "git's header": (f"extraheader = AUTHORIZATION: basic {MADE_UP}", True),
    "Hugging Face": ("x hf_" + "a" * 34, True),
    "GitLab": ("x glpat-" + "a" * 20, True),
    "Stripe": ("x sk_live_" + "a" * 24, True),
    "comment": (f"# http_proxy=http://bob:{MADE_UP}@proxy.example.com", False),
    "no password": ("http_proxy=http://proxy.example.com:3128", False),
    "reference": ("export HF_TOKEN=$TOKEN", False),
    "file": ("Environment=HF_TOKEN_PATH=/run/secrets/hf", False),
    "by file": ("PASSWORD=/run/secrets/password", False),
    "cloud-init's": ("    lock_passwd: True", False),
    "empty": ("API_TOKEN=", False),
    "placeholder": ("registry_password: <your password>", False),
    "specifier": ("Environment=TOKEN=%i", False),
    "option": ("ExecStart=/usr/bin/docker login --password-stdin", False),
    "PAM's": ("password include common-password", False),
    "credential of systemd": ("LoadCredential=token:/etc/secrets/token", False),
}


@pytest.mark.parametrize(("line", "found"), SETTINGS.values(), ids=SETTINGS)
def test_a_credential_in_settings_is_found_and_its_value_is_not_kept(
    scanned: Path, monkeypatch: pytest.MonkeyPatch, line: str, found: bool
) -> None:
    file = scanned / "settings/x.conf"
    file.parent.mkdir()
    file.write_text(f"[x]\n{line}\n")
    monkeypatch.setattr(hygiene, "SETTINGS", [f"{scanned}/settings/*"])
    monkeypatch.setattr(hygiene, "SECRET_DIRS", ())
    facts = hygiene.secrets()
    assert [(row["path"], row["line"]) for row in facts["found"]] == ([(str(file), 2)] if found else [])
    assert MADE_UP not in json.dumps(facts)


def test_settings_of_this_machine_s_packages_hold_no_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Debian as its packages leave it: what they ship is no finding."""
    monkeypatch.setattr(hygiene, "SECRET_DIRS", ())
    shipped = (
        "/etc/default/*",
        "/etc/bash.bashrc",
        "/etc/profile",
        "/etc/systemd/*.conf",
        "/etc/cloud/cloud.cfg",
    )
    monkeypatch.setattr(hygiene, "SETTINGS", shipped)
    monkeypatch.setattr(hygiene, "CREDENTIALS", ())
    assert hygiene.secrets()["found"] == []


def test_an_empty_file_of_credentials_is_none(scanned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scanned / ".netrc").write_text("\n")
    (scanned / ".kube").mkdir()
    (scanned / ".kube/config").write_text("token: x\n")
    monkeypatch.setattr(hygiene, "_homes", lambda: {"admin": str(scanned)})
    monkeypatch.setattr(hygiene, "CREDENTIALS", ["~/.netrc", "~/.kube"])
    rows = hygiene.secrets()["found"]
    assert rows == [{"path": str(scanned / ".kube/config"), "line": 1, "kind": "file of credentials"}]


def test_keys_are_told_apart_by_who_brought_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of the launch is cloud-init's; any other was baked in."""
    (tmp_path / ".ssh").mkdir()
    authorized = f'# ssh-ed25519 {OTHER} a comment\nssh-ed25519 {KEY} packer\n\nfrom="::1" ssh-rsa {OTHER}\n'
    (tmp_path / ".ssh/authorized_keys").write_text(authorized)
    instance = {
        "v1": {"public_ssh_keys": [f"ssh-ed25519 {OTHER} owner"]},
        "merged_cfg": {"ssh_authorized_keys": [f"ssh-ed25519 {KEY} baked"]},
    }
    files = {"/run/cloud-init/instance-data-sensitive.json": json.dumps(instance)}
    real = hygiene.read
    monkeypatch.setattr(hygiene, "read", lambda path: files.get(path) or real(path))
    monkeypatch.setattr(hygiene, "_homes", lambda: {"admin": str(tmp_path)})
    found = hygiene.keys()
    path = str(tmp_path / ".ssh/authorized_keys")
    mine, owners = found["authorized"]
    assert (mine["user"], mine["path"], mine["comment"]) == ("admin", path, "packer")
    assert (owners["comment"], [owners["fingerprint"]]) == ("", found["injected"])
    assert mine["fingerprint"] not in found["injected"]
    assert mine["fingerprint"].startswith("SHA256:")


def test_history_and_tools_of_a_build_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".bash_history").write_text("make\n")
    (tmp_path / ".zsh_history").touch()  # empty: nobody worked here
    (tmp_path / ".ansible").mkdir()
    monkeypatch.setattr(hygiene, "_homes", lambda: {"root": str(tmp_path), "admin": str(tmp_path)})
    found = hygiene.build_files()
    assert found["history"] == [str(tmp_path / ".bash_history")]
    assert str(tmp_path / ".ansible") in found["build_tools"]


@pytest.mark.parametrize(
    ("said", "status", "errors"),
    [
        ('{"status": "done", "errors": []}', "done", []),
        ("not yet", None, ["not yet"]),
    ],
)
def test_what_cloud_init_says_of_the_launch(
    said: str, status: str | None, errors: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hygiene, "run", lambda *_, **__: {"rc": 0, "out": said, "err": ""})
    found = hygiene.identity()
    assert (found["cloud_init"]["status"], found["cloud_init"]["errors"]) == (status, errors)
    assert found["cloud_init"]["installed"]
    assert found["machine_id"]["length"] == len(Path("/etc/machine-id").read_text().strip())
