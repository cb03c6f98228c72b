"""Prometheus' promtool, which judges and runs rules: that on PATH, or that of Debian's package, unpacked."""

import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from gpukiln.catalog.load import ROOT
from tests.support.engines import unpack

KEPT = ROOT / ".cache/promtool"
GROUPS = (
    "gpukiln-facts",
    "gpukiln-use",
    "gpukiln-alerts",
)  # facts first: what compares with them comes later


def promtool() -> str:
    """The program; skips the test where it can't be had."""
    if found := shutil.which("promtool"):
        return found
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        pytest.skip("promtool is not on PATH, and there is no apt to fetch it with")
    KEPT.parent.mkdir(exist_ok=True)
    with FileLock(KEPT.with_suffix(".lock")):
        if not KEPT.is_dir() and (why := unpack(("prometheus",), KEPT)):
            pytest.skip(f"promtool is not on PATH, and Debian's prometheus can't be fetched: {why}")
    return str(KEPT / "usr/bin/promtool")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([promtool(), *arguments], capture_output=True, text=True, check=False, timeout=120)
