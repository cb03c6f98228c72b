"""What builds cost against the same work by hand and by other builders, in one run: ratios, no times.

    scripts/run python -m bench.bake [--only floor,cold,...]

Every row is in bench/rows.py, with the bar that it is held against; bench/README.md says what each of them
does. gpukiln's rows run in a copy of this checkout, which is changed as a user would change it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.hand import by_hand
from bench.others import DiskImageBuilder, Mkosi
from bench.rows import ROWS, Measured, VoidError, chosen, table

ROOT = Path(__file__).resolve().parents[1]
PROOF = ("boot from the image", "verify", "remove the machine")
EVERY_ROLE = ("--force", "--stages", "off")
"""Options of ami.build with which every role runs, whatever an earlier build has kept."""
ONE_MORE = "htop"


@dataclass(frozen=True)
class Change:
    """What a user changes in a checkout.

    Args:
        path: The file.
        old: What is in it, once.
        new: What takes its place.
    """

    path: str
    old: str
    new: str

    def apply(self, tree: Path) -> None:
        """Change the file.

        Args:
            tree: The checkout.

        Raises:
            VoidError: The file is not there, or does not hold it.
        """
        file = tree / self.path
        text = file.read_text() if file.is_file() else ""
        if text.count(self.old) != 1:
            raise VoidError(f"{self.path} has not one `{self.old}` any more: correct bench/bake.py")
        file.write_text(text.replace(self.old, self.new))


LATE_ROLE = Change(
    "roles/gpu_bootstrap/defaults/main.yml", "gpu_bootstrap_wait_s: 180", "gpu_bootstrap_wait_s: 240"
)
PACKAGE = Change(
    "roles/nvtop/defaults/main.yml", "nvtop_packages: [nvtop]", f"nvtop_packages: [nvtop, {ONE_MORE}]"
)


class Gpukiln:
    """`ami.build` in a copy of this checkout, with a state of its own.

    Args:
        folder: An empty folder.
        log: For what it prints.
    """

    def __init__(self, folder: Path, log: Path) -> None:
        self._folder, self._home, self._log = folder, folder / "home", log
        self._environment = {**os.environ, "GPUKILN_HOME": str(self._home)}

    @cached_property
    def tree(self) -> Path:
        """The copy of this checkout."""
        ignored = shutil.ignore_patterns(".venv", ".*cache")
        return Path(shutil.copytree(ROOT, self._folder / "tree", symlinks=True, ignore=ignored))

    def build(self, *options: str, built: bool = True) -> tuple[Measured, dict[str, Any]]:
        """One `ami.build`.

        Args:
            options: More options.
            built: Whether it has to build something.

        Returns:
            What it took but for booting the image and judging it, and what it printed. The machine that is
            baked runs below the cloud's server, so its processor seconds are not known.

        Raises:
            VoidError: It failed, or did what it should not have done.
        """
        command, tree = ["invoke", "ami.build", "--region", "us-west-2", "--json", *options], self.tree
        started = time.monotonic()
        with self._log.open("ab") as log:
            done = subprocess.run(
                command, cwd=tree, env=self._environment, stdout=subprocess.PIPE, stderr=log, check=False
            )
        took = time.monotonic() - started
        if done.returncode:
            tail = self._log.read_text(errors="replace").strip().splitlines()[-1:]
            raise VoidError(f"ami.build ended with {done.returncode}: {' '.join(tail)} (log: {self._log})")
        record = json.loads(done.stdout)
        if record["built"] != built:
            raise VoidError("ami.build had nothing to do" if built else "ami.build built something")
        if not built:
            return Measured(took), record
        apart = sum(seconds for step, seconds in record["durations_s"].items() if step in PROOF)
        stage = record["bake"].get("stage")
        note = f"from the stage {stage['stage']}" if stage else ""
        return Measured(took - apart, apart_s=apart, note=note), record

    def every_role(self) -> Measured:
        """Build again with what was compiled, but with every role."""
        measured, _ = self.build(*EVERY_ROLE)
        if measured.note:
            raise VoidError(f"not every role ran: it went on {measured.note}")
        return measured

    def late_role(self) -> Measured:
        """Change a late role and build."""
        LATE_ROLE.apply(self.tree)
        return self.build()[0]

    def package(self) -> Measured:
        """Add a package to those of a role and build."""
        PACKAGE.apply(self.tree)
        measured, record = self.build()
        if ONE_MORE not in record["bake"]["packages"]:
            raise VoidError(f"{ONE_MORE} is not in the image")
        return measured

    def remove(self) -> None:
        """Remove its machines, images and base images."""
        if not self._home.exists():
            return
        command = ["invoke", "cloud.clean", "--images", "--base", "--released", "--force", "--yes"]
        with self._log.open("ab") as log:
            subprocess.run(command, cwd=self.tree, env=self._environment, stdout=log, stderr=log, check=True)


def measure(names: list[str], folder: Path, logs: Path) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measure rows, one after the other.

    Args:
        names: The rows, in order.
        folder: An empty folder.
        logs: A folder for what the tools print.

    Returns:
        What was measured and why nothing was, by row.
    """
    homes = {name: folder / name for name in ("hand", "mkosi", "gpukiln", "dib")}
    for home in homes.values():
        home.mkdir()
    gpukiln = Gpukiln(homes["gpukiln"], logs / "gpukiln.log")
    mkosi = Mkosi(homes["mkosi"], logs / "mkosi.log")
    dib = DiskImageBuilder(homes["dib"], logs / "dib.log")
    done: dict[str, Measured] = {}
    void: dict[str, str] = {}
    ways: dict[str, Callable[[], Measured]] = {
        "floor": lambda: by_hand(homes["hand"], logs / "hand.log"),
        "mkosi-cold": mkosi.build,
        "cold": lambda: gpukiln.build()[0],
        "every-role": gpukiln.every_role,
        "mkosi-file": mkosi.build,
        "late-role": gpukiln.late_role,
        "mkosi-package": lambda: mkosi.build(ONE_MORE, anew=True),
        "package": gpukiln.package,
        "nothing": lambda: gpukiln.build(built=False)[0],
        "dib-cold": dib.build,
        "dib-warm": dib.build,
    }
    try:
        for name in names:
            if (needed := ROWS[name].needs) in void:
                void[name] = f"it goes on from {needed}"
                continue
            try:
                done[name] = ways[name]()
                print(f"{name:14}{done[name].seconds:8.1f} s", flush=True)
            except VoidError as error:
                void[name] = str(error)
                print(f"{name:14}    void: {error}", flush=True)
    finally:
        gpukiln.remove()
    return done, void


def use_cache(proxy: str, config: Path) -> None:
    """Have every contender fetch packages through one proxy.

    Programs here take it from the environment; gpukiln's machines get it with apt's settings of this machine.

    Args:
        proxy: Its address, which machines of the embedded cloud reach: not of the loopback network 127.
        config: Is written, and read by apt.
    """
    config.write_text(f'Acquire::http::Proxy "{proxy}";\n')
    os.environ |= {"http_proxy": proxy, "no_proxy": "localhost,127.0.0.1", "APT_CONFIG": str(config)}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print.

    Args:
        arguments: The command line's; `sys.argv` when None.

    Returns:
        0, bars reached or not.
    """
    parser = argparse.ArgumentParser(prog="bench.bake", description="Compare builds; see bench/README.md.")
    parser.add_argument("--only", default="", help=f"rows, separated by commas: {', '.join(ROWS)}")
    parser.add_argument(
        "--cache", default="", help="a caching proxy of packages that all use: http://HOST:PORT"
    )
    asked = parser.parse_args(arguments)
    try:
        names = chosen(asked.only)
    except ValueError as error:
        parser.error(str(error))
    logs = Path(tempfile.mkdtemp(prefix="bench-logs-", dir="/var/tmp"))
    print(f"logs of tools: {logs}", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        if asked.cache:
            use_cache(asked.cache, Path(folder) / "apt.conf")
        done, void = measure(names, Path(folder), logs)
        print(f"\n{table(names, done, void)}", flush=True)
    if not any(logs.iterdir()):
        logs.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
