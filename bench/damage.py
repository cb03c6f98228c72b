"""Damages one file of a state folder at a time, and looks what the commands that show and remove make of it.

    scripts/run python -m bench.damage --runs 200 --servers 20

Each run has a copy of a state folder with images in two regions, a channel, a container repository, a build
and a release. One of its files is truncated, emptied, overwritten, removed, or made unreadable (a folder in
its place: root reads everything else). Then `cloud.status`, `ami.list`, `cloud.clean` and
`cloud.clean --yes` are typed; in the runs with a server `cloud.env` too, which starts it, and EC2 itself is
asked. A run is good when no image is lost, each disk that was not the damaged file is there, no command ends
with a traceback, and somebody was told which file it is.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

import boto3

from gpukiln.cli.main import INVOKE
from gpukiln.cli.main import main as type_command
from gpukiln.clouds.embedded import regions
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.errors import GpukilnError
from tests.support.embedded_home import DAMAGES, HERE, THERE, damage, everything, make_home

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    ("cloud.status",),
    ("ami.list",),
    ("cloud.clean",),
    ("cloud.clean", "--yes", "--force"),
)
SILENT = ("*.log", "*.lock", "*/lock")
"""Nothing is read from these: their damage changes nothing."""
MAY_MISS = ("cloud/endpoint.json", "cloud/bases/generation", "releases/*")
"""A new folder has none of these, so nobody can know that one is missing."""


@dataclass(frozen=True)
class Run:
    """One file, damaged in one way, and what came of it.

    Args:
        file: Its path below the state folder.
        how: One of DAMAGES.
        server: Whether the server runs when it is damaged, and is asked afterwards.
        faults: What was not as it should be.
    """

    file: str
    how: str
    server: bool
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    text: str
    code: int


def invoke(home: Path, *command: str) -> Said:
    """Type a command, in a process of its own that has imported most of it already."""
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            code = 99
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.environ["GPUKILN_HOME"] = str(home)
                code = type_command(command, INVOKE)
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:  # as the interpreter's own end would show it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return Said(output.read(), os.waitstatus_to_exitcode(status))


def make_template(folder: Path) -> Layout:
    """A state folder as it is after some use: its files are those of real commands, its disks are small."""
    layout = make_home(folder)
    (layout.bases / "generation").write_text("0")
    text = invoke(folder, "ami.plan", "--region", HERE, "--json").text
    plan, _ = json.JSONDecoder().raw_decode(text[text.index("{\n") :])
    shutil.rmtree(folder / "apt", ignore_errors=True)  # lists that are fetched again
    build = folder / "builds" / "20261122-000000-eks-gpu-abcd"
    build.mkdir(parents=True)
    record = {"schema": 1, "build_id": build.name, "state": "baked", "plan": plan, "durations_s": {}}
    (build / "record.json").write_text(json.dumps(record))
    (build / "lock").touch()
    release = {"cloud": "embedded", "regions": [{"region": HERE}]}
    (folder / "releases").mkdir(exist_ok=True)
    (folder / "releases" / "1.35-stable-b1-release.json").write_text(json.dumps(release))
    invoke(folder, "cloud.env")
    invoke(folder, "cloud.stop")
    return layout


def images_of(home: Path) -> dict[str, set[str]]:
    """Per region what the API says there is."""
    layout = Layout(home)
    url = json.loads(layout.endpoint.read_text())["url"]
    found = {}
    for region in (HERE, THERE):
        ec2 = boto3.session.Session().client(
            "ec2",
            region_name=region,
            endpoint_url=url,
            aws_access_key_id=layout.access_key,
            aws_secret_access_key="x",  # noqa: S106 - the server looks at the key's id
        )
        found[region] = {image["ImageId"] for image in ec2.describe_images()["Images"]}
    return found


def try_one(template: Path, folder: Path, run: Run) -> Run:
    """Damage a file of a copy, and look."""
    home = folder / f"run-{os.getpid()}"
    shutil.copytree(template, home, symlinks=True)
    layout, file = Layout(home), home / run.file
    address = json.loads(layout.endpoint.read_text())  # or it would be known as a copy's
    layout.endpoint.write_text(json.dumps({**address, "home": layout.identity()}))
    wanted = {region: set(document["images"]) for region, document in everything(Layout(template)).items()}
    disks = {disk.name for disk in layout.snapshots.glob("*.raw")} - {file.name}
    faults = []
    try:
        if run.server:
            invoke(home, "cloud.env")
        damage(file, run.how)
        more = [("cloud.env",)] if run.server else []
        more += [("ami.channels",)] if run.file.startswith("releases/") else []
        said = ""
        for command in (*COMMANDS, *more):
            done = invoke(home, *command)
            said += done.text
            if "Traceback" in done.text or done.code not in (0, 4, *([2] if command in more else [])):
                faults.append(f"{' '.join(command)}: {done.code} {done.text[-300:]}")
        quiet = any(Path(run.file).match(pattern) for pattern in SILENT)
        quiet |= run.how == "missing" and any(Path(run.file).match(pattern) for pattern in MAY_MISS)
        if str(file) not in said and f"{file.parent} has no {file.name}" not in said and not quiet:
            faults.append("nobody was told")
        if lost := disks - {disk.name for disk in layout.snapshots.glob("*.raw")}:
            faults.append(f"disks lost: {lost}")
        if (found := _images(layout, run)) != wanted:
            faults.append(f"images: {found}")
    finally:
        if run.server:
            invoke(home, "cloud.stop", "--force")
        shutil.rmtree(home)
    return Run(run.file, run.how, run.server, tuple(faults))


def _images(layout: Layout, run: Run) -> dict[str, set[str]]:
    if run.server and invoke(layout.home, "cloud.env").code == 0:
        return images_of(layout.home)
    with contextlib.suppress(GpukilnError):  # what can't be mended is compared too
        regions.repair_files(layout)
    return {name: set(one["images"]) for name, one in everything(layout).items()}


def every_run(template: Path, servers: int) -> list[Run]:
    """Every file in every way, in an order that a shorter run takes a fair part of."""
    files = sorted(str(file.relative_to(template)) for file in template.rglob("*") if file.is_file())
    runs = [
        Run(file, how, server=False)
        for file in files
        for how in DAMAGES
        if (template / file).stat().st_size or how in ("missing", "unreadable")
    ]
    random.Random(1).shuffle(runs)  # noqa: S311 - the same order each time
    runs.sort(key=lambda run: any(Path(run.file).match(pattern) for pattern in SILENT))
    return [replace(run, server=True) for run in runs[:servers]] + runs


def main() -> int:
    """Run, and print what was not as it should be."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--servers", type=int, default=20, help="of them with a server that runs")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    started, counts, bad = time.monotonic(), Counter[str](), 0
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as name:
        folder = Path(name)
        template = make_template(folder / "template").home
        every = every_run(template, options.servers)
        runs = (every * (options.runs // len(every) + 1))[: options.runs]
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
            for done in pool.map(try_one, repeat(template), repeat(folder), runs):
                counts[done.how] += 1
                bad += bool(done.faults)
                if counts.total() % 20 == 0:
                    print(f"{counts.total()} runs, {bad} bad", file=sys.stderr, flush=True)
                if done.faults:
                    what = f"{done.how} {done.file}{' while it runs' if done.server else ''}"
                    print(f"{what}: {done.faults}", flush=True)
        files = len({run.file for run in runs})
    took = time.monotonic() - started
    print(f"{sum(counts.values())} runs on {files} files ({dict(counts)}), {bad} bad, {took:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
