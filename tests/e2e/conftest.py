"""One embedded cloud for all of these tests, in a folder of its own, removed at the end."""

import subprocess
import tempfile
from pathlib import Path

import pytest
from harness import Here


@pytest.fixture(scope="session")
def here():
    # not below /tmp, which may be memory: a build takes several GiB
    with tempfile.TemporaryDirectory(
        prefix="gpukiln-tests-", dir="/var/tmp", ignore_cleanup_errors=True
    ) as home:
        Path(home).chmod(0o755)  # apt reads its lists there as another user
        cloud = Here(Path(home))
        yield cloud
        cloud.invoke("cloud.clean", "--images", "--base", "--force")


@pytest.fixture(scope="session")
def key(tmp_path_factory):
    """Private key file of the whole session; `Here.launch` makes it known to EC2."""
    file = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file], check=True)
    return file
