"""The embedded cloud's server as commands find it: a real one, without machines."""

import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpukiln.clouds.embedded import client
from gpukiln.clouds.embedded.client import (
    ensure_server,
    prepare_files,
    server_runs,
    server_status,
    stop_server,
)
from gpukiln.clouds.embedded.layout import Layout, read_endpoint
from gpukiln.clouds.embedded.version import code_version
from gpukiln.errors import UnavailableError

starts_a_server = pytest.mark.usefixtures("require_root_machine")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path / "home")
    made.create()
    return made


@pytest.fixture
def served(layout: Layout) -> Iterator[Layout]:
    ensure_server(layout)
    yield layout
    stop_server(layout)


def ensure_copy(layout: Layout) -> Layout:
    return Layout(shutil.copytree(layout.home, layout.home.with_name("copy"), symlinks=True))


def set_aside(path: Path) -> list[Path]:
    return [*path.parent.glob(f"{path.name}.damaged-*")]


@starts_a_server
def test_a_server_is_started_once_and_keeps_its_port(served: Layout) -> None:
    status = server_status(served)
    assert status is not None
    assert (status["code"], status["machines"]) == (code_version(), [])
    assert status["home"]["path"] == str(served.home)
    assert ensure_server(served) == status
    assert stop_server(served)
    assert not server_runs(served)
    assert server_status(served) is None
    assert not stop_server(served)
    assert ensure_server(served)["url"] == status["url"], "a shell's AWS_ENDPOINT_URL stays right"


@starts_a_server
def test_who_does_not_know_the_key_is_refused(served: Layout) -> None:
    url = f"{read_endpoint(served)['url']}/gpukiln/status"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url)  # noqa: S310 - our own server
    assert refused.value.code == 401


@starts_a_server
def test_the_server_of_a_copied_folder_is_not_the_copys(served: Layout) -> None:
    copy = ensure_copy(served)
    assert server_status(copy) is None
    assert not server_runs(copy)
    [told] = prepare_files(copy)
    assert told == f"{copy.home} is a copy: it gets its own server, port and access key"
    assert not copy.endpoint.exists()
    assert copy.access_key != served.access_key
    assert not stop_server(copy)
    assert server_status(served) is not None


@starts_a_server
def test_a_server_that_can_not_be_found_is_ended_all_the_same(served: Layout) -> None:
    served.endpoint.unlink()
    assert server_status(served) is None
    assert server_runs(served)
    assert stop_server(served)
    assert not server_runs(served)


def test_of_a_folder_that_is_not_there_no_server_runs(tmp_path: Path) -> None:
    nowhere = Layout(tmp_path / "nowhere")
    assert server_status(nowhere) is None
    assert not server_runs(nowhere)
    assert not stop_server(nowhere)


def test_what_a_server_needs_and_is_damaged_is_set_aside_and_made_again(layout: Layout) -> None:
    layout.endpoint.write_text('{"url": 5}')
    layout.key_file.write_text("")
    endpoint, key = prepare_files(layout)
    assert endpoint == f"{layout.endpoint} was damaged: `invoke cloud.env` prints a shell's new settings"
    assert "has no access key, so a new key was created" in key
    assert [one.read_text() for one in set_aside(layout.endpoint)] == ['{"url": 5}']
    assert len(set_aside(layout.key_file)) == 1
    assert layout.access_key
    assert prepare_files(layout) == []


def test_a_host_that_can_not_run_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(client.sys, "platform", "darwin")
        with pytest.raises(UnavailableError, match="needs Linux, and this is darwin"):
            client.check_host()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnavailableError, match="needs root"):
        client.check_host()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(client.shutil, "which", lambda tool: None if tool == "sgdisk" else f"/bin/{tool}")
    with pytest.raises(UnavailableError, match="not installed: gdisk") as missing:
        client.check_host()
    assert missing.value.hint.startswith("apt-get install gdisk,")


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "check_host", lambda: None)
    monkeypatch.setattr(client, "NAMESPACES", ("sh", "-c", "echo no room for a server; exit 4"))
    with pytest.raises(UnavailableError, match="did not start") as told:
        ensure_server(layout)
    assert told.value.details == ("no room for a server",)
