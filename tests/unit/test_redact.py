"""The one redactor: what is a secret, what is none, and how long it takes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpukiln import redact as module
from gpukiln.redact import REPLACEMENT, LogRedactor, redact, redact_value

# Made up here, and put together: a scanner of this repository must not take them for real ones.
AWS_ID = "AKIA" + "ABCDEFGHIJKLMNOP"
AWS_SECRET = "wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"
GITHUB = "ghp_" + "a1B2" * 9
SLACK = "xoxb-" + "a1B2c3D4e5"  # the shortest token of all forms
NGC = "nvapi-" + "Zx9_" * 10
JWT = "eyJ" + "hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4"
DASHES = "-----"
PEM = f"{DASHES}BEGIN RSA PRIVATE KEY{DASHES}\nMIIEhunter2\nhunter2==\n{DASHES}END RSA PRIVATE KEY{DASHES}"
OPENSSH = PEM.replace("RSA", "OPENSSH")

# What is said -> what must not be seen of it.
SECRETS = {
    '{"password": "hunter2", "host": "db"}': "hunter2",
    json.dumps({"out": json.dumps({"password": "hunter2"})}): "hunter2",
    json.dumps([json.dumps({"a": json.dumps({"db_password": 'hun"ter2'})})]): "ter2",
    '{"password": "pa\\"hunter2"}': "hunter2",
    "{'api_key': 'hunter2', 'x': 1}": "hunter2",
    '{"password": 8273461, "n": 1}': "8273461",
    '{"password":8273461,"n":1}': "8273461",
    "password=hunter2": "hunter2",
    "password=hun,ter2;more": "ter2",
    "DB_PASSWORD=hunter2 start": "hunter2",
    'export API_TOKEN="two hunter2"': "hunter2",
    "export APP_SECRET='hunter2'": "hunter2",
    "environment: MY_ACCESS_KEY=hunter2": "hunter2",
    "password: hunter2": "hunter2",
    "  - db_password: correct horse hunter2": "hunter2",
    "password: 'it''s hunter2'": "hunter2",
    "password: |\n  one\n  hunter2\nuser: bob": "hunter2",
    "token: >-\n    hunter2\n    more\n  ": "hunter2",
    "Authorization: Bearer hunter2.abc": "hunter2",
    "> Authorization: Basic Ym9iOmh1bnRlcjI=": "Ym9iOmh1bnRlcjI",
    'curl -H "Authorization: Basic Ym9iOmh1bnRlcjI=" https://x': "Ym9iOmh1bnRlcjI",
    "{'Authorization': 'Bearer hunter2'}": "hunter2",
    '{"headers": {"Authorization": "token hunter2"}}': "hunter2",
    f"Authorization: AWS4-HMAC-SHA256 Credential={AWS_ID}/20260101, Signature=hunter2": "hunter2",
    "the server refused Bearer hunter2abc": "hunter2abc",
    "Cookie: session=hunter2; id=3": "hunter2",
    'Set-Cookie: sid="hunter2"; Path=/': "hunter2",
    "X-Api-Key: hunter2": "hunter2",
    "https://bob:hunter2@example.com/x": "hunter2",
    "https://bob:hun@ter2@example.com/x": "ter2",
    "redis://:hunter2@cache:6379": "hunter2",
    "https://0123456789abcdef0123456789abcdef01234567@github.com/a/b": "0123456789abcdef",
    "https://example.com/x?token=hunter2&y=1": "hunter2",
    f"id {AWS_ID}.": AWS_ID,
    f"aws_secret_access_key = {AWS_SECRET}": AWS_SECRET,
    f"said {SLACK}, and left": SLACK,
    json.dumps({"SecretAccessKey": AWS_SECRET, "SessionToken": "hunter2"}): AWS_SECRET,
    "AWS_SESSION_TOKEN=FwoGZXIhunter2//": "hunter2",
    PEM: "hunter2",
    OPENSSH: "hunter2",
    json.dumps({"content": PEM}): "hunter2",
    PEM[:60]: "hunter2",
    f"{DASHES}BEGIN PGP PRIVATE KEY BLOCK{DASHES}\nhunter2": "hunter2",
    f"cloned with {GITHUB}": GITHUB,
    f"github_pat_{'a1B2' * 6}": "a1B2a1B2",
    f"NGC says {NGC} is wrong": NGC,
    "NGC_API_KEY=hunter2": "hunter2",
    f"sent {JWT}": JWT[10:],
    '{"auths": {"nvcr.io": {"auth": "JG9hdXRodG9rZW46aHVudGVyMg=="}}}': "JG9hdXRodG9rZW4",
    "mysql --password hunter2 --host db": "hunter2",
    "tool --api-key=hunter2": "hunter2",
    "tool --db-token 'two hunter2' x": "hunter2",
    '["docker", "login", "--password", "hunter2"]': "hunter2",
    "sshpass -p hunter2 ssh x": "hunter2",
    "curl -u bob:hunter2 https://x": "hunter2",
    "machine x login bob password hunter2": "hunter2",
    "ansible_ssh_pass=hunter2": "hunter2",
}
# What stays as it is: it names a thing, and opens none.
HARMLESS = (
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "GPU-5e1f2a3b-1234-5678-9abc-def012345678, serial 1652923000417",
    "MIG-5e1f2a3b-1234-5678-9abc-def012345678",
    "SHA256:uNiVztksCsDhcc0u9e8BgrJXVGDy7wQvD6mVjzXZ6kE (key) in /root/.ssh/authorized_keys",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "ami-0123456789abcdef0, i-0123456789abcdef0",
    "c2hvd24gYXMgaXQgaXMgYmFzZTY0IG9mIG5vIHNlY3JldA==",
    "ssh://admin@gpu-1:22 and admin@192.0.2.1",
    "https://mirror.example.com:8443/debian/dists?x=1",
    "passwordless sudo is needed; Password authentication is off",
    "/etc/passwd: No such file",
    "private_key_file: /root/.ssh/id",
    "docker login --password-stdin nvcr.io",
    "token_url=https://example.com/oauth",
    '{"token": null, "secret": false, "x": "y"}',
    "NVRM: Xid (PCI:0000:00:1e): 79, pid=1, GPU has fallen off the bus.",
    "bearer authentication failed",
    "/etc/ssh/ssh_host_ed25519_key of 2020-01-01T00:00:00+00:00",
    '{"keys": {"authorized": [], "injected": ["SHA256:abc"]}}',
    "PWD=/root",
)


@pytest.mark.parametrize(("said", "secret"), SECRETS.items(), ids=range(len(SECRETS)))
def test_a_secret_is_left_out_and_its_surroundings_stay(said: str, secret: str) -> None:
    shown = redact(f"before\n{said}\nafter")
    assert secret not in shown
    assert shown.startswith("before\n")
    assert said.startswith(f"{DASHES}BEGIN") or shown.endswith("\nafter")
    assert redact(shown) == shown, "what was redacted once stays as it is"


@pytest.mark.parametrize(("said", "secret"), SECRETS.items(), ids=range(len(SECRETS)))
def test_no_secret_is_in_data_that_is_redacted_and_then_written(said: str, secret: str) -> None:
    shown = redact_value({"results": [{"stdout": said, "stdout_lines": said.splitlines()[:1], "n": 3}]})
    assert secret not in json.dumps(shown)
    assert shown["results"][0]["n"] == 3


@pytest.mark.parametrize("said", HARMLESS)
def test_what_is_no_secret_stays(said: str) -> None:
    assert redact(said) == said
    assert redact_value([said]) == [said]


def test_text_beside_a_secret_stays() -> None:
    assert redact('{"password": "x", "host": "db"}') == f'{{"password": "{REPLACEMENT}", "host": "db"}}'
    assert redact("https://u:p@example.com/a") == f"https://{REPLACEMENT}@example.com/a"
    assert redact("password: |\n  x\nuser: bob") == f"password: {REPLACEMENT}\nuser: bob"
    document = json.loads(redact(json.dumps({"password": 'a"b', "n": 1, "t": ["--token", "x"]})))
    assert document == {"password": REPLACEMENT, "n": 1, "t": ["--token", REPLACEMENT]}


def test_names_in_data_tell_what_is_secret() -> None:
    data = {
        "password": "x",
        "token": ["a", "b"],
        "secret_key": 12345678,
        "auth": "eA==",
        "secrets": {"found": [], "files": 20},
        "seconds": {"secrets": 0.5},
        "root_without_password": False,
        "private_key_file": "/root/id",
        "token_count": 3,
        "argv": ["login", "--password", "x", "--password-stdin", "y"],
        "empty_token": "",
    }
    assert redact_value(data) == {
        **data,
        "password": REPLACEMENT,
        "token": [REPLACEMENT, REPLACEMENT],
        "secret_key": REPLACEMENT,
        "auth": REPLACEMENT,
        "argv": ["login", "--password", REPLACEMENT, "--password-stdin", "y"],
    }


def test_a_key_in_a_log_that_comes_line_by_line() -> None:
    redacted = LogRedactor()
    shown = "".join(redacted(line) for line in f"a\n{PEM}\nb\npassword=hunter2\n".splitlines(keepends=True))
    assert shown == f"a\n(private key left out)\n\nb\npassword={REPLACEMENT}\n"


@pytest.mark.parametrize(
    "unit",
    [
        "token",
        "token ",
        'token="',
        'token=\\"',
        "password: |\n ",
        "a",
        "://a:",
        "://",
        "eyJ-",
        "Bearer ",
        "-----BEGIN RSA PRIVATE KEY-----",
        "-----BEGIN ",
        "--password ",
        "--a-",
        "Authorization:",
        'cookie="',
        "\\",
        '\\"',
        "token=" + "x",
        "token:\t",
        "login x ",
        "-u a",
        'auth":',
        " ",
        "'",
        "token\n",
        "\n \n",
    ],
)
def test_time_is_linear_whatever_the_text(unit: str) -> None:
    """Ten times as much takes about ten times as long: a hundred times would be a square."""

    def seconds(size: int) -> float:
        text = (unit * (size // len(unit) + 1))[:size]
        started = time.process_time()
        redact(text)
        return time.process_time() - started

    small = min(seconds(20_000) for _ in range(2))
    assert seconds(200_000) < max(40 * small, 0.5)


def test_it_needs_the_standard_library_only() -> None:
    """Ansible's callback and judged machines load the file alone."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); assert 'gpukiln' not in sys.modules"
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(Path(module.__file__))], check=True)
