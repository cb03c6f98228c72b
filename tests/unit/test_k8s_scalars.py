"""Manifests are read and written by the rules of the parser of kubectl and the API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gpukiln.kubernetes import scalars
from gpukiln.kubernetes.check.evaluate import apply_rules
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import Context
from gpukiln.kubernetes.check.yaml_tree import BrokenError, documents
from gpukiln.kubernetes.jobs.request import gpu_job
from gpukiln.kubernetes.manifest import dump, load

# Answers of the real parser; the file names it.
TABLE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "support" / "yaml_scalars.json").read_text(encoding="utf-8")
)["scalars"]


@pytest.mark.parametrize("text", TABLE)
def test_scalars_are_read_as_the_api_server_reads_them(text: str) -> None:
    found = read(f"a: {text}\n")
    if "error" in (answer := TABLE[text]):
        assert isinstance(found, BrokenError)
    else:
        assert (type(found["a"]), found["a"]) == (type(answer["value"]), answer["value"])


@pytest.mark.parametrize("text", TABLE)
def test_keys_are_read_as_the_api_server_reads_them(text: str) -> None:
    found = read(f"{text}: x\n")
    if "key_error" in (answer := TABLE[text]):
        assert isinstance(found, BrokenError)
    else:
        assert found == {answer["key"]: "x"}


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: p, labels: {team: y}}
spec:
  containers:
    - name: main
      args: [--lr, 1e-4, --time, 1:30, --day, 2026-01-02, --limit, 1e400]
      image: x:1
      resources: {limits: {nvidia.com/gpu: 1.0}}
"""


def read(text: str) -> Any:
    [one] = documents(text)
    return one if isinstance(one, BrokenError) else one.value


# helm/helm#4541, #4194, #9162, kubernetes-sigs/kustomize#4081, kubernetes/kubernetes#90905, Shopify/krane#818
REPORTED = ("01443e5", "0e1234", "72044e0", "72044e011", "553640e6", "0999", "y")


@given(
    st.one_of(st.sampled_from(sorted(TABLE)), st.from_regex(r"[-+0-9._eExXoObByYnN:]{1,8}", fullmatch=True))
)
@example("1e-4")
@example("9" * 5000)
def test_a_text_is_written_so_that_every_reader_finds_it(text: str) -> None:
    written = dump({"args": [text], "labels": {text: text}})
    expected = {"args": [text], "labels": {text: text}}
    assert yaml.safe_load(written) == expected
    if len(text) < 1000:
        assert YAML(typ="safe", pure=True).load(written) == expected  # YAML 1.2
    assert load(written) == [expected]


@pytest.mark.parametrize(
    "text", [*REPORTED, *(one for one, answer in TABLE.items() if answer.get("value") != one)]
)
def test_what_the_server_takes_for_something_else_is_in_quotes(text: str) -> None:
    line = dump([text]).splitlines()[1]
    assert line.removeprefix("- ")[0] in "'\"" or line.lstrip().startswith("- !")


def test_arguments_of_a_job_stay_texts() -> None:
    job = gpu_job(image="x:1", gpus=1, command=("python", "train.py", "--lr", "1e-4", "--seed", "08", "y"))
    text = dump(*job.manifests())
    assert "- '1e-4'\n" in text
    assert "- '08'\n" in text
    assert "- 'y'\n" in text


def test_a_check_finds_what_the_server_finds_and_its_fix_keeps_the_value() -> None:
    reading = Reading()
    reading.text(POD, "pod.yaml")
    report = apply_rules(reading, Context(), ["schema"])
    assert [(one.evidence["line"], one.evidence["path"]) for one in report.findings] == [
        (3, "metadata.labels.team"),
        (7, "spec.containers[0].args[1]"),
    ]
    assert report.findings[0].message.endswith(
        'found y, which is true in Kubernetes\' YAML, wanted a text: put it in quotes, "y"'
    )
    assert report.findings[1].message.endswith('put it in quotes, "1e-4"')


def test_the_items_of_a_list_are_shown_as_they_are_written() -> None:
    reading = Reading()
    items = "".join(f"  {line}\n" for line in POD.splitlines()).replace("  api", "- api", 1)
    reading.text(f"apiVersion: v1\nkind: List\nitems:\n{items}", "list.yaml")
    report = apply_rules(reading, Context(), ["schema"])
    assert [one.message.rpartition(" ")[2] for one in report.findings] == ['"y"', '"1e-4"']


def test_a_merge_replaces_the_keys_above_it() -> None:
    assert load("a: 1\n<<: [{a: 2, b: 2}, {a: 3, c: 3}]\nc: 4\n") == [{"a": 2, "b": 2, "c": 4}]


def test_a_key_that_is_no_text_has_its_line() -> None:
    [document] = documents("labels:\n  a: x\n  on: y\n")
    assert not isinstance(document, BrokenError)
    assert document.value == {"labels": {"a": "x", "true": True}}
    assert document.line_of(("labels", "true")) == 3


def test_is_text() -> None:
    assert not scalars.is_text("1:30")
    assert scalars.is_text("v1.36")
