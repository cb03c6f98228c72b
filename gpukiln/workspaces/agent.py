"""What runs on a workspace's machine: the stages of a boot, the idle rule, the spot watcher.

Sent as one file: Python 3.9 and its standard library. No role brings the AWS CLI or boto3 to an image, so the
few calls to AWS are signed here (Signature Version 4, checked against botocore's own signer in the tests).

    agent.py boot | idle | busy | spot

Each stage may run again, and does at each boot. What became of it is in status.json and in the machine's tag
`gpukiln:stage`: the name of the stage that runs, `failed NAME: words`, or `done`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import grp
import hashlib
import hmac
import itertools
import json
import os
import pathlib
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

CONFIG = "/etc/gpukiln/workspace.json"
COMPOSE = "/etc/gpukiln/compose.yaml"
TOOLCHAIN = "/etc/gpukiln/toolchain.json"
STATE = "/var/lib/gpukiln/workspace"
RUN_FOLDER = "/run/gpukiln/workspace"
ANSIBLE = "/opt/gpukiln/ansible"
CACHE = "/mnt/gpukiln-cache"
STAGE_TAG, BUSY_TAG, DRIVER_TAG = "gpukiln:stage", "gpukiln:busy", "gpukiln:driver"
HOME_TAG = "gpukiln:home"  # the id of the home volume, which is attached while the machine runs
LABEL = "gpukiln-home"
XEN_NAMES = ("xvdf", "sdf")  # the home is attached as /dev/sdf; EC2 user guide, "Device names for volumes"
USER_ID = 6000  # the same on each machine: the home outlives it
GROUPS = ("sudo", "wheel", "docker", "gpu", "video", "render")
# The home volume comes from `workspace.up`, which creates it only once the machine runs: ten minutes of
# grace. IAM shows a new role only after a while, hence the wait for credentials.
HOME_WAIT_S, DEVICE_WAIT_S, RIGHTS_WAIT_S, DRIVER_WAIT_S = 600.0, 180.0, 90.0, 300.0
CALL_S, INSTALL_S, SCRIPT_S = 20.0, 3600.0, 30.0
SPOT_POLL_S, HOOK_S, HOOK_SPARE_S = 5.0, 115.0, 5.0  # EC2 gives two minutes
# File systems keep their headers in the first and RAID its metadata in the last blocks: both ends are read
# whole, the rest in samples.
EDGE_BYTES, SAMPLE_BYTES, SAMPLES = 4 << 20, 64 << 10, 256
GROUP_BYTES = 16 << 20  # EBS grows by GiB
# What counts as use; docs/workspaces.md, "When an idle machine stops", has the reasons.
GPU_PERCENT, CPU_SHARE, BYTES_S = 5, 0.1, 5e6 / 60  # CPU_SHARE: of one processor
SAMPLE_S, TERMINAL_S = 2.0, 120.0
UNKNOWN = "unknown: "
USER_IDS = range(1000, 60001)  # systemd.io, "Users, Groups, UIDs and GIDs on systemd Systems"
# Control groups of work that somebody started: sessions and what is left of them, containers and the daemons
# that pull and build for them, machines, and what `systemd-run` starts. Anything else of root and of system
# accounts is the system's.
USER_CGROUPS = re.compile(r"/(user|machine)\.slice|[0-9a-f]{64}|/(docker|containerd)\.service|/run-[pru]\w+")
MANAGERS = ("systemd", "(sd-pam)")  # of each user, started at a login
VNC_PORT = 6800
TAG_CHARACTERS = 256
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Amazon EFS user guide, "Mount settings used by EFS mount helper"
EFS_OPTIONS = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport"
T = TypeVar("T")


class StageError(Exception):
    """A stage failed; the message has what was found and wanted."""


class PermanentError(StageError):
    """A failure that waiting does not change."""


def check_output(*words: str, timeout: float = CALL_S, env: dict[str, str] | None = None) -> str:
    """The output of a program; StageError where it fails, hangs or is missing."""
    ran = run_program(*words, timeout=timeout, env=env)
    if ran.returncode:
        said = (ran.stderr.strip() or ran.stdout.strip())[-400:]
        raise StageError(f"{words[0]} ended with {ran.returncode}: {said}")
    return ran.stdout


def run_program(
    *words: str, timeout: float = CALL_S, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever its exit code."""
    try:
        return subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StageError(f"{words[0]}: {error}") from None


def retry_until(seconds: float, action: Callable[[], T]) -> T:
    """The value of an action that may fail for some seconds; its last failure when the time is up."""
    end = time.monotonic() + seconds
    while True:
        try:
            return action()
        except StageError as error:
            if time.monotonic() >= end or isinstance(error, PermanentError):
                raise
        time.sleep(1)


class Metadata:
    """Instance metadata, by IMDSv2 alone."""

    def __init__(self, address: str = "") -> None:
        self.address = address or os.environ.get(
            "AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254"
        ).rstrip("/")
        self.token = ""

    def _request(self, path: str, headers: dict[str, str], method: str = "GET") -> str:
        asked = urllib.request.Request(self.address + path, headers=headers, method=method)  # noqa: S310 - http
        with urllib.request.urlopen(asked, timeout=5) as answer:  # noqa: S310 - http, link-local
            return str(answer.read().decode())

    def get(self, path: str) -> str | None:
        """A path below meta-data; None where there is no such thing (404)."""
        # A token that expired answers 401: it is fetched once more, and a second 401 is a failure.
        for fresh in (False, True):
            try:
                if fresh or not self.token:
                    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
                    self.token = self._request("/latest/api/token", ttl, "PUT")
                return self._request(f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self.token})
            except urllib.error.HTTPError as error:
                if error.code == 404:
                    return None
                if error.code != 401 or fresh:
                    raise StageError(f"instance metadata {path}: {error}") from None
            except OSError as error:
                raise StageError(f"instance metadata {path}: {error}") from None
        raise AssertionError("not reached")


def signed_headers(
    service: str,
    region: str,
    url: str,
    headers: dict[str, str],
    body: bytes,
    rights: dict[str, str],
    now: str,
) -> dict[str, str]:
    """Headers of a POST to the root of an endpoint, signed (AWS, "Create a signed AWS API request").

    Args:
        rights: AccessKeyId, SecretAccessKey and Token, as IMDS gives them.
        now: For example 20261123T120000Z.
    """
    full = {**headers, "Host": urllib.parse.urlsplit(url).netloc, "X-Amz-Date": now}
    if rights.get("Token"):
        full["X-Amz-Security-Token"] = rights["Token"]
    named = sorted((name.lower(), value.strip()) for name, value in full.items())
    names = ";".join(name for name, _ in named)
    lines = "".join(f"{name}:{value}\n" for name, value in named)
    canonical = f"POST\n/\n\n{lines}\n{names}\n{hashlib.sha256(body).hexdigest()}"
    scope = f"{now[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = ("AWS4" + rights["SecretAccessKey"]).encode()
    for part in (*scope.split("/"), text):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    full["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={rights['AccessKeyId']}/{scope}, "
        f"SignedHeaders={names}, Signature={key.hex()}"
    )
    return full


class Aws:
    """The three calls that the machine makes, with the credentials of its instance profile."""

    def __init__(self, metadata: Metadata, region: str) -> None:
        self.metadata, self.region = metadata, region

    def _post(self, service: str, headers: dict[str, str], body: bytes, region: str = "") -> str:
        region, folder = region or self.region, "iam/security-credentials/"
        role = (self.metadata.get(folder) or "").strip()
        if not role:
            raise StageError(f"{service}: this machine has no instance profile")
        rights = json.loads(self.metadata.get(folder + role.splitlines()[0]) or "{}")
        if "SecretAccessKey" not in rights:
            raise StageError(f"{service}: instance metadata gives no credentials of {role}")
        url = os.environ.get("AWS_ENDPOINT_URL", "") or f"https://{service}.{region}.{self.domain()}"
        url = url.rstrip("/") + "/"
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        full = signed_headers(service, region, url, headers, body, rights, now)
        asked = urllib.request.Request(url, body, full, method="POST")  # noqa: S310 - of AWS, or configured
        try:
            with urllib.request.urlopen(asked, timeout=CALL_S) as answer:  # noqa: S310 - as above
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:300]
            kind = (
                PermanentError if "NotFound" in said else StageError
            )  # rights may come later, a secret does not
            raise kind(f"{service}: {error.code} {said}") from None
        except OSError as error:
            raise StageError(f"{service}: {error}") from None

    def domain(self) -> str:
        """Of AWS's endpoints: China's differ (EC2 user guide, "Instance metadata categories")."""
        return self.metadata.get("services/domain") or "amazonaws.com"

    def tag(self, tags: dict[str, str]) -> None:
        """Tag this instance."""
        asked = {"Action": "CreateTags", "Version": "2016-11-15"}
        asked["ResourceId.1"] = self.metadata.get("instance-id") or ""
        for number, (name, value) in enumerate(tags.items(), 1):
            asked[f"Tag.{number}.Key"], asked[f"Tag.{number}.Value"] = name, value[:TAG_CHARACTERS]
        form = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
        self._post("ec2", form, urllib.parse.urlencode(asked).encode())

    def secret(self, reference: str) -> str:
        """A secret by its reference: an ARN of Secrets Manager, else the name of an SSM parameter."""
        kind = {"Content-Type": "application/x-amz-json-1.1"}
        if ":secretsmanager:" in reference:
            headers = {**kind, "X-Amz-Target": "secretsmanager.GetSecretValue"}
            asked = json.dumps({"SecretId": reference}).encode()
            region = reference.split(":")[3]  # arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME
            value = json.loads(self._post("secretsmanager", headers, asked, region)).get("SecretString")
        else:
            headers = {**kind, "X-Amz-Target": "AmazonSSM.GetParameter"}
            asked = json.dumps({"Name": reference, "WithDecryption": True}).encode()
            value = json.loads(self._post("ssm", headers, asked))["Parameter"]["Value"]
        if not isinstance(value, str):
            raise StageError(f"{reference} has no text")
        return value


def write(path: pathlib.Path, text: str, mode: int = 0o644) -> None:
    """Write a file atomically; no user reads it whom `mode` excludes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(
        dir=path.parent
    )  # mkstemp makes it 0600: no other user reads a secret before the chmod
    with os.fdopen(descriptor, "w", errors="surrogateescape") as file:
        file.write(text)
    pathlib.Path(name).chmod(mode)
    pathlib.Path(name).replace(path)


def mounts() -> dict[str, tuple[str, str]]:
    """Mount points with their device, as major:minor, and the type of the file system (proc(5))."""
    mount_points = {}
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        before, after = line.split(" - ", 1)
        words = before.split()
        mount_points[words[4].replace("\\040", " ")] = (words[2], after.split()[0])
    return mount_points


def require_memory(path: pathlib.Path) -> None:
    """Refuses a folder that is on a disk."""
    there = mounts()
    for folder in (path.resolve(), *path.resolve().parents):
        if str(folder) in there:
            kind = there[str(folder)][1]
            if kind not in ("tmpfs", "ramfs"):
                raise StageError(f"{path} is on {kind}, wanted memory (tmpfs)")
            return


def find_device(volume: str, root: pathlib.Path) -> pathlib.Path:
    """The disk of an EBS volume: by its serial (Nitro), by udev's link, by the name it has on Xen."""
    serial_wanted = volume.replace("-", "")
    # NVMe shows the volume's id as the serial, without its dash; virtio does so on the embedded cloud.
    for pattern in ("sys/block/*/device/serial", "sys/block/*/serial"):  # NVMe, virtio
        for serial in sorted(root.glob(pattern)):
            if serial.read_text().strip().replace("-", "") == serial_wanted:
                return root / "dev" / serial.relative_to(root / "sys/block").parts[0]
    link = root / "dev/disk/by-id" / f"nvme-Amazon_Elastic_Block_Store_{serial_wanted}"
    if link.exists():
        return link.resolve()
    hypervisor = root / "sys/hypervisor/type"
    # Xen instances (p2, p3, g3) name disks by the letter of the attachment.
    if hypervisor.exists() and hypervisor.read_text().strip() == "xen":  # its disks have no serial
        for name in XEN_NAMES:
            if (root / "dev" / name).exists():
                return root / "dev" / name
    raise StageError(f"{volume} is not attached to this machine, or the kernel has not found it yet")


def is_empty(device: pathlib.Path) -> bool:
    """Whether a disk is empty: blkid finds no signature, and all samples are zeros."""
    # -p probes the device itself: the cache of blkid may be of an earlier disk.
    ran = run_program("blkid", "-p", str(device), timeout=120)
    if ran.returncode == 0:
        return False
    if ran.returncode != 2:  # 8: ambivalent; blkid(8)
        raise StageError(
            f"blkid can't identify the content of {device}: {ran.returncode} {ran.stderr.strip()}"
        )
    with device.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        places = [(0, EDGE_BYTES), (max(size - EDGE_BYTES, 0), EDGE_BYTES)]
        places += [(size * number // SAMPLES, SAMPLE_BYTES) for number in range(1, SAMPLES)]
        for start, length in places:
            file.seek(start)
            data = file.read(length)
            if data.count(0) != len(data):
                raise StageError(f"{device} has data in an unknown format; it is not formatted")
    return True


def prepare_disk(device: pathlib.Path) -> None:
    """Format an empty disk with ext4, or repair and grow an existing home; refuse any other content."""
    if is_empty(device):
        check_output("mkfs.ext4", "-q", "-L", LABEL, str(device), timeout=INSTALL_S)
        return
    exported = check_output("blkid", "-p", "-o", "export", str(device), timeout=120)
    said = dict(line.split("=", 1) for line in exported.splitlines() if "=" in line)
    if (said.get("TYPE"), said.get("LABEL")) != ("ext4", LABEL):
        table = f"a partition table ({said['PTTYPE']})" if "PTTYPE" in said else ""
        what = " ".join(filter(None, (said.get("TYPE"), said.get("LABEL"), table)))
        expected = f"nothing, or ext4 with the label {LABEL}"
        raise StageError(f"{device} has {what}, wanted {expected}; it is left as it is")
    # resize2fs insists on a forced check of an unmounted file system (resize2fs(8)).
    grown = has_grown(device)
    ran = run_program("e2fsck", "-p", *(["-f"] if grown else []), str(device), timeout=INSTALL_S)
    if (
        ran.returncode & ~3
    ):  # 1: errors corrected; 2: the same, and a root file system needs a reboot; e2fsck(8)
        raise StageError(
            f"e2fsck -p of {device} ended with {ran.returncode}: {(ran.stdout + ran.stderr).strip()[-300:]}; "
            "it is not mounted; run `e2fsck` on this machine to repair it"
        )
    if grown:
        check_output("resize2fs", str(device), timeout=INSTALL_S)


def has_grown(device: pathlib.Path) -> bool:
    """Whether a disk is larger than its file system."""
    superblock = check_output("dumpe2fs", "-h", str(device), timeout=120)
    said = dict(line.split(":", 1) for line in superblock.splitlines() if ":" in line)
    has = int(said["Block count"]) * int(said["Block size"])
    with device.open("rb") as file:
        return file.seek(0, os.SEEK_END) - has >= GROUP_BYTES


def mount_home(device: pathlib.Path, path: pathlib.Path) -> None:
    """Mount the home and grow it to its volume; a mounted home stays mounted."""
    number = device.stat().st_rdev
    device_number = f"{os.major(number)}:{os.minor(number)}"
    path.mkdir(parents=True, exist_ok=True)
    there = mounts().get(str(path))
    if there is None:
        prepare_disk(device)
        check_output("mount", "-t", "ext4", "-o", "nosuid,nodev", str(device), str(path), timeout=120)
    elif there[0] != device_number:
        raise StageError(f"{path} has the device {there[0]}, wanted {device_number} ({device})")
    elif has_grown(device):
        check_output("resize2fs", str(device), timeout=INSTALL_S)


def read_secrets(root: pathlib.Path) -> dict[str, str]:
    """The secrets that this boot fetched."""
    folder = root / RUN_FOLDER.lstrip("/") / "secrets"
    return {file.name: file.read_text() for file in sorted(folder.glob("*"))}


def environment(config: dict[str, Any], root: pathlib.Path) -> dict[str, str]:
    """Of what runs as the user."""
    cuda = root / "usr/local/cuda/bin"
    path = os.environ.get("PATH", SYSTEM_PATH)
    return {
        "PATH": f"{cuda}:{path}" if cuda.is_dir() else path,
        "HOME": str(root / "home" / config["user"]),
        "USER": config["user"],
        "LOGNAME": config["user"],
        "SHELL": "/bin/bash",
        **config["env"],
        **read_secrets(root),
    }


def start_as_user(config: dict[str, Any], root: pathlib.Path, *words: str) -> subprocess.Popen[bytes]:
    """A program that begins to run as the user, with the user's groups, in a session of its own."""
    account = pwd.getpwnam(config["user"])
    # setpriv, not su: no PAM session is opened, which would count as a login for the idle rule.
    rights = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups", "--"]
    env = environment(config, root)
    try:
        return subprocess.Popen(
            [*rights, *words], stdin=subprocess.DEVNULL, env=env, cwd=env["HOME"], start_new_session=True
        )
    except OSError as error:
        raise StageError(f"{words[0]}: {error}") from None


def driver_version(root: pathlib.Path, count: int) -> str:
    """The driver's version; Failed until it answers for so many GPUs."""
    if shutil.which("nvidia-smi"):
        said = check_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        versions = [line.strip() for line in said.splitlines() if line.strip()]
    else:
        module = root / "proc/driver/nvidia/version"
        said = module.read_text() if module.exists() else ""
        version_match = re.search(r"Kernel Module(?: for \S+)?\s+([0-9.]+)", said)
        if not version_match:
            raise StageError("this machine has neither nvidia-smi nor NVIDIA's kernel module")
        versions = [version_match[1] for _ in (root / "dev").glob("nvidia[0-9]*")]
    if len(versions) < count:
        raise StageError(f"the driver shows {len(versions)} GPUs, wanted {count}")
    return versions[0]


def install(package: str) -> None:
    """A package of the distribution; Failed where it has none of that name."""
    if shutil.which("apt-get"):
        # At the first boot apt-daily or cloud-init may hold the lock.
        apt = ["apt-get", "-o", "DPkg::Lock::Timeout=600"]
        check_output(*apt, "update", timeout=INSTALL_S)
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        words = [*apt, "install", "--yes", "--no-install-recommends", package]
        check_output(*words, timeout=INSTALL_S, env=quiet)
    else:
        check_output("dnf", "install", "--assumeyes", package, timeout=INSTALL_S)


def python_for_ansible() -> str:
    """A Python that ansible-core supports, with venv; empty where there is none."""
    enough = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        if shutil.which(name) and run_program(name, "-c", enough).returncode == 0:
            return name
    return ""


class Boot:
    """The stages of a boot; each may run again."""

    def __init__(self, config: dict[str, Any], metadata: Metadata, root: pathlib.Path) -> None:
        self.config, self.metadata, self.root = config, metadata, root
        self.aws = Aws(metadata, config["region"])
        self.user: str = config["user"]
        self.home_path = root / "home" / self.user
        self.memory = root / RUN_FOLDER.lstrip("/")
        self.status: dict[str, Any] = {"stages": [], "state": "running"}
        self.script_process: subprocess.Popen[bytes] | None = None

    def stages(self) -> list[Callable[[], str | None]]:
        """In their order; the text that a stage returns is reported with it."""
        return [
            self.home,
            self.roles,
            self.identity,
            self.secrets,
            self.cache,
            self.driver,
            self.desktop,
            self.services,
            self.script,
        ]

    def run(self, stages: list[Callable[[], str | None]]) -> int:
        """Run the stages in order until one fails; then wait for the agent script, if it still runs."""
        for stage in stages:
            name = stage.__name__
            self.report(name, "running")
            try:
                words = stage() or ""
            except StageError as error:
                return self.fail(name, str(error))
            except Exception as error:  # any other failure must reach status.json and the tag, too
                return self.fail(name, f"{type(error).__name__}: {error}")
            self.report(name, "done", words)
        self.status["state"] = "done"
        self.report("", "done")
        if self.script_process and (code := self.script_process.wait()):
            return self.fail("script", f"it ended with {code} (journalctl -u gpukiln-workspace)")
        return 0

    def fail(self, name: str, words: str) -> int:
        self.status["state"] = "failed"
        self.report(name, "failed", words)
        return 1

    def report(self, stage: str, state: str, words: str = "") -> None:
        """Report a stage in status.json and, if permitted, in the machine's tag; both without secrets."""
        for value in read_secrets(self.root).values():
            words = words.replace(value, "***") if value else words
        print(f"{stage or 'all'}: {state} {words}".strip(), file=sys.stderr, flush=True)
        if stage:
            stages = [entry for entry in self.status["stages"] if entry["stage"] != stage]
            entry = {"stage": stage, "state": state, "why": words, "at": round(time.time(), 1)}
            self.status["stages"] = [*stages, entry]
        self.note()
        if state == "failed":
            self.tag({STAGE_TAG: f"failed {stage}: {words}"})
        elif not stage:
            self.tag({STAGE_TAG: "done"})
        elif state == "running" and "tag_error" not in self.status:  # each try may take CALL_S
            self.tag({STAGE_TAG: stage})

    def note(self) -> None:
        write(self.root / STATE.lstrip("/") / "status.json", json.dumps(self.status, indent=1) + "\n")

    def tag(self, tags: dict[str, str]) -> None:
        """Tag this machine; a failure is recorded in status.json and stops nothing."""
        if not self.config["tags"]:
            return
        try:
            self.aws.tag(tags)
            self.status.pop("tag_error", None)
        except StageError as error:
            self.status["tag_error"] = str(error)
            self.note()

    def home(self) -> None:
        """The user, and the volume at the user's home."""
        self.make_user()
        if self.config["home"]:
            volume = retry_until(HOME_WAIT_S, self.home_volume)
            mount_home(retry_until(DEVICE_WAIT_S, lambda: find_device(volume, self.root)), self.home_path)
        # Without a home volume it is a folder of the root disk.
        self.home_path.mkdir(parents=True, exist_ok=True)
        account = pwd.getpwnam(self.user)
        if not {path.name for path in self.home_path.iterdir()} - {"lost+found"}:
            for path in (self.root / "etc/skel").glob("*"):
                copy = str(self.home_path / path.name)
                check_output("cp", "--archive", "--no-target-directory", str(path), copy)
                check_output(
                    "chown", "--recursive", "--no-dereference", f"{account.pw_uid}:{account.pw_gid}", copy
                )
            self.home_path.chmod(0o750)
        os.chown(self.home_path, account.pw_uid, account.pw_gid)

    def home_volume(self) -> str:
        """The home volume's id: `workspace.up` creates and attaches it while the machine boots."""
        if said := (self.metadata.get(f"tags/instance/{HOME_TAG}") or "").strip():
            return said
        raise StageError(f"no tag {HOME_TAG} names a home volume after {HOME_WAIT_S:.0f} s")

    def make_user(self) -> None:
        """Create the user with the uid that owns the files in the home."""
        try:
            account = pwd.getpwnam(self.user)
        except KeyError:
            if not any(
                group.gr_name == self.user for group in grp.getgrall()
            ):  # of a run that was interrupted
                check_output("groupadd", "--gid", str(USER_ID), self.user)
            numbers = ["--uid", str(USER_ID), "--gid", str(USER_ID)]
            home = ["--no-create-home", "--home-dir", str(self.home_path)]
            check_output("useradd", *numbers, *home, "--shell", "/bin/bash", self.user)
            return
        if account.pw_uid != USER_ID:
            other = f"wanted uid {USER_ID}: choose another owner"
            raise StageError(f"{self.user} is an account of this image (uid {account.pw_uid}), {other}")

    def roles(self) -> str:
        """Run the roles of gpukiln on an image that it did not build, by ansible-pull of one commit."""
        if not (roles_config := self.config["roles"]):
            return ""
        pull = self.root / ANSIBLE.lstrip("/") / "bin/ansible-pull"
        if not shutil.which("git"):
            install("git")
        if not pull.exists():
            self.install_ansible(pull, roles_config["packages"])
        words = [
            "-U",
            roles_config["url"],
            "-C",
            roles_config["commit"],
            "-d",
            str(pull.parents[2] / "roles"),
        ]
        words += ["-i", "localhost,", "-c", "local", "ansible/node.yml"]
        path = f"{pull.parent}:{os.environ.get('PATH', SYSTEM_PATH)}"
        # systemd gives a system's unit no HOME; the system's Python has the bindings of apt and dnf.
        env = {**os.environ, "HOME": "/root", "PATH": path, "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3"}
        check_output(str(pull), *words, timeout=INSTALL_S, env=env)
        return f"those of {roles_config['commit']}"

    def install_ansible(self, pull: pathlib.Path, packages: list[str]) -> None:
        """Install into a virtual environment, which is removed on a failure."""
        interpreter = python_for_ansible()
        for package in ("python3-venv", "python3.11-venv", "python3.11"):  # Debian 12, Ubuntu 22.04, AL2023
            if not interpreter:
                with contextlib.suppress(StageError):
                    install(package)
                interpreter = python_for_ansible()
        if not interpreter:
            raise StageError(
                "ansible-core needs Python 3.11 or later with venv, and no package of this system provides it"
            )
        folder = pull.parents[1]
        shutil.rmtree(folder, ignore_errors=True)
        try:
            check_output(interpreter, "-m", "venv", str(folder), timeout=300)
            words = ["install", "--no-input", "--disable-pip-version-check", *packages]
            check_output(str(folder / "bin/pip"), *words, timeout=INSTALL_S)
        except StageError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def identity(self) -> None:
        """The user's groups and key; the toolchain that the workspace was made for."""
        # Groups that the image has not are skipped: docker and gpu come with roles.
        groups = [name for name in GROUPS if any(group.gr_name == name for group in grp.getgrall())]
        if groups:
            check_output("usermod", "--append", "--groups", ",".join(groups), self.user)
        rules = self.root / "etc/sudoers.d"
        if rules.is_dir():  # the user has no password
            write(rules / "gpukiln-workspace", f"{self.user} ALL=(ALL) NOPASSWD:ALL\n", 0o440)
        if self.config["toolchain"]:
            write(self.root / TOOLCHAIN.lstrip("/"), json.dumps(self.config["toolchain"], indent=1) + "\n")
        if key := self.metadata.get("public-keys/0/openssh-key"):
            self.allow(key.strip())

    def allow(self, key: str) -> None:
        """Add this machine's key to the user's own; remove the key of an earlier machine."""
        mark = "gpukiln-workspace"
        file = self.home_path / ".ssh" / "authorized_keys"
        file.parent.mkdir(mode=0o700, exist_ok=True)
        # surrogateescape: keys of the user may have comments in any encoding.
        kept = file.read_text(errors="surrogateescape").splitlines() if file.exists() else []
        lines = [line for line in kept if not line.endswith(f" {mark}")]
        write(file, "".join(f"{line}\n" for line in (*lines, f"{key} {mark}")), 0o600)
        account = pwd.getpwnam(self.user)
        for path in (file.parent, file):
            os.chown(path, account.pw_uid, account.pw_gid)

    def secrets(self) -> None:
        """Fetch secrets into tmpfs: a file each, and one for the services. IAM may take effect later."""
        folder = self.memory / "secrets"
        shutil.rmtree(folder, ignore_errors=True)
        (self.memory / "env").unlink(missing_ok=True)
        folder.mkdir(parents=True, mode=0o700)
        require_memory(folder)
        references = self.config["secrets"]
        values = {}
        for name, reference in references.items():
            values[name] = retry_until(RIGHTS_WAIT_S, functools.partial(self.aws.secret, reference))
        # Compose reads the file as NAME='VALUE', one a line.
        bad = [name for name, value in values.items() if "\n" in value or "'" in value]
        if bad and self.config["compose"]:
            raise StageError(f"{', '.join(bad)}: an env file of services can't hold quotes or line breaks")
        account = pwd.getpwnam(self.user)
        files = {folder / name: value for name, value in values.items()}
        if not bad:
            files[self.memory / "env"] = "".join(f"{name}='{value}'\n" for name, value in values.items())
        for path, text in files.items():
            write(path, text, 0o600)
            os.chown(path, account.pw_uid, account.pw_gid)
        os.chown(folder, account.pw_uid, account.pw_gid)

    def cache(self) -> str:
        """An EFS file system as artifact cache; one on S3 needs no more than its name."""
        if not (name := self.config["efs"]):
            return ""
        path = self.root / CACHE.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        if str(path) not in mounts():
            source = f"{name}.efs.{self.config['region']}.{self.aws.domain()}:/"
            check_output("mount", "-t", "nfs4", "-o", EFS_OPTIONS, source, str(path), timeout=120)
        shared = path / "gpukiln"  # the file system's root is root's
        shared.mkdir(exist_ok=True)
        os.chown(shared, USER_ID, USER_ID)
        return f"{name} at {path}"

    def driver(self) -> str:
        """Wait until the driver reports the requested GPUs."""
        if not (count := self.config["gpus"]):
            return "no GPU requested"
        version = retry_until(DRIVER_WAIT_S, lambda: driver_version(self.root, count))
        self.tag({DRIVER_TAG: version})
        return version

    def desktop(self) -> None:
        """KasmVNC for the user, where the image has it."""
        if not self.config["desktop"]:
            return
        unit = f"kasmvnc@{self.user}.service"
        if run_program("systemctl", "cat", unit).returncode:
            raise StageError("this image has no KasmVNC: bake one with the role kasmvnc")
        check_output("systemctl", "enable", "--now", unit, timeout=120)

    def services(self) -> str:
        """Start the services' containers; `workspace.status --deep` checks their health."""
        path = self.root / COMPOSE.lstrip("/")
        if not self.config["compose"]:
            path.unlink(missing_ok=True)
            return ""
        write(path, self.config["compose"])
        if shutil.which("docker") and run_program("docker", "compose", "version").returncode == 0:
            compose = ["docker", "compose"]
        elif shutil.which("docker-compose"):
            compose = ["docker-compose"]
        else:
            raise StageError(
                "wanted Docker with its compose plugin, or docker-compose; this image has neither"
            )
        words = ["--project-name", "gpukiln", "--file", str(path), "up", "--detach", "--remove-orphans"]
        check_output(*compose, *words, timeout=INSTALL_S)
        return f"by {' '.join(compose)}"

    def script(self) -> str:
        """Run the agent script as the user; a script that keeps running, such as Coder's, is watched."""
        if not self.config["script"]:
            return ""
        path = self.root / STATE.lstrip("/") / "script"
        write(path, self.config["script"], 0o700)  # it may hold a token
        account = pwd.getpwnam(self.user)
        os.chown(path, account.pw_uid, account.pw_gid)
        process = start_as_user(self.config, self.root, "bash", str(path))
        try:
            code = process.wait(SCRIPT_S)
        except subprocess.TimeoutExpired:
            self.script_process = process
            return "it goes on"
        if code:
            raise StageError(f"it ended with {code} (journalctl -u gpukiln-workspace)")
        return ""


def sessions(root: pathlib.Path) -> Iterator[str]:
    """Sessions other than the caller's: of logind, of Session Manager, or at a terminal in use."""
    # A deep look logs in by SSH itself and must not count as use.
    own = root / "proc/self/cgroup"
    asking = re.search(r"session-(\w+)\.scope", own.read_text() if own.exists() else "")
    # `list-sessions` has no state of a session; `show-session` has.
    for line in check_output("loginctl", "list-sessions", "--no-legend").splitlines():
        if asking and line.split()[0] == asking[1]:
            continue
        words = ["-p", "Name", "-p", "Class", "-p", "State"]
        said = check_output("loginctl", "show-session", line.split()[0], *words).splitlines()
        properties = dict(row.split("=", 1) for row in said if "=" in row)
        # closing: only what a user left running is there
        if properties.get("Class", "user").startswith("user") and properties.get("State") != "closing":
            yield f"a session of {properties.get('Name', '?')}"
    for file in root.glob("proc/[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            if file.read_text().strip() == "ssm-session-worker"[:15]:  # the kernel keeps 15 characters
                yield "a session of session manager"
    for terminal in root.glob("dev/pts/[0-9]*"):
        with contextlib.suppress(OSError):
            terminal_stat = terminal.stat()
            # root's is the console's, where nobody is logged in
            if (
                terminal_stat.st_uid
                and time.time() - max(terminal_stat.st_atime, terminal_stat.st_mtime) < TERMINAL_S
            ):
                yield "a terminal"


def has_connection(root: pathlib.Path, port: int) -> bool:
    """Whether a client is connected to a port of this machine (proc_net_tcp.rst: 01 is established)."""
    for name in ("tcp", "tcp6"):
        file = root / "proc/net" / name
        for line in file.read_text().splitlines()[1:] if file.exists() else ():
            words = line.split()
            if int(words[1].rsplit(":", 1)[1], 16) == port and words[3] == "01":
                return True
    return False


def leases() -> list[str]:
    """Whose leases of GPUs there are; a machine without gpukiln-gpu has none."""
    if not shutil.which("gpukiln-gpu"):
        return []
    document = json.loads(check_output("gpukiln-gpu", "leases", "--json"))
    return [f"{lease['id']} of {lease['user']}" for node in document["nodes"] for lease in node["leases"]]


class ProcessUse(NamedTuple):
    """A process that a user started, and what it used so far; with it, its children that have ended."""

    words: str
    cpu_s: float
    disk_bytes: int


def processes(root: pathlib.Path) -> dict[str, ProcessUse]:
    """By process id and time of start; without this process and those that it was started by.

    The load average and /proc/stat of a container are its host's, and neither says whose work it is.
    """
    if not (root / "proc/self/io").exists():
        raise StageError("this kernel does not count what processes read and write: it has no /proc/self/io")
    processes_by_key, parents = {}, {}
    for folder in root.glob("proc/[0-9]*"):
        # A process that has ended meanwhile has no files, or can't be read (ESRCH)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # proc_pid_stat(5), behind the name, which may have spaces: 4 is the parent, 14 to 17 the times of
            # the process and of its children, 22 the start
            pid, _, rest = (folder / "stat").read_text().partition(" (")
            name, _, rest = rest.rpartition(") ")
            words = rest.split()
            parents[pid] = words[1]
            uid = int(re.findall(r"^Uid:\s+(\d+)", (folder / "status").read_text(), re.M)[0])
            groups = (folder / "cgroup").read_text()
            if name in MANAGERS or not (uid in USER_IDS or USER_CGROUPS.search(groups)):
                continue
            disk = re.findall(r"^(?:read|write)_bytes: (\d+)", (folder / "io").read_text(), re.M)
            ticks = sum(map(int, words[11:15]))
            processes_by_key[f"{pid} {words[19]}"] = ProcessUse(
                f"{name} (pid {pid}) of {user_name(uid)}",
                ticks / os.sysconf("SC_CLK_TCK"),
                sum(map(int, disk)),
            )
    own, asking = str(os.getpid()), set()
    while own in parents and own not in asking:
        asking.add(own)
        own = parents[own]
    return {key: process for key, process in processes_by_key.items() if key.split()[0] not in asking}


def user_name(uid: int) -> str:
    """The name of a user, or its number where it is a container's."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def traffic(root: pathlib.Path) -> int:
    """Bytes that the network interfaces sent and received: not bridges, nor what is attached to them."""
    total, interfaces = 0, list(root.glob("sys/class/net/*"))
    if not interfaces:
        raise StageError("/sys/class/net names no network interface")
    for interface in interfaces:
        inner = (interface / "bridge").exists() or (interface / "master").exists()
        if interface.name != "lo" and ((interface / "device").exists() or not inner):
            total += sum(int((interface / "statistics" / f"{way}_bytes").read_text()) for way in ("rx", "tx"))
    return total


def has_peer(root: pathlib.Path, pid: str) -> bool:
    """Whether a process is connected to another machine (proc_net_tcp.rst)."""
    folder, own = root / "proc" / pid, set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                own.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))  # noqa: PTH115 - no path
        for name in ("tcp", "tcp6", "udp", "udp6") if own else ():
            file = folder / "net" / name
            for line in file.read_text().splitlines()[1:] if file.exists() else ():
                words = line.split()
                # 127.0.0.0/8, also as IPv6 maps it, and ::1: each word of 32 bits is little-endian
                here = re.fullmatch("(0{16}FFFF0000)?.{6}7F|0{24}01000000", words[2].partition(":")[0])
                if words[9] in own and words[3] == "01" and not here:
                    return True
    return False


def counters(root: pathlib.Path, now: float) -> dict[str, Any]:
    """Totals since the start of the machine and of each process."""
    return {"at": now, "bytes": traffic(root), "processes": processes(root)}


def resource_use(root: pathlib.Path, now: float, *, keep: bool) -> Iterator[str]:
    """Resources that users' processes used since the last kept sample; without one, during SAMPLE_S."""
    file = root / RUN_FOLDER.lstrip("/") / "counters"  # of this boot alone
    last = json.loads(file.read_text()) if file.exists() else counters(root, now)
    if now - last["at"] < SAMPLE_S:
        time.sleep(SAMPLE_S)
        now += SAMPLE_S
    current = counters(root, now)
    if keep:
        write(file, json.dumps(current))
    seconds = now - last["at"]
    cpu: dict[str, float] = {}
    disk: dict[str, float] = {}
    for key, process in current["processes"].items():
        _, cpu_s, disk_bytes = last["processes"].get(key, ("", 0.0, 0))
        cpu[process.words], disk[process.words] = process.cpu_s - cpu_s, process.disk_bytes - disk_bytes
    for what, used, least in (("processors", cpu, CPU_SHARE), ("disk", disk, BYTES_S)):
        if sum(used.values()) > least * seconds:
            yield f"{what}: {max(used.items(), key=lambda item: item[1])[0]}"
    # What the system itself transfers, updates for example, is no use
    if current["bytes"] - last["bytes"] > BYTES_S * seconds:
        peers = (
            process.words for key, process in current["processes"].items() if has_peer(root, key.split()[0])
        )
        yield from (f"network: {words}" for words in itertools.islice(peers, 1))


def gpu_use() -> Iterator[str]:
    """Which GPUs compute.

    NVML has no utilization in MIG mode (nvmlDeviceGetUtilizationRates: "On MIG-enabled GPUs, querying device
    utilization rates is not currently supported"): there each compute process that has an instance counts.
    """
    gpus = list(ET.fromstring(check_output("nvidia-smi", "-q", "-x")).iter("gpu"))  # noqa: S314 - of the driver
    if not gpus:
        yield f"{UNKNOWN}nvidia-smi shows no GPU"
    for number, gpu in enumerate(gpus):

        def said(of: ET.Element, path: str) -> str:
            return (of.findtext(path) or "").strip()

        if said(gpu, "mig_mode/current_mig") != "Enabled":
            text = said(gpu, "utilization/gpu_util")
            percent = re.fullmatch(r"(\d+) ?%", text)
            if not percent:
                yield f"{UNKNOWN}utilization of GPU {number} reads {text!r}"
            elif int(percent[1]) >= GPU_PERCENT:
                yield f"GPU {number} computes"
            continue
        listed = gpu.findall("processes/process_info")
        if not listed and (gpu.find("processes") is None or said(gpu, "processes")):
            yield f"{UNKNOWN}processes of GPU {number}, which is in MIG mode, read {said(gpu, 'processes')!r}"
        for process in listed:
            if "C" in said(process, "type"):  # C, and C+G; G draws alone
                where = f"{said(process, 'gpu_instance_id')}/{said(process, 'compute_instance_id')}"
                yield f"MIG instance {where} of GPU {number}: pid {said(process, 'pid')}"


def busy(config: dict[str, Any], root: pathlib.Path, now: float, *, keep: bool = False) -> str:
    """Why the machine is in use; empty: it is idle. A reading that fails counts as use, and comes first.

    Args:
        now: Of a monotonic clock.
        keep: Whether the next look counts from this one.
    """

    def desktop() -> Iterator[str]:
        if config["desktop"] and has_connection(root, VNC_PORT):
            yield "the desktop"

    def held() -> Iterator[str]:
        if listed := leases():
            yield "leases: " + ", ".join(listed)

    reasons: list[str] = []
    looks = [sessions(root), desktop(), held(), *([gpu_use()] if config["gpus"] else [])]
    for look in (*looks, resource_use(root, now, keep=keep)):
        try:
            reasons += sorted(set(look))
        except (StageError, OSError, ValueError, LookupError, ET.ParseError) as error:
            reasons.append(UNKNOWN + " ".join(str(error).split()))
    return "; ".join(sorted(reasons, key=lambda reason: not reason.startswith(UNKNOWN)))


def apply_idle_rule(config: dict[str, Any], aws: Aws, root: pathlib.Path, now: float) -> str:
    """Check once a minute whether the machine is idle, and stop it; returns what was done.

    After `idle_minutes` without use the first look announces the stop, and the next one stops the machine.
    Its shutdown behaviour is to stop, so the disks stay.
    """
    memory = root / RUN_FOLDER.lstrip("/")  # of this boot alone
    since, announced, last = memory / "idle-since", memory / "idle-announced", memory / "busy"
    reason = busy(config, root, now, keep=True)
    if config["tags"] and (not last.exists() or last.read_text() != reason):
        try:
            aws.tag({BUSY_TAG: reason})
            write(last, reason)
        except StageError as error:
            print(error, file=sys.stderr)
    if not config["idle_minutes"]:
        return ""
    if reason or is_booting(root):
        since.unlink(missing_ok=True)
        if announced.exists():
            announced.unlink()
            announce(config, aws, "done", "gpukiln: this machine is in use again and does not stop")
        return ""
    if not since.exists():
        write(since, str(now))
    lasted = (now - float(since.read_text())) / 60
    if lasted < config["idle_minutes"]:
        return ""
    words = f"idle for {lasted:.0f} minutes"
    if not announced.exists():
        announce(config, aws, f"stops: {words}", f"gpukiln: {words}, this machine stops in one minute")
        write(announced, words)
        return "announced"
    check_output("systemctl", "poweroff")
    return "stopped"


def is_booting(root: pathlib.Path) -> bool:
    """Whether the stages of this boot still run: a machine that downloads a model is not idle."""
    file = root / STATE.lstrip("/") / "status.json"
    return file.exists() and json.loads(file.read_text())["state"] == "running"


def announce(config: dict[str, Any], aws: Aws, tag: str, words: str) -> None:
    """Announce it on the terminals of the machine, and in its tag."""
    with contextlib.suppress(StageError):
        check_output("wall", words)
    if config["tags"]:
        try:
            aws.tag({STAGE_TAG: tag})
        except StageError as error:
            print(error, file=sys.stderr)


def spot_notice(metadata: Metadata) -> tuple[str, str]:
    """EC2's notice about the end of a spot instance: its kind and document; empty: none yet."""
    for path, kind in (
        ("spot/instance-action", "interruption"),
        ("events/recommendations/rebalance", "rebalance"),
    ):
        if said := metadata.get(path):
            return kind, said
    return "", ""


def seconds_left(said: str) -> float:
    """Seconds until the instance ends, less a reserve, from a notice of interruption."""
    try:
        ends = datetime.datetime.strptime(json.loads(said)["time"], "%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, KeyError, TypeError):
        return HOOK_S
    left = ends.replace(tzinfo=datetime.timezone.utc).timestamp() - time.time()
    return min(max(left - HOOK_SPARE_S, 1), HOOK_S)


def watch_spot(config: dict[str, Any], metadata: Metadata, root: pathlib.Path) -> int:
    """Watch until a notice of interruption; the user's hook runs once for each kind of notice.

    The hook of a rebalance recommendation runs in the background: an interruption notice may follow it.
    """
    seen_kinds: set[str] = set()
    while True:
        try:
            kind, said = spot_notice(metadata)
        except StageError as error:
            print(error, file=sys.stderr)
            kind, said = "", ""
        if kind and kind not in seen_kinds:
            seen_kinds.add(kind)
            print(f"{kind}: {said}", file=sys.stderr, flush=True)
            run_hook(config, root, kind, said)
        if kind == "interruption":
            return 0
        time.sleep(SPOT_POLL_S)


def run_hook(config: dict[str, Any], root: pathlib.Path, kind: str, said: str) -> None:
    """Run the user's hook, if there is one: ~/.gpukiln/on-interruption KIND DOCUMENT."""
    hook = root / "home" / config["user"] / ".gpukiln" / "on-interruption"
    if not hook.exists():
        return
    try:
        process = start_as_user(config, root, str(hook), kind, said)
    except StageError as error:
        print(f"the hook: {error}", file=sys.stderr)
        return
    if kind != "interruption":
        return
    left = seconds_left(said)
    try:
        print(f"the hook ended with {process.wait(left)}", file=sys.stderr)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        print(f"the hook did not end in {left:.0f} s", file=sys.stderr)


def main(words: list[str]) -> int:
    """One of boot, idle and spot."""
    config = json.loads(pathlib.Path(CONFIG).read_text())
    metadata, root = Metadata(), pathlib.Path("/")
    try:
        if words == ["boot"]:
            boot = Boot(config, metadata, root)
            return boot.run(boot.stages())
        if words == ["idle"]:
            apply_idle_rule(config, Aws(metadata, config["region"]), root, time.monotonic())
            return 0
        if words == ["busy"]:
            print(busy(config, root, time.monotonic()))
            return 0
        if words == ["spot"]:
            return watch_spot(config, metadata, root)
    except StageError as error:
        print(error, file=sys.stderr)
        return 1
    print("agent.py boot | idle | busy | spot", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
