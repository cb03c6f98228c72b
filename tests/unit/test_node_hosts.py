"""Which machines --hosts names, and node.doctor on this computer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpukiln.errors import UsageError
from gpukiln.nodes.hosts import find_targets
from tests.support import documents
from tests.support.standard_input import standard_input

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def inventory(tmp_path):
    file = tmp_path / "hosts.yml"
    file.write_text("all: {children: {gpus: {hosts: {a: , b: }}, others: {hosts: {c: }}}}\n")
    return file


def test_machines_of_every_kind_each_once(inventory):
    hosts = "ssh://admin@192.0.2.1:2222,ssh://[2001:db8::1],local://,ansible://gpus,ansible://a"
    found = find_targets(hosts, inventory)
    assert [target.name for target in found] == [
        *("admin@192.0.2.1:2222", "[2001:db8::1]", "localhost", "a", "b"),
    ]
    assert found[0].hostspec == "ssh://admin@192.0.2.1:2222?controlpersist=0&timeout=60"
    assert found[2].hostspec == "local://"
    assert found[3].hostspec.startswith("ansible://a?ansible_inventory=")
    assert "StrictHostKeyChecking" not in found[0].ssh_config(), "the user's own known hosts count"


def test_an_inventory_is_read_whatever_standard_input_is(inventory):
    with standard_input(blocking=False):
        assert [target.name for target in find_targets("", inventory)] == ["a", "b", "c"]


def test_an_inventory_alone_is_all_of_it(inventory):
    assert [target.name for target in find_targets("", inventory)] == ["a", "b", "c"]
    assert [target.name for target in find_targets("", inventory, "others")] == ["c"]
    assert [target.name for target in find_targets("ansible://gpus", inventory, "b")] == ["b"]


@pytest.mark.parametrize("hosts", ["gpu-1", "ssh://", "ssh://a b", "docker://x", "local://x", "ssh://h:port"])
def test_what_is_no_host_is_refused(hosts):
    with pytest.raises(UsageError, match="wanted ssh://"):
        find_targets(hosts, None)


def test_without_an_inventory_hosts_have_to_be_named():
    with pytest.raises(UsageError, match="--inventory is missing") as caught:
        find_targets("", None)
    assert "--hosts" in caught.value.hint


@pytest.mark.parametrize(
    ("hosts", "with_inventory", "limit", "words"),
    [
        ("local://", True, "", "names no host of an inventory, and --inventory is given"),
        ("ssh://a,local://", True, "a", "--inventory is given"),
        ("local://", False, "a", "names no host of an inventory, and --limit is given"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(inventory, hosts, with_inventory, limit, words):
    with pytest.raises(UsageError, match=words) as caught:
        find_targets(hosts, inventory if with_inventory else None, limit)
    assert f"--hosts {hosts},ansible://all" in caught.value.hint


def doctor(home, *options):
    done = subprocess.run(
        [*(Path(sys.executable).parent / "invoke", "node.doctor", "--hosts", "local://"), *options, "--json"],
        cwd=ROOT,
        env={**os.environ, "GPUKILN_HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    [judged] = documents.read(done.stdout)["hosts"]
    return done, judged


def test_the_doctor_names_all_that_is_wrong_and_the_gpus_first(tmp_path):
    """This computer may be anything: with a thousand GPUs expected something is broken on it."""
    done, judged = doctor(tmp_path, "--expect-gpus", "1000")
    checks = judged["verdict"]["checks"]
    failed = [check for check in checks if check["outcome"] == "failed"]
    without = [check for check in failed if " GPUs on the PCI bus, at least 1000 expected" in check["reason"]]
    assert {"gpu.driver-loaded"} <= {check["id"] for check in without}
    assert not [check["id"] for check in checks if check["reason"].startswith("layer ")]
    # the first thing that it says of the machine is how it stands
    assert judged["diagnosis"].endswith(".")
    lines = done.stderr.splitlines()
    [says] = [number for number, line in enumerate(lines) if line.startswith("localhost: ")]
    shown = [
        line.partition(": ")[0]
        for line in lines[says:]
        if line.partition(": ")[0] in {c["id"] for c in failed}
    ]
    assert shown[0] == "hardware.gpus"
    assert shown[1] in ("versions.driver-installed", "gpu.driver-loaded")
    assert done.stderr.count("at least 1000 expected") == 1
    assert "  fix:   `lspci -d 10de:` lists the GPUs on the bus." in done.stderr


def test_the_doctor_looks_at_simulated_gpus_where_it_is_asked_to(tmp_path):
    _, judged = doctor(tmp_path, "--simulated")
    assert judged["verdict"]["simulated"]
    reasons = {check["id"]: check["reason"] for check in judged["verdict"]["checks"]}
    assert reasons["gpu.driver-loaded"].startswith("found no simulated GPUs on this machine")
