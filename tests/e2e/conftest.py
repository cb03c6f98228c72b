"""One embedded cloud for all tests of a process, in a folder of its own, removed at the end.

The base image and the GPU image are built once a run: clouds of other processes have their disks too.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from gpukiln.clouds.embedded.base import current_base
from gpukiln.clouds.embedded.cloud import EmbeddedCloud
from gpukiln.clouds.embedded.layout import Layout
from tests import folders
from tests.support import homes
from tests.support.harness import ROOT, Here, Node
from tests.support.standin.platforms import install_rpm_tools

REGIONS = ("us-west-2", "us-east-1")
IMAGE, IMAGE_LOCK = "image.json", "image.lock"


@pytest.fixture(scope="session")
def run_folder(worker_id, tmp_path_factory):
    """What the processes of the run share."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def disks(run_folder):
    with folders.disks(run_folder) as folder:
        yield folder


@pytest.fixture(scope="session")
def here(worker_id, run_folder, disks):
    with _folder(disks) as folder:
        home = _apart(folder, worker_id)
        _have_base(Layout(home), run_folder)
        yield from _cloud(Here(home))


@pytest.fixture(scope="session")
def built(here, run_folder):
    """The GPU image that README's first command makes: its record, and what the command said meanwhile."""
    command = [str(ROOT / "scripts/run"), "invoke", "ami.build", "--region", "us-west-2", "--json"]
    with FileLock(run_folder / IMAGE_LOCK):
        done = subprocess.run(
            command,
            env=here.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        kept = here.home.parent / "image"
        _link_image(here.home, kept)
        (run_folder / IMAGE).write_text(json.dumps({"home": str(kept), "document": json.loads(done.stdout)}))
    return json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def image_cloud(request, here, worker_id, run_folder, disks):
    """A cloud of its own that has the image of `built`, whichever process of the run made that."""
    with _folder(disks) as folder:
        home = _apart(folder, worker_id, here.home)
        if not _has_image(home, run_folder):
            request.getfixturevalue("built")
            assert _has_image(home, run_folder)
        document = json.loads((run_folder / IMAGE).read_text())["document"]
        yield from _cloud(ImageCloud(home, document))


@contextlib.contextmanager
def _folder(disks):
    """A folder of one cloud. Its name is short: the path of a socket has at most 107 bytes (unix(7))."""
    # a machine that still stops writes there
    with tempfile.TemporaryDirectory(prefix="", dir=disks, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt reads its lists there as another user
        yield folder


class ImageCloud(Here):
    """A cloud that has an image: what `ami.build` said of it."""

    def __init__(self, home: Path, document: dict[str, Any]) -> None:
        super().__init__(home)
        self.document = document


def _cloud(cloud):
    yield cloud
    cloud.invoke("cloud.clean", "--images", "--base", "--released", "--force", "--yes")


def _has_image(home: Path, run: Path) -> bool:
    """Give a home the image of the run, where it was made and its process has not ended."""
    with FileLock(run / IMAGE_LOCK):
        if not (run / IMAGE).exists():
            return False
        kept = Path(json.loads((run / IMAGE).read_text())["home"])
    if not kept.exists():
        return False
    _link_image(kept, home)
    return True


def _link_image(home: Path, target: Path) -> None:
    """What an image is, in a cloud's home, with its compiled modules; none of it is changed in place."""
    for name in ("builds", "cloud/regions", "cloud/snapshots", "modules"):
        shutil.copytree(home / name, target / name, copy_function=os.link)


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


def _apart(folder: Path, worker_id: str, *others: Path) -> Path:
    """A home whose cloud shares no address with another process's, or with the homes of this one."""
    worker = 0 if worker_id == "master" else int(worker_id.removeprefix("gw"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    home = homes.apart(folder, worker, workers, REGIONS, others)
    home.mkdir(mode=0o755)
    return home


@pytest.fixture(scope="session")
def key(tmp_path_factory):
    """Private key file of the whole session; `Here.launch` makes it known to EC2."""
    file = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file


@pytest.fixture(scope="session")
def rpm_base(here, key, tmp_path_factory):
    """An image with dnf and its tools, which machines that say they are RHEL or Amazon Linux begin with."""
    with Node(here, key, tmp_path_factory.mktemp("rpm")) as node:
        install_rpm_tools(node)
        # 1.7 of the 3 s of processor time of a boot; users and keys are in the image
        node.read("sudo touch /etc/cloud/cloud-init.disabled")
        return node.capture("rpm-tools")
