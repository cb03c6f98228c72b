"""`invoke gpu.*` on many hosts: one document, one exit code, and each host that has no answer is named."""

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpukiln.commands.gpu import words_of
from gpukiln.gpus.cli import read_options
from gpukiln.gpus.verbs import verbs
from gpukiln.nodes.gpus import gpu_command
from gpukiln.nodes.hosts import find_targets
from tests.support import documents
from tests.support.exit_codes import invoke
from tests.support.gpus import Double, double
from tests.support.standard_input import standard_input

Typed = Callable[..., tuple[int, str, str]]
# What SSH does with the words of a remote command: the user's shell reads them. Hosts differ by their names.
SSH = """#!/bin/bash
host=${{@: -2:1}} command=${{@: -1}}
host=${{host#*@}}
echo "$*" >>{folder}/calls
case $host in
  down) echo "ssh: connect to host down port 22: Connection refused" >&2; exit 255 ;;
  bare) command=${{command/\\/usr\\/local\\/bin\\/gpukiln-gpu/\\/usr\\/local\\/bin\\/no-such-file}} ;;
  old) echo '{{"schema": "gpu.list/0", "nodes": [], "failed": []}}'; exit 0 ;;
  chatty) echo "Welcome to chatty" ;;
  greedy) cat >{folder}/taken ;;
  lost) export GPUKILN_SIMULATED_GPUS={folder}/p4d.24xlarge.state ;;
esac
exec bash -c "${{command//\\/usr\\/local\\/bin\\/gpukiln-gpu/{python} -m gpukiln.gpus}}"
"""


@pytest.fixture
def node(loaded_nvml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Double:
    """A machine that answers over `ssh`, and another one with eight GPUs."""
    made = double(loaded_nvml, tmp_path, "g5.12xlarge")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(folder=tmp_path, python=sys.executable.replace("/", "\\/")))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    return made


@pytest.fixture
def typed(node: Double, capfd: pytest.CaptureFixture[str]) -> Typed:
    del node

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            invoke([*words])
        shown = capfd.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


def test_every_host_is_in_one_document_that_fits_the_schema(typed: Typed) -> None:
    code, out, err = typed(
        "gpu.list", "--hosts", "ssh://one,ssh://ann@two:2222,local://,ssh://chatty", "--json"
    )
    document = json.loads(out)
    documents.check(document)
    assert (code, err) == (0, "")
    assert [len(one["devices"]) for one in document["nodes"]] == [4, 4, 4, 4]
    assert document["failed"] == []


def test_a_host_without_an_answer_is_named_and_the_others_answer(typed: Typed) -> None:
    code, out, err = typed("gpu.list", "--hosts", "ssh://one,ssh://down,ssh://bare,ssh://old")
    assert code == 5
    assert out.count("A10G") == 4
    assert "error: down can't be reached: ssh: connect to host down port 22: Connection refused" in err
    assert "error: bare has no /usr/local/bin/gpukiln-gpu" in err
    assert "next: the role gpu_tools installs it" in err
    assert "error: old answers gpu.list/0, wanted gpu.list/1" in err
    code, out, _ = typed("gpu.list", "--hosts", "ssh://one,ssh://down", "--json")
    assert (code, [one["node"] for one in json.loads(out)["failed"]]) == (5, ["down"])


def test_the_caller_keeps_its_input(typed: Typed, tmp_path: Path) -> None:
    """`while read host; do invoke gpu.list --hosts ssh://$host; done <hosts`: ssh reads what it is given."""
    with standard_input(b"the next host\n") as left:
        assert typed("gpu.list", "--hosts", "ssh://greedy")[0] == 0
        assert (tmp_path / "taken").read_bytes() == b""
        assert os.read(left, 100) == b"the next host\n"


def test_one_host_gives_its_own_exit_code(typed: Typed) -> None:
    assert typed("gpu.list", "--hosts", "ssh://down")[0] == 4
    assert typed("gpu.lease", "--count", "9", "--hosts", "ssh://one")[0] == 3
    assert typed("gpu.show", "--gpu", "77", "--hosts", "ssh://one")[0] == 2


def test_a_command_runs_there_with_its_words_as_they_are(typed: Typed) -> None:
    words = ("a b", "$HOME", "'\"", "--x", "*", "")
    code = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['CUDA_VISIBLE_DEVICES']]))"
    code += "; sys.exit(9)"
    ended, out, err = typed(
        "gpu.run", "-n", "2", "--hosts", "ssh://one", "--", sys.executable, "-c", code, *words
    )
    assert ended == 9, err
    argv, visible = json.loads(out)
    assert (tuple(argv), len(visible.split(","))) == (words, 2)


def test_what_changes_something_works_on_one_host(typed: Typed) -> None:
    code, _, err = typed("gpu.lease", "--hosts", "ssh://one,ssh://two")
    assert (code, "gpu.lease works on one host, and 2 are named" in err) == (2, True)
    code, _, err = typed("gpu.run", "--hosts", "ssh://one,ssh://two", "--", "true")
    assert (code, "gpu.run works on one host" in err) == (2, True)


def test_here_and_there_the_same_lease(typed: Typed) -> None:
    code, out, _ = typed("gpu.lease", "-n", "2", "--for", "2h", "--hosts", "ssh://one", "--json")
    granted = json.loads(out)["nodes"][0]
    assert code == 0
    code, out, _ = typed("gpu.leases", "--json")
    assert json.loads(out)["nodes"][0]["leases"][0]["devices"] == granted["devices"]
    assert typed("gpu.release", "L-1", "--hosts", "ssh://one")[:2] == (0, "released: L-1\n")


def test_a_failure_here_is_in_the_document_too(typed: Typed) -> None:
    code, out, err = typed("gpu.lease", "--count", "9", "--json")
    document = json.loads(out)
    documents.check(document)
    assert (code, document["nodes"], document["failed"][0]["exit_code"]) == (3, [], 3)
    assert err.startswith("error: this machine can't serve the request")


def test_words_are_quoted_for_the_shell_of_the_host() -> None:
    [target] = find_targets("ssh://ann@two:2222", None)
    words = gpu_command(target, ["list", "--json"], sudo=True)
    assert words[-5:-1] == ["-p", "2222", "--", "ann@two"]
    assert shlex.split(words[-1]) == ["sudo", "-n", "/usr/local/bin/gpukiln-gpu", "list", "--json"]


def test_what_is_typed_here_is_what_is_read_there() -> None:
    for verb in verbs().values():
        typed: dict[str, Any] = {}
        for one in verb.options:
            number = isinstance(one.default, int) and one.default is not False
            several = isinstance(one.default, tuple)
            typed[one.name] = (
                True if one.default is False else 3 if number else ("x", "y z") if several else "a b"
            )
        argv = [verb.name, *words_of(verb, type("Typed", (), typed)())]
        found, options = read_options(argv)
        assert found is verb
        assert {one.name: getattr(options, one.name) for one in verb.options} == typed
