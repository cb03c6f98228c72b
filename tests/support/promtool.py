"""promtool of Debian's package prometheus: on PATH, or fetched and unpacked once a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

FOLDER = Path(tempfile.gettempdir()) / f"gpukiln-promtool-{os.getuid()}"


@cache
def promtool() -> str:
    """Its path; without it the test is not run, and says why."""
    if found := shutil.which("promtool"):
        return found
    tool = FOLDER / "usr/bin/promtool"
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        if not tool.exists() and (why := _fetch()):
            pytest.skip(f"no promtool (Debian's package prometheus): {why}")
    return str(tool)


def _fetch() -> str:
    """Why not, or an empty string."""
    if not shutil.which("apt-get"):
        return "there is no apt-get to fetch it with"
    # root's own folder: apt's user could not write there
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", "prometheus"]
    try:
        done = subprocess.run(
            command,
            cwd=FOLDER,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return "no end in 300 s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["apt-get download failed"])[0]
    [package] = FOLDER.glob("prometheus_*.deb")
    subprocess.run(["dpkg-deb", "--extract", str(package), str(FOLDER)], check=True)
    package.unlink()
    return ""


def run(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool(), *map(str, argv)], capture_output=True, text=True, check=False)


def judge(folder: Path, rules: str, tests: list[dict[str, object]]) -> str:
    """What promtool says against some unit tests of rules; empty: they hold."""
    (folder / "rules.yaml").write_text(rules)
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (folder / "tests.yaml").write_text(yaml.safe_dump(document))
    done = run("test", "rules", folder / "tests.yaml")
    return "" if done.returncode == 0 else done.stdout + done.stderr
