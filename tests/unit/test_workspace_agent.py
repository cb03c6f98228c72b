"""The agent that a workspace's user data brings to the machine, piece by piece."""

import dataclasses
import json
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from moto.server import ThreadedMotoServer

from gpukiln.gpus.verbs.lease import LeaseReport, LeasesReport
from gpukiln.workspaces import agent
from tests.support.workspace_machine import metadata_of

USER = pwd.getpwuid(os.geteuid()).pw_name
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="what runs as another user needs root")
CONFIG: dict[str, Any] = {
    "name": "vision",
    "user": USER,
    "region": "us-west-2",
    "home": False,
    "secrets": {},
    "tags": False,
    "gpus": 0,
    "desktop": False,
    "efs": "",
    "env": {"GPUKILN_WORKSPACE": "vision"},
    "toolchain": None,
    "roles": None,
    "compose": "",
    "script": "",
    "idle_minutes": 10,
}


@pytest.fixture
def root() -> Iterator[Path]:
    """A machine's files, in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for folder in ("home", "bin"):
            (Path(name) / folder).mkdir()
        (Path(name) / "home" / USER).mkdir()
        yield Path(name)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, dict[str, Any]]]:
    tree: dict[str, Any] = {}
    with metadata_of(tree) as address:
        yield address, tree


@pytest.fixture
def tree(served: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """What instance metadata says."""
    served[1].clear()
    served[1]["instance-id"] = "i-1"
    return served[1]


@pytest.fixture
def metadata(served: tuple[str, dict[str, Any]], tree: dict[str, Any]) -> agent.Metadata:
    assert tree
    return agent.Metadata(served[0])


@pytest.fixture
def program(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a program of a machine that has no others but the shell's."""
    monkeypatch.setenv("PATH", str(root / "bin"))

    def make(name: str, script: str) -> None:
        (root / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (root / "bin" / name).chmod(0o755)

    return make


class Tags(agent.Aws):
    """Remembers the tags instead of calling AWS."""

    def __init__(self, metadata: agent.Metadata) -> None:
        super().__init__(metadata, "us-west-2")
        self.tags: list[dict[str, str]] = []

    def tag(self, tags: dict[str, str]) -> None:
        self.tags.append(tags)


def _boot(root: Path, metadata: agent.Metadata, **config: Any) -> agent.Boot:
    return agent.Boot({**CONFIG, **config}, metadata, root)


def _status(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "var/lib/gpukiln/workspace/status.json").read_text())
    return found


# --- AWS ---


def test_signature_is_botocores() -> None:
    rights = {"AccessKeyId": "AKIAX", "SecretAccessKey": "s", "Token": "t"}
    url, body, kind = "https://ssm.us-west-2.amazonaws.com/", b'{"Name": "/a"}', "application/x-amz-json-1.1"
    request = AWSRequest("POST", url, headers={"Content-Type": kind}, data=body)
    SigV4Auth(Credentials("AKIAX", "s", "t"), "ssm", "us-west-2").add_auth(request)
    now = request.headers["X-Amz-Date"]
    ours = agent.signed_headers("ssm", "us-west-2", url, {"Content-Type": kind}, body, rights, now)
    assert ours["Authorization"] == request.headers["Authorization"]


def test_china_has_endpoints_of_its_own(tree: dict[str, Any], metadata: agent.Metadata) -> None:
    assert agent.Aws(metadata, "us-west-2").domain() == "amazonaws.com"
    tree["services"] = {"domain": "amazonaws.com.cn"}
    assert agent.Aws(metadata, "cn-north-1").domain() == "amazonaws.com.cn"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    yield f"http://{host}:{port}"
    server.stop()


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize("reference", ["/no/such", "arn:aws:secretsmanager:eu-west-1:123456789012:secret:no"])
def test_a_secret_that_is_not_there_is_not_waited_for(
    root: Path, tree: dict[str, Any], metadata: agent.Metadata, reference: str
) -> None:
    keys = json.dumps({"AccessKeyId": "AKIAX", "SecretAccessKey": "s", "Token": "t"})
    tree["iam"] = {"security-credentials": {"role": keys}}
    began = time.monotonic()
    with pytest.raises(agent.PermanentError, match="NotFound"):
        _boot(root, metadata, secrets={"KEY": reference}).secrets()
    assert time.monotonic() - began < agent.RIGHTS_WAIT_S / 3


def test_a_secret_is_asked_for_in_its_region(
    aws: str, tree: dict[str, Any], metadata: agent.Metadata
) -> None:
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
    client = boto3.client("secretsmanager", "eu-west-1", endpoint_url=aws, **keys)  # type: ignore[call-overload]
    arn = client.create_secret(Name="elsewhere", SecretString="far")["ARN"]
    document = json.dumps({"AccessKeyId": "AKIAX", "SecretAccessKey": "s", "Token": "t"})
    tree["iam"] = {"security-credentials": {"role": document}}
    assert agent.Aws(metadata, "us-west-2").secret(arn) == "far"


def test_a_token_that_ran_out_is_taken_anew(metadata: agent.Metadata) -> None:
    metadata.token = "old"  # noqa: S105 - one that ran out: 401, then a new one
    assert metadata.get("instance-id") == "i-1"
    assert metadata.get("nothing") is None


# --- the home ---


def _uuid(disk: Path) -> str:
    told = subprocess.run(["blkid", "-p", "-o", "export", disk], capture_output=True, text=True, check=True)
    return next(line for line in told.stdout.splitlines() if line.startswith("UUID="))


def _disk(path: Path, text: bytes = b"", at: int = 0) -> Path:
    with path.open("wb") as file:
        file.truncate(64 << 20)
        file.seek(at)
        file.write(text)
    return path


def test_only_an_empty_disk_is_formatted(tmp_path: Path) -> None:
    disk = _disk(tmp_path / "disk")
    agent.prepare_disk(disk)
    made = _uuid(disk)
    agent.prepare_disk(disk)  # repaired, not formatted
    assert (_uuid(disk), agent.has_grown(disk)) == (made, False)
    with disk.open("r+b") as file:
        file.truncate(128 << 20)
    assert agent.has_grown(disk)
    agent.prepare_disk(disk)
    assert (_uuid(disk), agent.has_grown(disk)) == (made, False)


@pytest.mark.parametrize("at", [5000, (32 << 20) + 70, (64 << 20) - 10])
def test_data_of_no_known_form_is_left_as_it_is(tmp_path: Path, at: int) -> None:
    disk = _disk(tmp_path / "disk", b"somebody's", at)
    before = disk.read_bytes()
    with pytest.raises(agent.StageError, match="not formatted"):
        agent.prepare_disk(disk)
    assert disk.read_bytes() == before


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ["mkfs.ext4", "-q", "-L", "mine"],
            r"has ext4 mine, wanted nothing, or ext4 with",
        ),
        (["mkswap"], "has swap"),
        (["sgdisk", "-n", "1"], r"has a partition table \(gpt\)"),
    ],
)
def test_what_somebody_made_is_left_as_it_is(tmp_path: Path, command: list[str], said: str) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed here")
    disk = _disk(tmp_path / "disk")
    subprocess.run([*command, disk], check=True, capture_output=True)
    before = disk.read_bytes()
    with pytest.raises(agent.StageError, match=said):
        agent.prepare_disk(disk)
    assert disk.read_bytes() == before


@pytest.mark.parametrize(("code", "good"), [(0, True), (1, True), (2, True), (3, True), (4, False)])
def test_what_e2fsck_says_counts(
    tmp_path: Path, program: Callable[[str, str], None], code: int, good: bool
) -> None:
    program("blkid", f"echo TYPE=ext4; echo LABEL={agent.LABEL}")
    program("dumpe2fs", "echo 'Block count: 65536'; echo 'Block size: 1024'")
    program("e2fsck", f"echo 'UNEXPECTED INCONSISTENCY'; exit {code}")
    disk = _disk(tmp_path / "disk")
    if good:
        agent.prepare_disk(disk)
        return
    with pytest.raises(
        agent.StageError, match=f"ended with {code}: UNEXPECTED INCONSISTENCY; it is not mounted"
    ):
        agent.prepare_disk(disk)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"sys/block/nvme1n1/device/serial": "vol0123\n", "dev/nvme1n1": ""}, "dev/nvme1n1"),  # Nitro
        ({"sys/block/vdb/serial": "vol0123", "dev/vdb": ""}, "dev/vdb"),
        ({"dev/disk/by-id/nvme-Amazon_Elastic_Block_Store_vol0123": ""}, None),
        ({"sys/hypervisor/type": "xen\n", "dev/xvdf": ""}, "dev/xvdf"),
        ({"sys/hypervisor/type": "xen\n", "dev/sdf": ""}, "dev/sdf"),
    ],
)
def test_the_homes_disk_is_found(tmp_path: Path, files: dict[str, str], found: str | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert agent.find_device("vol-0123", tmp_path) == tmp_path / (found or next(iter(files)))


def test_a_disk_of_that_name_is_no_home_where_disks_have_serials(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/xvdf").touch()
    with pytest.raises(agent.StageError, match="vol-0123 is not attached"):
        agent.find_device("vol-0123", tmp_path)


def test_a_home_that_is_not_named_ends_the_wait(
    root: Path, tree: dict[str, Any], metadata: agent.Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "USER_ID", os.geteuid())
    monkeypatch.setattr(agent, "HOME_WAIT_S", 0.0)
    monkeypatch.setattr(agent, "DEVICE_WAIT_S", 0.0)
    boot = _boot(root, metadata, home=True)
    with pytest.raises(agent.StageError, match="no tag gpukiln:home"):
        boot.home()
    tree["tags"] = {"instance": {"gpukiln:home": "vol-0123"}}
    with pytest.raises(agent.StageError, match="vol-0123 is not attached"):
        boot.home()


def test_another_disk_at_the_homes_place_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "mounts", lambda: {"/home": ("259:7", "ext4")})
    with pytest.raises(agent.StageError, match=r"/home has the device 259:7, wanted 1:3 \(/dev/null\)"):
        agent.mount_home(Path("/dev/null"), Path("/home"))


def test_a_user_of_the_image_is_not_taken(
    root: Path, metadata: agent.Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "USER_ID", os.geteuid() + 1)
    with pytest.raises(agent.StageError, match=f"{USER} is an account of this image"):
        _boot(root, metadata).home()


def test_an_earlier_machines_key_goes_and_the_users_own_stays(root: Path, metadata: agent.Metadata) -> None:
    boot = _boot(root, metadata)
    file = root / "home" / USER / ".ssh/authorized_keys"
    boot.allow("ssh-ed25519 OLD k")
    file.write_text("ssh-ed25519 MINE me\n" + file.read_text())
    boot.allow("ssh-ed25519 NEW k")
    boot.allow("ssh-ed25519 NEW k")
    assert file.read_text() == "ssh-ed25519 MINE me\nssh-ed25519 NEW k gpukiln-workspace\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


# --- secrets ---


def _with_secrets(root: Path, metadata: agent.Metadata, values: dict[str, str], **config: Any) -> agent.Boot:
    boot = _boot(root, metadata, secrets={name: f"/{name}" for name in values}, **config)

    class Vault(agent.Aws):
        def secret(self, reference: str) -> str:
            return values[reference[1:]]

    boot.aws = Vault(metadata, "us-west-2")
    return boot


def test_secrets_are_in_memory_and_nowhere_else(
    root: Path, metadata: agent.Metadata, capfd: pytest.CaptureFixture[str]
) -> None:
    boot = _with_secrets(root, metadata, {"KEY": "very secret $x"}, script="x")

    def tells() -> None:
        raise agent.StageError(f"the program said: {agent.read_secrets(root)['KEY']}")

    assert boot.run([boot.secrets, tells]) == 1
    env = root / "run/gpukiln/workspace/env"
    assert env.read_text() == "KEY='very secret $x'\n"
    assert (env.stat().st_mode & 0o777, env.stat().st_uid) == (0o600, os.geteuid())
    assert (root / "run/gpukiln/workspace/secrets").stat().st_mode & 0o777 == 0o700
    assert agent.environment(boot.config, root)["KEY"] == "very secret $x"
    having = [file for file in root.rglob("*") if file.is_file() and "very secret" in file.read_text()]
    assert sorted(having) == [env, root / "run/gpukiln/workspace/secrets/KEY"]
    assert _status(root)["stages"][-1]["why"] == "the program said: ***"
    assert "very secret" not in "".join(capfd.readouterr())
    boot.config["secrets"] = {}
    boot.secrets()  # one that is no longer asked for goes
    assert agent.read_secrets(root) == {}


def test_a_disk_is_no_memory(tmp_path: Path, metadata: agent.Metadata) -> None:
    if agent.mounts().get(str(tmp_path), ("", ""))[1] == "tmpfs":
        pytest.skip("this machine's folder for temporary files is in memory")
    with pytest.raises(agent.StageError, match=r"wanted memory \(tmpfs\)"):
        _with_secrets(tmp_path, metadata, {"KEY": "x"}).secrets()
    assert agent.read_secrets(tmp_path) == {}


@pytest.mark.parametrize("value", ["two\nlines", "it's"])
def test_what_an_env_file_can_not_hold(root: Path, metadata: agent.Metadata, value: str) -> None:
    with pytest.raises(agent.StageError, match="KEY: an env file of services can't hold quotes"):
        _with_secrets(root, metadata, {"KEY": value}, compose="services: {}").secrets()
    boot = _with_secrets(root, metadata, {"KEY": value})
    boot.secrets()
    assert agent.environment(boot.config, root)["KEY"] == value


def test_a_machine_without_rights_says_so(
    root: Path, metadata: agent.Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "RIGHTS_WAIT_S", 0.0)
    boot = _boot(root, metadata, secrets={"KEY": "/vision/key"}, tags=True)
    assert boot.run([boot.secrets, boot.driver]) == 1
    status = _status(root)
    assert [(one["stage"], one["state"]) for one in status["stages"]] == [("secrets", "failed")]
    assert status["stages"][-1]["why"] == "ssm: this machine has no instance profile"
    assert "no instance profile" in status["tag_error"]


# --- stages ---


def test_each_stage_is_told_and_the_first_that_fails_ends_it(root: Path, metadata: agent.Metadata) -> None:
    boot = _boot(root, metadata, tags=True)
    boot.aws = told = Tags(metadata)

    def good() -> str:
        return "well"

    def bad() -> None:
        raise OSError("no space")

    assert boot.run([good, bad, good]) == 1
    assert [one["gpukiln:stage"] for one in told.tags] == [
        "good",
        "bad",
        "failed bad: OSError: no space",
    ]
    assert _status(root)["state"] == "failed"
    again = _boot(root, metadata, tags=True)  # the next boot
    again.aws = told
    assert again.run([good]) == 0
    assert told.tags[-1] == {"gpukiln:stage": "done"}
    [one] = _status(root)["stages"]
    assert (one["stage"], one["state"], one["why"]) == ("good", "done", "well")


def test_the_driver_is_awaited(
    root: Path,
    metadata: agent.Metadata,
    program: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    boot = _boot(root, metadata, gpus=2, tags=True)
    boot.aws = told = Tags(metadata)
    monkeypatch.setattr(agent, "DRIVER_WAIT_S", 0.0)
    with pytest.raises(agent.StageError, match="neither nvidia-smi nor"):
        boot.driver()
    program("nvidia-smi", "echo 580.95.05")
    with pytest.raises(agent.StageError, match="shows 1 GPUs, wanted 2"):
        boot.driver()
    program("nvidia-smi", 'echo "couldn\'t communicate with the NVIDIA driver"; exit 9')
    with pytest.raises(agent.StageError, match=r"ended with 9: couldn't communicate"):
        boot.driver()
    monkeypatch.setattr(agent, "DRIVER_WAIT_S", 10.0)
    program(
        "nvidia-smi",
        f"[ -e {root}/second ] || {{ : > {root}/second; exit 9; }}; echo 580.95.05; echo 580.95.05",
    )
    assert boot.driver() == "580.95.05"
    assert told.tags == [{"gpukiln:driver": "580.95.05"}]
    assert _boot(root, metadata).driver() == "no GPU requested"


@pytest.mark.usefixtures("program")
def test_the_driver_without_nvidia_smi(root: Path) -> None:
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@x)\n"
    )
    (root / "dev").mkdir()
    with pytest.raises(agent.StageError, match="shows 0 GPUs"):
        agent.driver_version(root, 1)
    for name in ("nvidia0", "nvidiactl"):
        (root / "dev" / name).touch()
    assert agent.driver_version(root, 1) == "580.95.05"


def test_services_need_compose(
    root: Path, metadata: agent.Metadata, program: Callable[[str, str], None]
) -> None:
    boot = _boot(root, metadata, compose="services: {}\n")
    program("docker", "exit 1")  # without its plugin
    with pytest.raises(agent.StageError, match="this image has neither"):
        boot.services()
    program("docker-compose", f'echo "$@" > {root}/asked')
    assert boot.services() == "by docker-compose"
    file = root / "etc/gpukiln/compose.yaml"
    assert (root / "asked").read_text() == (
        f"--project-name gpukiln --file {file} up --detach --remove-orphans\n"
    )
    assert file.read_text() == "services: {}\n"
    program("docker", f'echo "$@" > {root}/asked')
    assert boot.services() == "by docker compose"
    program("docker", '[ "$2" = version ] || { echo "no space left on device" >&2; exit 1; }')
    with pytest.raises(agent.StageError, match="docker ended with 1: no space left on device"):
        boot.services()


def test_a_desktop_needs_an_image_with_it(
    root: Path, metadata: agent.Metadata, program: Callable[[str, str], None]
) -> None:
    boot = _boot(root, metadata, desktop=True)
    program("systemctl", "exit 1")
    with pytest.raises(agent.StageError, match="bake one with the role kasmvnc"):
        boot.desktop()
    program("systemctl", f'echo "$@" >> {root}/asked')
    boot.desktop()
    assert (root / "asked").read_text().splitlines()[-1] == f"enable --now kasmvnc@{USER}.service"


@AS_ROOT
def test_a_cache_on_efs(root: Path, metadata: agent.Metadata, program: Callable[[str, str], None]) -> None:
    program("mount", f'echo "$@" > {root}/asked')
    assert _boot(root, metadata, efs="fs-1").cache() == f"fs-1 at {root}/mnt/gpukiln-cache"
    assert (root / "asked").read_text() == (
        "-t nfs4 -o nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport "
        f"fs-1.efs.us-west-2.amazonaws.com:/ {root}/mnt/gpukiln-cache\n"
    )
    assert (root / "mnt/gpukiln-cache/gpukiln").stat().st_uid == agent.USER_ID


@AS_ROOT
def test_the_script_runs_as_the_user_and_its_exit_code_counts(root: Path, metadata: agent.Metadata) -> None:
    boot = _with_secrets(root, metadata, {"KEY": "secret"}, script=f'pwd; echo "$KEY $USER" > {root}/said')
    boot.secrets()
    assert boot.script() == ""
    assert (root / "said").read_text() == f"secret {USER}\n"
    boot.config["script"] = "exit 3"
    with pytest.raises(agent.StageError, match="it ended with 3"):
        boot.script()


@AS_ROOT
def test_a_script_that_goes_on_is_watched(
    root: Path, metadata: agent.Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SCRIPT_S", 0.1)
    boot = _boot(root, metadata, script=f"while [ ! -e {root}/go ]; do sleep 0.1; done; exit 5", tags=True)
    boot.aws = told = Tags(metadata)
    done = Tags.tag

    def tag(self: Tags, tags: dict[str, str]) -> None:
        done(self, tags)
        if tags == {"gpukiln:stage": "done"}:
            (root / "go").touch()

    monkeypatch.setattr(Tags, "tag", tag)
    assert boot.run([boot.script]) == 1
    assert [one["gpukiln:stage"] for one in told.tags] == [
        "script",
        "done",
        "failed script: it ended with 5 (journalctl -u gpukiln-workspace)",
    ]


@AS_ROOT
def test_roles_come_by_ansible_pull_of_one_commit(
    root: Path, metadata: agent.Metadata, tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    (repository / "ansible").mkdir(parents=True)
    play = (
        "- hosts: all\n  gather_facts: false\n  tasks:\n    - copy: {content: TEXT, dest: ROOT/converged}\n"
    )
    commits = []
    git = ["git", "-C", repository, "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "init", "--quiet", repository], check=True)
    for text in ("first", "second"):
        file = repository / "ansible/node.yml"
        file.write_text(play.replace("TEXT", text).replace("ROOT", str(root)))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", text], check=True)
        ran = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        commits.append(ran.stdout.strip())
    pull = root / "opt/gpukiln/ansible/bin/ansible-pull"
    pull.parent.mkdir(parents=True)
    for name in ("ansible-pull", "ansible", "ansible-playbook"):
        (pull.parent / name).symlink_to(str(shutil.which(name)))
    roles = {"url": f"file://{repository}", "commit": commits[0], "packages": []}
    assert _boot(root, metadata, roles=roles).roles() == f"those of {commits[0]}"
    assert (root / "converged").read_text() == "first"
    roles["commit"] = "f" * 40
    with pytest.raises(agent.StageError, match="ansible-pull ended with"):
        _boot(root, metadata, roles=roles).roles()


def test_ansible_needs_a_python_that_is_new_enough(
    root: Path, metadata: agent.Metadata, program: Callable[[str, str], None]
) -> None:
    """As on Ubuntu 22.04: its own Python is 3.10, and another package brings 3.11."""
    boot = _boot(root, metadata, roles={"url": "", "commit": "", "packages": []})
    program("python3", "exit 1")
    with pytest.raises(agent.StageError, match=r"dnf: .*No such file"):
        boot.roles()
    program("git", "")
    with pytest.raises(agent.StageError, match=r"Python 3\.11 or later"):
        boot.roles()
    bin = root / "bin"
    brings = f'printf "#!/bin/sh\\nexit 0\\n" > {bin}/python3.11; /bin/chmod 755 {bin}/python3.11'
    program("apt-get", f'echo "$@" >> {root}/asked; case "$*" in *python3.11-venv) {brings} ;; esac')
    with pytest.raises(agent.StageError, match="pip: "):  # the stand-in makes no environment
        boot.roles()
    asked = (root / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["update", "python3-venv", "update", "python3.11-venv"]


def test_a_half_made_environment_goes(
    root: Path, metadata: agent.Metadata, program: Callable[[str, str], None]
) -> None:
    program("git", "")
    folder = root / "opt/gpukiln/ansible"
    program(
        "python3", f'[ "$1" = -c ] || {{ /bin/mkdir -p {folder}/bin; echo "exit 7" > {folder}/bin/pip; }}'
    )
    with pytest.raises(agent.StageError, match="pip"):
        _boot(root, metadata, roles={"url": "", "commit": "", "packages": ["ansible-core==1"]}).roles()
    assert not folder.exists()


# --- the idle rule ---


def _gpus(*percents: str) -> str:
    """What `nvidia-smi -q -x` prints of GPUs, as far as it is read."""
    rows = (
        "<gpu><mig_mode><current_mig>N/A</current_mig></mig_mode>"
        f"<utilization><gpu_util>{percent}</gpu_util></utilization><processes></processes></gpu>"
        for percent in percents
    )
    return _prints("".join(rows))


def _mig(processes: str) -> str:
    return _prints(
        "<gpu><mig_mode><current_mig>Enabled</current_mig></mig_mode>"
        f"<utilization><gpu_util>N/A</gpu_util></utilization>{processes}</gpu>"
    )


def _prints(gpus: str) -> str:
    return f"echo '<nvidia_smi_log>{gpus}</nvidia_smi_log>'"


@pytest.fixture
def quiet(
    root: Path, program: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str], None]:
    """A machine with idle GPUs on which nobody is."""
    book = {"schema": "gpu.leases/1", "nodes": [{"node": "vm", "leases": []}], "failed": []}
    program("loginctl", "")
    program("gpukiln-gpu", f"echo '{json.dumps(book)}'")
    program("nvidia-smi", _gpus("4 %", "0 %"))
    program("wall", "")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/io").touch()
    (root / "sys/class/net/lo").mkdir(parents=True)
    monkeypatch.setattr(agent, "SAMPLE_S", 0.0)  # the clock is the test's
    return program


def _process(
    root: Path, pid: int, *, cpu_s: float = 0, children_s: float = 0, disk: int = 0, **of: Any
) -> None:
    """A process as proc(5) describes it: of a user of this machine, in what is left of a session."""
    known = {"name": "train (a) b", "uid": 1000, "group": SCOPE, "parent": 1, **of}
    ticks = [int(seconds * os.sysconf("SC_CLK_TCK")) for seconds in (cpu_s, children_s)]
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    head = f"{pid} ({known['name']}) S {known['parent']} 1 1 0 -1 0 0 0 0 0"
    (folder / "stat").write_text(f"{head} {ticks[0]} 0 {ticks[1]} 0 20 0 1 0 500 0\n")
    (folder / "status").write_text(f"Name:\tx\nUid:\t{known['uid']}\t0\t0\t0\n")
    (folder / "cgroup").write_text(f"0::{known['group']}\n")
    (folder / "io").write_text(f"rchar: 900000000\nread_bytes: {disk}\nwrite_bytes: 0\n")


SCOPE = "/user.slice/user-1000.slice/session-3.scope"
DOCKER = f"/system.slice/docker-{'0123456789abcdef' * 4}.scope"


BUSY = {**CONFIG, "gpus": 2}
SESSIONS = 'if [ $1 = list-sessions ]; then echo "3 6000 ada"; else {}; fi'


@pytest.mark.usefixtures("quiet")
def test_nobody_is_there(root: Path) -> None:
    assert agent.busy(BUSY, root, 0.0) == ""


@pytest.mark.parametrize(
    ("name", "script", "said"),
    [
        ("nvidia-smi", _gpus("0 %", "5 %"), "GPU 1 computes"),
        ("nvidia-smi", _gpus("N/A"), "unknown: utilization of GPU 0 reads 'N/A'"),
        ("nvidia-smi", _prints(""), "unknown: nvidia-smi shows no GPU"),
        ("nvidia-smi", "echo '<gpu>'", "unknown: no element found"),
        ("nvidia-smi", "exit 9", "unknown: nvidia-smi ended with 9"),
        ("loginctl", "exit 1", "unknown: loginctl ended with 1"),
        (
            "loginctl",
            SESSIONS.format("echo Name=ada; echo Class=user; echo State=online"),
            "a session of ada",
        ),
        (
            "gpukiln-gpu",
            """echo '{"nodes": [{"leases": [{"id": "L-1", "user": "ada"}]}]}'""",
            "leases: L-1 of ada",
        ),
        ("gpukiln-gpu", "echo '{}'", "unknown: 'nodes'"),
    ],
)
def test_somebody_is_there(
    root: Path, quiet: Callable[[str, str], None], name: str, script: str, said: str
) -> None:
    quiet(name, script)
    assert agent.busy(BUSY, root, 0.0).startswith(said)


@pytest.mark.parametrize("told", ["Class=user State=closing", "Class=manager State=active"])
def test_what_somebody_left_running_is_no_session(
    root: Path, quiet: Callable[[str, str], None], told: str
) -> None:
    words = "; ".join(f"echo {word}" for word in told.split())
    quiet("loginctl", SESSIONS.format(words))
    assert agent.busy(BUSY, root, 0.0) == ""


@pytest.mark.usefixtures("quiet")
def test_session_manager_and_terminals_count(root: Path) -> None:
    (root / "proc/77").mkdir()
    (root / "proc/77/comm").write_text("ssm-session-wor\n")
    assert agent.busy(BUSY, root, 0.0) == "a session of session manager"
    (root / "proc/77/comm").write_text("bash\n")
    terminal = root / "dev/pts/0"
    terminal.parent.mkdir(parents=True)
    terminal.touch()
    if os.geteuid() == 0:
        assert agent.busy(BUSY, root, 0.0) == ""  # root's is the console's
        os.chown(terminal, 1000, 1000)
    assert agent.busy(BUSY, root, 0.0) == "a terminal"
    os.utime(terminal, (time.time() - 600,) * 2)  # nobody types there
    assert agent.busy(BUSY, root, 0.0) == ""


@pytest.mark.usefixtures("quiet")
def test_who_looks_at_the_desktop_counts(root: Path) -> None:
    (root / "proc/net").mkdir(parents=True)
    head = "  sl  local_address rem_address   st\n"
    line = "   0: 0100007F:{:04X} 0100007F:C350 {}\n"
    (root / "proc/net/tcp").write_text(head + line.format(agent.VNC_PORT, "0A"))
    assert agent.busy({**BUSY, "desktop": True}, root, 0.0) == ""
    (root / "proc/net/tcp").write_text(head + line.format(agent.VNC_PORT, "01"))
    assert agent.busy({**BUSY, "desktop": True}, root, 0.0) == "the desktop"
    assert agent.busy(BUSY, root, 0.0) == ""


def _in_a_minute(root: Path, **config: Any) -> str:
    return agent.busy({**CONFIG, **config}, root, 60.0)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize(
    "of",
    [
        {},  # nohup and tmux outlive the session
        {"uid": 0},  # sudo in a session
        {"group": "/system.slice/gpukiln-workspace.service", "uid": 6000},  # the agent script
        {"group": "/system.slice/cron.service"},  # a user's crontab
        {"group": DOCKER, "uid": 0},
        {"group": f"/docker/{'0' * 64}", "uid": 0},
        {"group": "/system.slice/docker.service", "uid": 0},  # it unpacks an image that somebody pulls
        {"group": "/system.slice/run-u12.service", "uid": 0},  # systemd-run
    ],
)
def test_work_that_somebody_left_running_counts(root: Path, gpus: int, of: dict[str, Any]) -> None:
    _process(root, 77, cpu_s=500, **of)
    agent.busy({**CONFIG, "gpus": gpus}, root, 0.0, keep=True)
    _process(root, 77, cpu_s=506.5, **of)  # a tenth of a processor is 6 s of a minute
    assert _in_a_minute(root, gpus=gpus).startswith("processors: train (a) b (pid 77) of ")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    "of",
    [
        {"group": "/system.slice/apt-daily.service", "uid": 0},
        {"group": "/system.slice/ssh.service", "uid": 0},
        {"group": "/system.slice/cron.service", "uid": 0},
        {"group": "/system.slice/amazon-ssm-agent.service", "uid": 0},
        {"group": "/system.slice/nvidia-persistenced.service", "uid": 143},
        {"group": "/system.slice/metrics.service", "uid": 61184},  # systemd's dynamic users
        {"group": "/", "uid": 0},  # kernel threads
        {"name": "systemd", "group": "/user.slice/user-1000.slice/user@1000.service/init.scope"},
        {"pid": os.getpid()},
    ],
)
def test_what_the_system_does_is_no_use(root: Path, of: dict[str, Any]) -> None:
    settings = {"pid": 77, **of}
    (root / "sys/class/net/eth0/device").mkdir(parents=True)
    for moved, at in ((0, 0.0), (900_000_000, 60.0)):
        _process(root, **settings, cpu_s=moved / 1e7, disk=moved)
        _traffic(root, "eth0", moved)
        assert agent.busy(CONFIG, root, at, keep=True) == ""


@pytest.mark.usefixtures("quiet")
def test_the_login_of_who_asks_is_no_use(root: Path) -> None:
    """SSH's process and sudo, by which `workspace.down` asks."""
    _process(root, os.getpid(), parent=78)
    for cpu_s, at in ((0.0, 0.0), (50.0, 60.0)):
        _process(root, 77, cpu_s=cpu_s)
        _process(root, 78, cpu_s=cpu_s, parent=77)
        assert agent.busy(CONFIG, root, at, keep=True) == ""
    _process(root, 79, cpu_s=50, parent=77)  # beside it
    assert agent.busy(CONFIG, root, 120.0).startswith("processors: train (a) b (pid 79) of ")


@pytest.mark.usefixtures("quiet")
def test_a_little_of_a_processor_is_no_use(root: Path) -> None:
    """An editor's server or a notebook that waits; children that ended count with who started them."""
    _process(root, 77)
    _process(root, 78)
    assert agent.busy(CONFIG, root, 0.0, keep=True) == ""
    _process(root, 77, cpu_s=2)
    _process(root, 78, children_s=3.5)
    assert _in_a_minute(root) == ""
    _process(root, 78, children_s=4.5)
    assert _in_a_minute(root).startswith("processors: train (a) b (pid 78) of ")
    _process(root, 78)
    _process(root, 79, cpu_s=4.5)  # new since then: all of its time
    assert _in_a_minute(root).startswith("processors: train (a) b (pid 79) of ")


@pytest.mark.usefixtures("quiet")
def test_a_look_at_the_machine_does_not_begin_the_next_one(root: Path) -> None:
    _process(root, 77)
    agent.busy(CONFIG, root, 0.0, keep=True)
    _process(root, 77, cpu_s=6.5)
    assert "processors" in agent.busy(CONFIG, root, 59.0)  # `workspace.down` asks
    assert "processors" in agent.busy(CONFIG, root, 60.0, keep=True)
    assert agent.busy(CONFIG, root, 120.0, keep=True) == ""


@pytest.mark.usefixtures("quiet")
def test_a_first_look_samples(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SAMPLE_S", 2.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: _process(root, 77, cpu_s=0.6 * seconds))
    assert agent.busy(CONFIG, root, 0.0).startswith("processors: train (a) b (pid 77) of ")


@pytest.mark.usefixtures("quiet")
def test_a_disk_that_is_read_or_written_counts(root: Path) -> None:
    _process(root, 77, disk=1_000_000_000)
    agent.busy(CONFIG, root, 0.0, keep=True)
    _process(root, 77, disk=1_004_900_000)
    assert _in_a_minute(root) == ""
    _process(root, 77, disk=1_005_100_000)
    assert _in_a_minute(root).startswith("disk: train (a) b (pid 77) of ")


def _traffic(root: Path, interface: str, size: int) -> None:
    folder = root / "sys/class/net" / interface / "statistics"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rx_bytes").write_text(f"{size}\n")
    (folder / "tx_bytes").write_text("0\n")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("peer", "state", "counts"),
    [
        ("0A00020A:01BB", "01", True),
        ("0A00020A:01BB", "06", False),  # TIME_WAIT
        ("0100007F:01BB", "01", False),
        ("0000000000000000FFFF00000100007F:01BB", "01", False),
        ("00000000000000000000000001000000:01BB", "01", False),
        ("B80D01200000000067452301EFCDAB89:01BB", "01", True),
    ],
)
def test_a_transfer_counts(root: Path, peer: str, state: str, counts: bool) -> None:
    """Of a process that is connected to another machine; an upload of cached files reads no disk."""
    _process(root, 77)
    (root / "proc/77/fd").mkdir()
    (root / "proc/77/fd/3").symlink_to("socket:[4711]")
    (root / "proc/77/net").mkdir()
    line = f"   0: 0100000A:C350 {peer} {state} 0:0 0:0 0 1000 0 4711 1\n"
    (root / "proc/77/net" / ("tcp" if len(peer) == 13 else "tcp6")).write_text(f"  sl  local_address\n{line}")
    for name in ("eth0/device", "docker0/bridge", "veth1/master"):
        (root / "sys/class/net" / name).mkdir(parents=True)
    for name in ("eth0", "docker0", "veth1"):
        _traffic(root, name, 1_000_000_000)
    agent.busy(CONFIG, root, 0.0, keep=True)
    _traffic(root, "eth0", 1_004_900_000)
    _traffic(root, "docker0", 2_000_000_000)  # containers among themselves
    _traffic(root, "veth1", 2_000_000_000)
    assert _in_a_minute(root) == ""
    _traffic(root, "eth0", 1_005_100_000)
    assert _in_a_minute(root).startswith("network: train (a) b (pid 77) of ") is counts


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("proc/self/io", "this kernel does not count what processes"),
        ("sys/class/net/lo", "/sys/class/net names"),
    ],
)
def test_what_can_not_be_counted_is_unknown(root: Path, file: str, said: str) -> None:
    (root / file).rename(root / "gone")
    assert agent.busy(CONFIG, root, 0.0).startswith(f"unknown: {said}")


PROCESS = (
    "<process_info><gpu_instance_id>2</gpu_instance_id><compute_instance_id>0</compute_instance_id>"
    "<pid>4711</pid><type>{}</type></process_info>"
)


@pytest.mark.parametrize(
    ("processes", "said"),
    [
        ("<processes>\n</processes>", ""),
        (f"<processes>{PROCESS.format('C')}</processes>", "MIG instance 2/0 of GPU 0: pid 4711"),
        (f"<processes>{PROCESS.format('G')}</processes>", ""),
        ("<processes>ERR!</processes>", "unknown: processes of GPU 0, which is in MIG mode, read 'ERR!'"),
        ("", "unknown: processes of GPU 0, which is in MIG mode, read ''"),
    ],
)
def test_mig_instances_are_in_use_by_their_processes(
    root: Path, quiet: Callable[[str, str], None], processes: str, said: str
) -> None:
    """In MIG mode there is no utilization (NVML, nvmlDeviceGetUtilizationRates)."""
    quiet("nvidia-smi", _mig(processes))
    assert agent.busy(BUSY, root, 0.0) == said


def test_a_machine_in_mig_mode_is_stopped(
    root: Path, quiet: Callable[[str, str], None], metadata: agent.Metadata
) -> None:
    quiet("nvidia-smi", _mig("<processes></processes>"))
    assert [agent.apply_idle_rule(BUSY, Tags(metadata), root, at) for at in (0.0, 601.0)] == ["", "announced"]


def test_what_is_unknown_comes_first_and_hides_nothing(root: Path, quiet: Callable[[str, str], None]) -> None:
    quiet("loginctl", SESSIONS.format("echo Name=ada; echo Class=user; echo State=online"))
    quiet("nvidia-smi", _gpus("80 %", "ERR!"))
    quiet("gpukiln-gpu", "echo of one >&2; echo two lines >&2; exit 1")
    assert agent.busy(BUSY, root, 0.0) == (
        "unknown: gpukiln-gpu ended with 1: of one two lines; unknown: utilization of GPU 1 reads 'ERR!'; "
        "a session of ada; GPU 0 computes"
    )


@pytest.mark.usefixtures("quiet")
def test_who_asks_is_not_at_work(root: Path, quiet: Callable[[str, str], None]) -> None:
    quiet("loginctl", SESSIONS.format("echo Name=ada; echo Class=user; echo State=active"))
    own = root / "proc/self/cgroup"
    own.write_text("1:name=systemd:/user.slice/user-6000.slice/session-3.scope\n")
    assert agent.busy(BUSY, root, 0.0) == ""
    own.write_text("1:name=systemd:/system.slice/gpukiln-workspace-idle.service\n")
    assert agent.busy(BUSY, root, 0.0) == "a session of ada"


def test_the_book_of_leases_is_read_as_it_is_written() -> None:
    names = {one.name for one in dataclasses.fields(LeasesReport)} | {
        one.name for one in dataclasses.fields(LeaseReport)
    }
    assert {"leases", "id", "user"} <= names


def test_idle_stops_after_it_was_told(
    root: Path, quiet: Callable[[str, str], None], metadata: agent.Metadata
) -> None:
    quiet("wall", f'echo "$@" >> {root}/walls')
    quiet("systemctl", f'echo "$@" >> {root}/stopped')
    aws, config = Tags(metadata), {**BUSY, "tags": True}
    look = [agent.apply_idle_rule(config, aws, root, 60.0 * minute) for minute in range(10)]
    assert look == [""] * 10
    assert aws.tags == [{"gpukiln:busy": ""}]  # once, not each minute
    assert agent.apply_idle_rule(config, aws, root, 600.0) == "announced"
    assert "idle for 10 minutes, this machine stops in one minute" in (root / "walls").read_text()
    assert aws.tags[1:] == [{"gpukiln:stage": "stops: idle for 10 minutes"}]
    quiet("nvidia-smi", _gpus("50 %"))  # somebody came
    assert agent.apply_idle_rule(config, aws, root, 660.0) == ""
    assert aws.tags[2:] == [{"gpukiln:busy": "GPU 0 computes"}, {"gpukiln:stage": "done"}]
    quiet("nvidia-smi", _gpus("0 %"))
    assert [agent.apply_idle_rule(config, aws, root, 700.0 + at) for at in (0, 599, 600, 660)] == [
        "",
        "",
        "announced",
        "stopped",
    ]
    assert (root / "stopped").read_text() == "poweroff\n"


@pytest.mark.usefixtures("quiet")
def test_a_boot_that_goes_on_is_not_idle(root: Path, metadata: agent.Metadata) -> None:
    """A model that is fetched for longer than the rule's minutes."""
    boot = _boot(root, metadata)

    def long() -> None:
        assert [agent.apply_idle_rule(BUSY, Tags(metadata), root, at) for at in (0.0, 601.0, 700.0)] == [
            "",
            "",
            "",
        ]

    assert boot.run([long]) == 0
    assert [agent.apply_idle_rule(BUSY, Tags(metadata), root, at) for at in (701.0, 1302.0)] == [
        "",
        "announced",
    ]


@pytest.mark.usefixtures("quiet")
def test_without_a_rule_it_is_only_said_who_is_there(root: Path, metadata: agent.Metadata) -> None:
    aws, config = Tags(metadata), {**BUSY, "tags": True, "idle_minutes": 0}
    assert [agent.apply_idle_rule(config, aws, root, at) for at in (0.0, 1e6, 2e6)] == ["", "", ""]
    assert aws.tags == [{"gpukiln:busy": ""}]


# --- spot ---


def _hook(root: Path, script: str) -> None:
    file = root / "home" / USER / ".gpukiln/on-interruption"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@AS_ROOT
def test_a_rebalance_recommendation_does_not_take_the_two_minutes(
    root: Path, tree: dict[str, Any], metadata: agent.Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "SPOT_POLL_S", 0.05)
    _hook(
        root,
        f'echo "$1" >> {root}/told; if [ "$1" = rebalance ]; then echo $$ > {root}/pid; exec sleep 60; fi',
    )
    tree["events"] = {"recommendations": {"rebalance": '{"noticeTime": "2026-11-23T00:00:00Z"}'}}
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
    sleep = time.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if (root / "pid").exists():
            tree["spot"] = {"instance-action": json.dumps({"action": "terminate", "time": ends})}

    monkeypatch.setattr(time, "sleep", interrupted)
    began = time.monotonic()
    assert agent.watch_spot(CONFIG, metadata, root) == 0
    assert time.monotonic() - began < 20
    assert (root / "told").read_text() == "rebalance\ninterruption\n"
    os.kill(int((root / "pid").read_text()), 9)


@AS_ROOT
def test_a_hook_ends_before_the_instance_does(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _hook(root, "exec sleep 60")
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 7))
    agent.run_hook(CONFIG, root, "interruption", json.dumps({"action": "terminate", "time": ends}))
    assert "the hook did not end in" in capsys.readouterr().err
    _hook(root, "exit 4")
    agent.run_hook(CONFIG, root, "interruption", "{}")
    assert "the hook ended with 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "least", "most"),
    [("{}", 115, 115), ("no JSON", 115, 115), ('{"time": "2020-01-01T00:00:00Z"}', 1, 1)],
)
def test_how_long_a_hook_may_take(said: str, least: float, most: float) -> None:
    assert least <= agent.seconds_left(said) <= most
