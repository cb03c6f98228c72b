"""node.doctor on this computer where the tools that it asks hang: its file system shows them to it alone."""

import os
import re
import subprocess
import time

import pytest

from tests.support import documents
from tests.support.harness import ROOT

pytestmark = pytest.mark.e2e
HANG = """
mount --make-rprivate / && mount -t tmpfs tmpfs /usr/local/sbin
for tool in "$@"; do
  printf '#!/bin/sh\\nexec sleep 3000\\n' >/usr/local/sbin/$tool && chmod 755 /usr/local/sbin/$tool
done
exec scripts/run invoke node.doctor --hosts local:// --max-seconds 30 --json
"""


def test_a_tool_that_hangs_is_named_and_the_doctor_ends_in_its_time(tmp_path):
    """nvidia-smi, and all else that is asked about the driver."""
    tools = ("nvidia-smi", "modprobe", "modinfo", "dkms", "docker", "dockerd", "containerd", "nvtop")
    started = time.monotonic()
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", HANG, "bash", *tools],
        cwd=ROOT,
        env={**os.environ, "GPUKILN_HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert time.monotonic() - started < 30 + 20  # and what it takes to start the command
    assert done.returncode == 1, done.stderr
    [judged] = documents.read(done.stdout)["hosts"]
    says = r"no answer in \d+ s; process \d+ \(sleep\) is in state S \(sleeps\).*, and was killed"
    assert re.match(rf"nvidia-smi hangs \({says}\): ", judged["diagnosis"])
    checks = {check["id"]: check for check in judged["verdict"]["checks"]}
    failed = checks["versions.answers"]
    assert failed["outcome"] == "failed"
    assert re.search(rf"nvidia-smi hangs: `nvidia-smi -h`: {says}", failed["reason"])
    [first, *_] = re.findall(r"(?m)^([a-z-]+\.[a-z-]+): ", done.stderr)
    assert first == "versions.answers"
    assert "another driver was installed" not in done.stderr
    assert checks["versions.driver-agrees"]["outcome"] == "not_reached"
    assert "passed" not in {check["outcome"] for check in checks.values() if check["layer"] == "modules"}
