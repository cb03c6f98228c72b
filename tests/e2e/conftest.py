"""One embedded cloud for all of these tests, in a folder of its own, removed at the end."""

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
        cloud.invoke("cloud.clean", "--images", "--base")


@pytest.fixture(scope="session")
def key(here, tmp_path_factory):
    """A key pair of the whole session: name and private key file."""
    made = here.aws("ec2", "create-key-pair", "--key-name", "tests", "--key-type", "ed25519")
    file = tmp_path_factory.mktemp("key") / "id"
    file.touch(mode=0o600)
    file.write_text(made["KeyMaterial"])
    return "tests", file
