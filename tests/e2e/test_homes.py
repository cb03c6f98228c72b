"""One server serves one state folder: a copy of it, and a folder that was moved, get one of their own."""

import json
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest

from tests import folders
from tests.support.harness import Here, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder():
    with folders.folder() as path:
        yield path


@pytest.fixture(scope="module")
def original(folder):
    """A cloud that runs and has a parameter."""
    here = Here(folder / "original")
    put(here, "/mine", "original")
    yield here
    here.invoke("cloud.stop")


def put(here, name, value):
    here.aws("ssm", "put-parameter", "--name", name, "--type", "String", "--value", value, "--overwrite")


def get(here, name):
    return here.aws("ssm", "get-parameter", "--name", name)["Parameter"]["Value"]


def test_a_copy_has_a_server_of_its_own_and_leaves_the_other_alone(original, folder):
    copy = Here(folder / "copy")
    shutil.copytree(original.home, copy.home)
    assert copy.status()["server"] is None
    assert any("is a copy" in problem for problem in copy.status()["problems"])
    assert "does not run" in copy.invoke("cloud.stop").stdout
    assert "is a copy" in copy.invoke("cloud.env").stderr

    theirs, ours = original.cloud_environment(), copy.cloud_environment()
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID"):
        assert theirs[name] != ours[name]
    put(copy, "/mine", "copy")
    assert get(original, "/mine") == "original"
    assert get(copy, "/mine") == "copy"

    assert copy.invoke("cloud.stop").stdout == "stopped\n"
    assert original.status()["server"]
    assert copy.status()["problems"] == []


def test_how_it_is_is_told_to_who_knows_the_key(original):
    settings = original.cloud_environment()
    url = f"{settings['AWS_ENDPOINT_URL']}/gpukiln/status"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10)  # noqa: S310 - our own server
    assert refused.value.code == 401
    key = {"Authorization": f"Credential={settings['AWS_ACCESS_KEY_ID']}/"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=key), timeout=10) as answer:  # noqa: S310
        assert json.load(answer)["home"]["path"] == str(original.home)


@pytest.mark.parametrize("name", ["endpoint.json", "access-key"])
def test_a_server_that_runs_is_found_again(original, name):
    """A damaged address cost a minute and an error that named no file; an empty key let everybody in."""
    before = original.cloud_environment()
    (original.home / "cloud" / name).write_text("")
    assert any(name in problem for problem in original.status()["problems"])
    assert get(original, "/mine") == "original"
    assert original.cloud_environment() == before


def test_a_change_that_is_not_on_disk_is_no_success(original):
    folder, away = original.home / "cloud/regions", original.home / "cloud/away"
    original.status()
    environment = {**original.cloud_environment(), "AWS_MAX_ATTEMPTS": "1"}
    folder.rename(away)
    try:
        ask = ["aws", "ssm", "put-parameter", "--name", "/lost", "--type", "String", "--value", "x"]
        done = subprocess.run(ask, env=environment, capture_output=True, text=True, check=False)
    finally:
        away.rename(folder)
    assert done.returncode != 0
    assert "the change is not on disk" in done.stderr


def test_a_moved_folder_is_served_where_it_is(original, folder):
    old, new = original.home, folder / "moved"
    server = original.cloud_environment()
    link = folder / "link"
    link.symlink_to(old)
    assert Here(link).cloud_environment()["AWS_ENDPOINT_URL"] == server["AWS_ENDPOINT_URL"]
    old.rename(new)
    moved = Here(new)
    assert get(moved, "/mine") == "original"
    assert moved.status()["server"]["home"]["path"] == str(new)
    moved.invoke("cloud.stop")
    new.rename(old)
    wait_for(lambda: original.status()["server"] is None)
