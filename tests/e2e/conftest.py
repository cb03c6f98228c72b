"""One embedded cloud for all tests of a process, in a folder of its own, removed at the end.

The base image is built once a run: the clouds of all processes have its disk.
"""

import contextlib
import itertools
import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

from gpukiln.clouds.embedded.base import current_base
from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.layout import Layout
from gpukiln.clouds.embedded.machines import Machines
from tests.support.harness import ROOT, Here

REGIONS = ("us-west-2", "us-east-1")


@pytest.fixture(scope="session")
def here(worker_id, tmp_path_factory):
    # not below /tmp, which may be memory: a build takes several GiB
    with tempfile.TemporaryDirectory(
        prefix="gpukiln-tests-", dir="/var/tmp", ignore_cleanup_errors=True
    ) as folder:
        home = _apart(Path(folder), 0 if worker_id == "master" else int(worker_id.removeprefix("gw")))
        for path in (home, home.parent):
            path.chmod(0o755)  # apt reads its lists there as another user
        run = tmp_path_factory.getbasetemp()
        _have_base(Layout(home), run if worker_id == "master" else run.parent)
        cloud = Here(home)
        yield cloud
        cloud.invoke("cloud.clean", "--images", "--base", "--released", "--force", "--yes")


@pytest.fixture(scope="session")
def built(here):
    """The GPU image that README's first command makes: its record, and what the command said meanwhile."""
    command = [str(ROOT / "scripts/run"), "invoke", "ami.build", "--region", "us-west-2", "--json"]
    done = subprocess.run(
        command, env=here.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout), done.stderr


def _have_base(layout: Layout, run: Path) -> None:
    """The first process of the run has its cloud build the base image; the others' disk is a link to that."""
    base = current_base(layout)
    layout.create()
    with FileLock(run / "base.lock"):
        built = run / base.snapshot_id  # where its disk is
        if built.exists():
            with contextlib.suppress(FileNotFoundError):  # that process has ended
                os.link(built.read_text(), layout.snapshot(base.snapshot_id))
                return
        EmbeddedCloud(REGIONS[0], layout=layout).prepare(base.image_id, print)
        built.write_text(str(layout.snapshot(base.snapshot_id)))


def _apart(folder: Path, worker: int) -> Path:
    """A home whose cloud shares no address with another process's: each of n has every nth network."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    for number in itertools.count():
        machines = Machines(Layout(folder / str(number)))
        networks = [int(machines.vpc_cidr(region).split(".")[1]) for region in REGIONS]
        own = {network % workers for network in networks} == {worker}
        if own and len(set(networks)) == len(REGIONS):
            machines.layout.home.mkdir()
            return machines.layout.home
    raise AssertionError("unreachable")


@pytest.fixture(scope="session")
def key(tmp_path_factory):
    """Private key file of the whole session; `Here.launch` makes it known to EC2."""
    file = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file
