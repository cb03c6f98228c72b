"""A build of the base image that is killed: the next command finds nothing in its way."""

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gpukiln.clouds.embedded.base import remove_unfinished
from gpukiln.clouds.embedded.layout import Layout
from tests import folders
from tests.support.harness import ROOT, command_lines, processes_of, wait_for

pytestmark = pytest.mark.e2e

BUILD = """\
import sys
from pathlib import Path
from gpukiln.clouds.embedded.base import build_base, current_base
from gpukiln.clouds.embedded.layout import Layout

layout = Layout(Path(sys.argv[1]))
layout.create()
build_base(layout, current_base(layout))
"""


def mounted(folder):
    """What is mounted below a folder, as any process sees it that names the folder."""
    for pid, line in command_lines():
        if folder in line:
            with suppress(OSError):
                mounts = Path(f"/proc/{pid}/mounts").read_text().splitlines()
                yield from (mount for mount in mounts if folder in mount)


def test_nothing_runs_on_and_nothing_stays_mounted():
    with folders.folder() as path:
        home = str(path)
        build = subprocess.Popen([sys.executable, "-c", BUILD, home], cwd=ROOT)
        wait_for(lambda: [line for line in mounted(home) if "/root/proc " in line])
        build.kill()
        build.wait()
        wait_for(lambda: not processes_of(home), timeout_s=20)
        assert home not in Path("/proc/mounts").read_text()

        layout = Layout(path)
        assert list(layout.bases.glob("base-*/root/usr"))
        remove_unfinished(layout)
        assert not list(layout.bases.glob("base-*"))
