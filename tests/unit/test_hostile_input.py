"""Files and words that nobody writes by mistake: each ends in an error that names it, and none in a crash."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.cli.command import exit_code_of
from gpukiln.clouds.embedded.gpus.settings import read_scenario
from gpukiln.disks import identify
from gpukiln.errors import GpukilnError, IncompatibleError, UsageError
from gpukiln.exports import run
from gpukiln.exports.initramfs import image_name
from gpukiln.files import atomic_path, name_full_disk_error, write_atomic
from gpukiln.gpus import amd, config, engines, mig
from gpukiln.images import digest
from gpukiln.kubernetes import cluster, pools, scheduling
from gpukiln.kubernetes.addons.runners import _require_runners
from gpukiln.kubernetes.addons.settings import Runners, Settings
from gpukiln.kubernetes.check.reading import LONGEST_COMMAND, Reading
from gpukiln.kubernetes.check.workload import UncheckedItem
from gpukiln.kubernetes.check.yaml_tree import BrokenError
from gpukiln.kubernetes.manifest import load
from gpukiln.kubernetes.quantity import quantity
from gpukiln.nodes.hosts import find_targets
from gpukiln.offers.request import parse_request
from gpukiln.parsing import MAX_DEPTH, check_yaml, parse_json, parse_yaml, read_text, refuse_credentials
from gpukiln.sources.rpm import _parse_streams
from gpukiln.ssh import parse_ssh
from gpukiln.units import Duration, Memory, whole
from gpukiln.workspaces.spec import UpOptions, _assignment
from tests.support.disks import gpt

DEEP = 40_000  # levels with which libyaml's composer ended the process
LONG = "9" * 5000  # digits; int() takes 4,300


def of_file(reader: Callable[[Path], Any]) -> Callable[[str, Path], Any]:
    def read(content: str, folder: Path) -> Any:
        file = folder / "file.yaml"
        file.write_text(content)
        return reader(file)

    return read


YAML: dict[str, tuple[Callable[[str, Path], Any], type[Exception] | tuple[type[Exception], ...]]] = {
    "read_yaml": (of_file(read_yaml), UsageError),
    "scenario": (of_file(read_scenario), UsageError),
    "mig": (of_file(lambda file: mig.read_config(file, "")), UsageError),
    "--set": (lambda content, _: _assignment(f"labels={content}"), UsageError),
    "manifests": (lambda content, _: load(content), BrokenError),
    "modules of rpm": (
        lambda content, _: _parse_streams(content.encode(), "https://mirror.example"),
        GpukilnError,
    ),
}


@pytest.mark.parametrize("name", YAML)
@pytest.mark.parametrize("begins", ["[", "{a: ", "- ", "? "])
def test_yaml_too_deep_for_libyaml_is_refused(tmp_path: Path, name: str, begins: str) -> None:
    read, error = YAML[name]
    with pytest.raises(error, match="nested deeper than"):
        read(begins * DEEP, tmp_path)


def test_what_a_digest_is_made_of_may_be_too_deep() -> None:
    assert digest._meaning(b"[" * DEEP, drop=None) == b"[" * DEEP


def test_a_kubeconfig_is_refused_where_it_is_too_deep(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text("[" * DEEP)
    with pytest.raises(GpukilnError, match=f"{file} is no kubeconfig: it is nested deeper"):
        cluster._read_kubeconfigs(str(file))


@pytest.mark.parametrize("name", ["a.yaml", "a.json", "a.md", "a.sh"])
def test_the_check_names_the_line_of_what_is_too_deep(name: str) -> None:
    deep = f"kind: ConfigMap\n---\nkind: List\nitems: {'[' * DEEP}\n"
    if name == "a.md":
        deep = f"```yaml\n{deep}```\n"
    if name == "a.sh":
        deep = f"kubectl apply -f - <<E\n{deep}E\n"
    reading = Reading()
    reading.text(deep, name)
    above = name in ("a.md", "a.sh")
    assert [(one.line, one.text) for one in reading.rejections] == [
        (4 + above, f"it is nested deeper than {MAX_DEPTH} levels")
    ]
    assert len(reading.resources) == 1  # the document before it is read


def test_aliases_are_counted_as_they_are_written_out() -> None:
    doubled = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    with pytest.raises(yaml.MarkedYAMLError, match="more than 1,000,000 values"):
        check_yaml(doubled)
    merged = "a0: &a0 {x: 1}\n" + "".join(
        f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40)
    )
    with pytest.raises(yaml.MarkedYAMLError, match="more than 1,000,000 values"):
        parse_yaml(merged)


@pytest.mark.parametrize(
    "value", ["0x" + "f" * 5000, "0b" + "1" * 20_000, LONG, "1" + ":1" * 5000, f"!!int '{LONG}'"]
)
def test_numbers_that_python_does_not_print_are_none(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"a: 1\nb: {value}\n")
    with pytest.raises(UsageError, match=r"line 2: a number of more than 400 characters"):
        read_yaml(file)
    reading = Reading()
    reading.text(f"kind: Pod\nb: {value}\n", "a.yaml")
    assert [one.line for one in reading.rejections] == [2]


@pytest.mark.parametrize("value", ["!!int ''", "!!float ''", "!!int '0x'", "!!float '1:x'", "!!bool maybe"])
def test_a_value_that_is_not_of_its_tag_is_refused_as_kubectl_does(value: str) -> None:
    reading = Reading()
    reading.text(f"kind: Pod\nspec: {value}\n", "a.yaml")
    assert [(one.line, len(reading.resources)) for one in reading.rejections] == [(2, 0)]
    with pytest.raises((ValueError, yaml.YAMLError)):
        parse_yaml(value)


@pytest.mark.parametrize(
    "content",
    [
        "[" * DEEP + "]" * DEEP,
        '{"a":' * 500 + "1" + "}" * 500,
        LONG,
        "NaN",
        "Infinity",
        "[-Infinity]",
        "{",
        "",
    ],
)
def test_whatever_is_wrong_with_json_is_a_value_error(content: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(content)


def test_a_file_is_read_no_further_than_its_limit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="larger than 1 KiB"):
        read_text(Path("/dev/zero"), largest=1024)
    file = tmp_path / "a.yaml"
    file.write_text("a: 1\n" + "#" * (17 << 20))
    with pytest.raises(UsageError, match=f"{file} is larger than 16 MiB"):
        read_yaml(file)


def test_a_record_on_a_strangers_disk_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "etc/gpukiln").mkdir(parents=True)
    for content in ("[" * DEEP, "[]", LONG, "\udcff"):
        (tmp_path / "etc/gpukiln/image.json").write_bytes(content.encode(errors="surrogateescape"))
        assert image_name(tmp_path) == "an image without a record"


# Work that grows with the square of the input takes a minute or more for these, and linear work a second: the
# limit of processor time ends such a test, no measurement.
LIMIT_S = 15
SLOW = {
    "one word": ("a.sh", "a" * 1_500_000),
    "one quotation": ("a.sh", "echo '" + "a " * 750_000),
    "one line of commands": ("a.sh", "a=b " * 250_000 + "; " * 250_000),
    "quotations that stay open": ("a.sh", "'\n" * 150_000),
    "long lines in a quotation": ("a.sh", "'\n" + ("a" * 30_000 + "\n") * 50),
    "empty lines": ("a", "\n" * 500_000),
    "empty lines in a block": ("a.md", "```\n" + "\n" * 500_000 + "```\n"),
    "an empty here-document": ("a.sh", "cat <<E\n" + "\n" * 500_000 + "E\n"),
    "blocks before headings": ("a.md", "kubectl\n" + "```\n```\n" * 10_000 + "# gpu\n" * 100_000),
    "one option again and again": ("a.md", "kubectl\n```\n" + "--runtime=docker " * 75_000 + "\n```\n"),
    "documents": ("a.yaml", "---\n" * 10 + "--- 1\n" * 15_000),
    "merged keys": (
        "a.yaml",
        "a: &a {b: 1}\nc: &c\n"
        + "".join(f"  k{n}: 1\n" for n in range(10_000))
        + "d:\n  <<: *c\n"
        + "  <<: *a\n" * 10_000,
    ),
    "expressions": (
        "a.yaml",
        "kind: PrometheusRule\napiVersion: v1\nspec:\n"
        + "".join(f"  k{n}: {{expr: up}}\n" for n in range(5_000)),
    ),
}
# One process imports the check, and a child of it, which has a limit of its own, judges each file.
JUDGES = """
import json, os, resource, sys, traceback
from gpukiln.kubernetes.check import evaluate, output, reading, rules
from gpukiln.ssh import parse_ssh
for line in sys.stdin:
    file, content, limit = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            found = reading.Reading()
            found.text(content, file)
            list(output.lines(evaluate.apply_rules(found, rules.Context(resources=tuple(found.resources)))))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.fixture(scope="module")
def judge() -> Iterator[Callable[[str, str, int], int]]:
    """Judge a file with so many seconds of processor time; the status of wait(2)."""
    with subprocess.Popen(
        [sys.executable, "-c", JUDGES], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        asks, answers = process.stdin, process.stdout

        def judged(file: str, content: str, limit_s: int) -> int:
            asks.write(json.dumps([file, content, limit_s]) + "\n")
            asks.flush()
            return int(answers.readline())

        yield judged


@pytest.mark.parametrize("name", SLOW)
def test_work_is_linear_in_the_length_of_a_file(judge: Callable[[str, str, int], int], name: str) -> None:
    assert judge(*SLOW[name], LIMIT_S) == 0


def test_work_that_takes_too_long_ends_at_the_limit(judge: Callable[[str, str, int], int]) -> None:
    file, content = SLOW["documents"]
    status = judge(file, content * 20, 1)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)


def test_what_stands_behind_a_commands_limit_is_named() -> None:
    reading = Reading()
    reading.text(f"#!/bin/sh\nls\nkubectl run {'a' * LONGEST_COMMAND}\n", "a.sh")
    assert reading.unchecked == [UncheckedItem("a.sh", 3, "longer than 32 KiB: the rest is not checked")]


@pytest.mark.parametrize(
    ("lines", "commands"),
    [
        ("echo 'a\nb' c\nls\n", [("echo", "a\nb", "c"), ("ls",)]),
        ('echo "a\\"\nb"\nls\n', [("echo", 'a"\nb'), ("ls",)]),
        ("echo it\\'s\nls\n", [("echo", "it's"), ("ls",)]),
        ("ls # it's\nls\n", [("ls",), ("ls",)]),
        ("echo 'a # b\nc'\nls\n", [("echo", "a # b\nc"), ("ls",)]),
        ("a \\\n  b\nls\n", [("a", "b"), ("ls",)]),
    ],
)
def test_a_quotation_goes_on_in_the_next_line(lines: str, commands: list[tuple[str, ...]]) -> None:
    reading = Reading()
    reading.text(lines, "a.sh")
    assert [one.words for one in reading.commands] == commands


@pytest.mark.parametrize(
    "read",
    [
        lambda: whole(LONG, "--count"),
        lambda: Duration.parse(f"{LONG}s", "--time"),
        lambda: Memory.parse(f"{'9' * 400}GiB", "--memory"),
        lambda: parse_request("A100:80GB80GB"),
        lambda: parse_request("A100:80GiB80GiB"),
        lambda: parse_request("A100:24GB24GB..80GB"),
        lambda: parse_request("T4", memory=f"{LONG}GiB"),
        lambda: mig._parts({f"{LONG}c.1g.5gb": 1}, "a"),
        lambda: find_targets("ssh://[::1", None),
        lambda: find_targets("ssh://[:::::]", None),
        lambda: find_targets("ssh://host:99999", None),
        lambda: parse_ssh(f"ssh://host:{LONG}"),
        lambda: _require_runners(Settings(runners=Runners("https://[::1", "image"))),
    ],
)
def test_what_was_typed_is_refused(read: Callable[[], Any]) -> None:
    with pytest.raises(UsageError):
        read()


@pytest.mark.parametrize(("option", "code"), [("16..24GB", 24), ("..24GB", 24), ("24GB", 24)])
def test_memory_as_sold_is_read(option: str, code: int) -> None:
    span = parse_request(f"A100:{option}").gpu_memory_gb
    assert span is not None
    assert span.high == code


def test_long_numbers_in_manifests_are_compared_with_nothing() -> None:
    assert quantity(LONG) is None
    for values in ([LONG], ["x"], []):
        rule = {"key": "gpus", "operator": "Gt", "values": values}
        assert scheduling._rule({"gpus": "8"}, rule) is False
    assert scheduling._rule({"gpus": "8"}, {"key": "gpus", "operator": "Gt", "values": ["-1"]}) is True
    assert pools._allows({"key": "a", "operator": "Gt", "values": [LONG]}, {"a": "8"}) is True


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("key", ["limits]\ngpus", "limits]\nhours", "price]\nusd_hour"])
def test_a_limit_is_a_number(tmp_path: Path, key: str, value: str) -> None:
    file = tmp_path / "gpus.toml"
    file.write_text(f"[{key} = {value}\n")
    with pytest.raises(UsageError, match=f"{key.rpartition(chr(10))[2]} is {value}"):
        config.load(file)


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, 10**400, {"value": math.nan, "unit": "W"}, "9" * 400, "nan", "1e400", True],
)
def test_what_amd_smi_measures_is_a_finite_number(value: Any) -> None:
    for read in (amd._integer, amd._float, amd._mib, amd._generation):
        assert read(value) is None
    assert amd._mib({"value": "9" * 300, "unit": "TB"}) is None


def test_a_container_may_ask_for_any_number_of_gpus() -> None:
    asked = {"Driver": "nvidia", "Count": 10**12, "Capabilities": [["gpu"]]}
    assert engines.devices_of_container({"HostConfig": {"DeviceRequests": [asked]}}, []) == ()


def test_a_partition_table_may_point_anywhere(tmp_path: Path) -> None:
    assert identify.inspect_disk(gpt(tmp_path)).table == "gpt"
    for name, value in (("entries", 2**60), ("entries", 2**64 - 1), ("begin", 2**60), ("begin", 2001)):
        with pytest.raises(IncompatibleError):
            identify.inspect_disk(gpt(tmp_path, **{name: value}))
    with pytest.raises(IncompatibleError, match="is truncated or empty"):
        identify.inspect_disk(gpt(tmp_path, last=2**60))


def test_a_full_disk_is_named_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a write of an open file names none

    monkeypatch.setattr(os, "fdatasync", full)
    file = tmp_path / "state.json"
    assert exit_code_of(write_atomic, file, "x") == 4
    said = capsys.readouterr().err
    assert said.startswith(f"error: {file}: No space left on device\nnext: free space there")

    def copies() -> None:
        with atomic_path(file) as partial:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(partial))

    assert exit_code_of(copies) == 4
    assert capsys.readouterr().err.startswith(f"error: {file}: Disk quota exceeded\nnext: free space there")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_onto_a_full_disk_names_the_copy(tmp_path: Path) -> None:
    (source := tmp_path / "source").write_text("x")
    with pytest.raises(OSError, match="No space left") as caught, name_full_disk_error(Path("/dev/full")):
        shutil.copyfile(source, "/dev/full")
    assert caught.value.filename == "/dev/full"
    target = tmp_path / "target"
    with pytest.raises(OSError, match="No space left") as caught, atomic_path(target) as partial:
        # as shutil's copy by sendfile says it
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(partial))
    assert (caught.value.filename, caught.value.filename2) == (str(target), None)
    with pytest.raises(OSError, match="No space left") as caught, atomic_path(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/elsewhere")
    assert caught.value.filename == "/elsewhere"


@pytest.mark.parametrize(
    "url",
    [
        "https://bob:hunter2@git.example/k.git",
        "https://hunter2@git.example/k.git@" + "a" * 40,
        "ssh://hunter2@x/y",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_credentials(url, "--roles", where="the machine's user data")
    assert caught.value.message.startswith("--roles has credentials for ")
    assert "hunter2" not in f"{caught.value.message} {caught.value.hint} {caught.value.details}"


@pytest.mark.parametrize("url", ["https://git.example/k.git@" + "a" * 40, "http://server/folder@1", ""])
def test_an_address_without_credentials_is_none_to_refuse(url: str) -> None:
    refuse_credentials(url, "--roles", where="the machine's user data")


def test_runners_are_registered_without_credentials_in_their_address() -> None:
    url = "https://bob:hunter2@github.com/org"
    with pytest.raises(UsageError, match=r"--runners has credentials for github\.com"):
        _require_runners(Settings(runners=Runners(url, "image")))


def test_options_with_credentials_are_refused_before_anything_else(tmp_path: Path) -> None:
    wanted: Any = None  # not looked at
    url = "https://bob:hunter2@git.example/k.git"
    with pytest.raises(UsageError, match=r"--roles has credentials for git\.example"):
        UpOptions(roles=f"{url}@{'a' * 40}")
    with pytest.raises(UsageError, match=r"--roles has credentials for git\.example"):
        UpOptions(roles=url)
    options = run.ExportOptions(
        tmp_path / "disk.iso", to="installer", url="http://bob:hunter2@server/disk.raw.zst"
    )
    with pytest.raises(UsageError, match="--url has credentials for server"):
        run._check_request(options, wanted, "ami-1", None)


def test_json_of_the_size_of_an_answer_is_read() -> None:
    rows = [{"n": n, "of": [{"a": None}]} for n in range(10_000)]
    assert parse_json(json.dumps(rows)) == rows
