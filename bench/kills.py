"""Kills `ami.build` with SIGKILL at twenty moments, and looks for what is left after the next `ami.build`.

    scripts/run python -m bench.kills [--seed N] [--from FOLDER] [--only 3,7]

The builds are killed one after the other: the next one removes what the killed one left, before it starts
anything, and is killed in turn. What is looked at: machines, volumes, key pairs, groups, images that no
record knows, snapshots that no image has, and on this computer keys, temporary and partial files, mounts,
processes and records that say that a build goes on. The last `ami.build` has nothing to bake, and must clean
up too. `--from` names a state folder whose base image, stages and compiled modules are copied, which makes
the bakes short. Exit code 1 when anything was left.
"""

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from gpukiln.clouds.tags import BAKED_STAGE_TAG
from gpukiln.files import PARTIAL
from tests.support.harness import command_lines

ROOT = Path(__file__).resolve().parents[1]
REGION = "us-west-2"
FORCED = ("--region", REGION, "--force")
CLEANED = "ok plan"  # what a build says when it has removed what killed ones left
PATIENCE_S = 1500.0
COPIED = ("cloud/regions", "cloud/snapshots", "cloud/access-key", "modules", "apt")


@dataclass(frozen=True)
class Moment:
    """When a build is killed.

    Args:
        words: After a line that holds this.
        at_most_s: Seconds later, at random.
    """

    words: str
    at_most_s: float = 0.0


MOMENTS = (
    Moment(".. plan", 2.0),
    Moment("ok plan"),
    Moment(".. base image"),
    Moment(".. bake"),
    Moment(".. bake", 1.0),
    Moment("Launching a source AWS instance", 1.5),
    Moment("Waiting for instance", 3.0),
    Moment("Connected to SSH", 1.0),
    Moment("gpu_bootstrap :", 5.0),
    Moment("image_record :", 2.0),
    Moment("image_hygiene :", 3.0),
    Moment("Stopping the source instance"),
    Moment("Creating AMI", 0.5),
    Moment("Waiting for AMI to become ready", 1.0),
    Moment("Adding tags to AMI"),
    Moment("ok bake"),
    Moment(".. boot from the image", 8.0),
    Moment(".. verify", 20.0),
    Moment(".. remove the machine", 0.3),
    Moment(".. SBOM and provenance", 0.5),
)


class Build:
    """One `ami.build` whose lines are read as they come.

    Args:
        environment: Of the command.
    """

    def __init__(self, environment: dict[str, str], *options: str) -> None:
        self.lines: list[str] = []
        self._process = subprocess.Popen(
            [str(Path(sys.executable).parent / "invoke"), "ami.build", *options],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(line.rstrip())

    def wait_for(self, words: str) -> bool:
        """Wait for a line that holds the words; whether it came before the build's end."""
        deadline = time.monotonic() + PATIENCE_S
        while not any(words in line for line in self.lines):
            if self._process.poll() is not None:
                self._reader.join()
                return any(words in line for line in self.lines)
            if time.monotonic() > deadline:
                raise SystemExit(f"still no {words!r} after {PATIENCE_S:.0f} s: {self.lines[-3:]}")
            time.sleep(0.05)
        return True

    def kill(self) -> bool:
        """Kill it and all in its process group; whether it still ran."""
        ran = self._process.poll() is None
        if ran:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        return ran

    def end(self) -> int:
        """Wait for its end; its exit code."""
        code = self._process.wait()
        self._reader.join()
        return code


class Here:
    """The state folder, and what can be left in it and around it.

    Args:
        home: The folder.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.environment = {**os.environ, "GPUKILN_HOME": str(home)}
        self._ec2: Any = None

    def records(self) -> dict[str, dict[str, Any]]:
        """Every build's record by the build's id; of one without a record, nothing."""
        files = {folder.name: folder / "record.json" for folder in (self.home / "builds").glob("*")}
        return {name: json.loads(file.read_text()) if file.exists() else {} for name, file in files.items()}

    def ec2(self) -> Any:
        """A client of the embedded cloud, which runs while this does."""
        if self._ec2 is None:
            command = [str(Path(sys.executable).parent / "invoke"), "cloud.env"]
            done = subprocess.run(
                command, cwd=ROOT, env=self.environment, check=True, capture_output=True, text=True
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("export ")]
            said = dict(line.removeprefix("export ").split("=", 1) for line in lines)
            self._ec2 = boto3.client(
                "ec2",
                region_name=REGION,
                endpoint_url=said["AWS_ENDPOINT_URL"],
                aws_access_key_id=said["AWS_ACCESS_KEY_ID"],
                aws_secret_access_key=said["AWS_SECRET_ACCESS_KEY"],
            )
        return self._ec2

    def left(self, known: set[str]) -> list[str]:
        """What builds left that were killed.

        Args:
            known: Their ids; what another build has is being used.
        """
        return [*self._on_the_cloud(known), *self._on_this_computer(known)]

    def _on_the_cloud(self, known: set[str]) -> list[str]:
        ec2, found = self.ec2(), []
        things = [
            ("instance", one["InstanceId"], one)
            for reservation in ec2.describe_instances()["Reservations"]
            for one in reservation["Instances"]
            if one["State"]["Name"] != "terminated"
        ]
        things += [("volume", one["VolumeId"], one) for one in ec2.describe_volumes()["Volumes"]]
        things += [("key pair", one["KeyName"], one) for one in ec2.describe_key_pairs()["KeyPairs"]]
        groups = ec2.describe_security_groups()["SecurityGroups"]
        things += [("group", one["GroupId"], one) for one in groups if one["GroupName"] != "default"]
        for kind, name, one in things:
            build = tags(one).get("gpukiln:build", "")
            if build in known or not build:
                found.append(f"{kind} {name} of {build or 'nobody'}")
        recorded = {(record.get("bake") or {}).get("image_id") for record in self.records().values()}
        images, used = ec2.describe_images(Owners=["self"])["Images"], set()
        for image in images:
            used |= {device.get("Ebs", {}).get("SnapshotId") for device in image["BlockDeviceMappings"]}
            build = next((build for build in known if image["Name"].endswith(build)), "")
            if BAKED_STAGE_TAG in tags(image):
                if image["State"] != "available":
                    found.append(f"stage {image['ImageId']} is {image['State']}")
            elif build and image["ImageId"] not in recorded:
                found.append(f"image {image['ImageId']} {image['Name']}, which no record knows")
        for snapshot in ec2.describe_snapshots(OwnerIds=["self"])["Snapshots"]:
            if snapshot["SnapshotId"] not in used and any(known & set(tags(snapshot).values())):
                found.append(f"snapshot {snapshot['SnapshotId']}, which no image has")
        return found

    def _on_this_computer(self, known: set[str]) -> list[str]:
        found = [
            f"{name} is still {record.get('state', 'without a record')}"
            for name, record in self.records().items()
            if name in known and record.get("state") not in ("verified", "aborted", "failed")
        ]
        for build in known:
            found += map(str, (self.home / "keys").glob(f"{build}*"))
            found += map(str, Path(tempfile.gettempdir()).glob(f"*{build}*"))
            found += map(str, (self.home / "builds" / build).glob(PARTIAL))
            found += map(str, (self.home / "builds" / build).glob("modules"))
            found += map(str, (self.home / "builds" / build).rglob("*.key"))
            mounts = Path("/proc/mounts").read_text().splitlines()
            found += [line for line in mounts if build in line]
            found += [f"process {pid}: {line[:100]}" for pid, line in command_lines() if build in line]
        alive = {
            one["InstanceId"]
            for reservation in self.ec2().describe_instances()["Reservations"]
            for one in reservation["Instances"]
            if one["State"]["Name"] != "terminated"
        }
        machines = [folder for folder in (self.home / "cloud/machines").iterdir() if folder.name not in alive]
        return [*found, *map(str, machines)]

    def clean(self) -> None:
        """Remove the cloud with its images."""
        options = ("--images", "--base", "--volumes", "--force", "--yes")
        command = [str(Path(sys.executable).parent / "invoke"), "cloud.clean", *options]
        subprocess.run(command, cwd=ROOT, env=self.environment, check=True, stdout=subprocess.DEVNULL)


def tags(resource: dict[str, Any]) -> dict[str, str]:
    """The tags of what EC2 describes."""
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


def seeded(home: Path, source: Path | None) -> None:
    """Copy what makes bakes short."""
    for name in COPIED if source else ():
        there = Path(str(source), name)
        if there.exists():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(
                ["cp", "-r", "--sparse=always", "--reflink=auto", str(there), str(home / name)], check=True
            )


def main() -> None:
    """Kill, look, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--only", default="", help="numbers of moments, separated by commas")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)  # noqa: S311 - no secret
    delays = [round(chance.uniform(0, moment.at_most_s), 2) for moment in MOMENTS]
    only = {int(number) for number in arguments.only.split(",") if number} or set(range(1, len(MOMENTS) + 1))
    print(f"seed {arguments.seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/var/tmp"))
    folder.chmod(0o755)  # apt reads its lists there as another user
    here, bad = Here(folder / "home"), 0
    seeded(here.home, arguments.source)
    try:
        pending: list[tuple[str, float]] = []
        for number, (moment, delay) in enumerate(zip(MOMENTS, delays, strict=True), start=1):
            if number not in only:
                continue
            known, started = set(here.records()), time.monotonic()
            build = Build(here.environment, *FORCED)
            if pending and moment.words != ".. plan" and build.wait_for(CLEANED):
                bad += judged(here, known, pending)
                pending = []
            reached = build.wait_for(moment.words)
            time.sleep(delay)
            ran = build.kill()
            state = "killed" if reached and ran else f"NOT KILLED, it ended: {build.lines[-1:]}"
            bad += state != "killed"
            row = f"{number:2} {moment.words!r} + {delay} s ({time.monotonic() - started:.0f} s): {state}"
            pending.append((row, time.monotonic()))
        known = set(here.records())
        last = Build(here.environment, "--region", REGION)
        last.wait_for(CLEANED)
        bad += judged(here, known, pending)
        code = last.end()
        nothing = any("nothing to bake" in line for line in last.lines)
        print(f"the last ami.build: exit {code}, {'nothing to bake' if nothing else last.lines[-1:]}")
        bad += code != 0
        left = here.left(set(here.records()))
        print(f"at the end: {left or 'nothing left'}")
        bad += bool(left)
    finally:
        here.clean()
        shutil.rmtree(folder, ignore_errors=True)
    print("nothing was left" if not bad else f"{bad} rows are bad")
    raise SystemExit(bool(bad))


def judged(here: Here, known: set[str], rows: list[tuple[str, float]]) -> int:
    """Print the rows of builds that were killed with what is left of them now; how many are bad."""
    deadline = time.monotonic() + 20  # processes end when they see that their machine is gone
    while (left := here.left(known)) and time.monotonic() < deadline:
        time.sleep(0.5)
    for row, _ in rows:
        print(f"{row}; left: {left or 'nothing'}", flush=True)
    return bool(left)


if __name__ == "__main__":
    main()
