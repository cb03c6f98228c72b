"""No manifest ends a check: every field of the rules' own examples is replaced by every type of JSON."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path as File
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpukiln.kubernetes.check import evaluate, output, registry
from gpukiln.kubernetes.check.evaluate import CheckReport, apply_rules
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import Context
from gpukiln.kubernetes.check.workload import Path
from gpukiln.kubernetes.check.yaml_tree import BrokenError, documents
from gpukiln.kubernetes.manifest import dump, load

SUPPORT = File(__file__).parents[1] / "support"
MANY = int(os.environ.get("GPUKILN_FUZZ", "300"))


def examples() -> Iterator[list[dict[str, Any]]]:
    for file in sorted((SUPPORT / "k8s_rules").glob("*.yaml")):
        [cases] = load(file.read_text(encoding="utf-8"))
        for text in (case[key] for case in cases if "file" not in case for key in ("fires", "near")):
            found = [one.value for one in documents(text) if not isinstance(one, BrokenError)]
            if found and all(isinstance(one, dict) for one in found):
                yield found
    yield from ([one] for one in load((SUPPORT / "k8s_valid.yaml").read_text(encoding="utf-8")))


def paths(value: Any, above: Path = ()) -> Iterator[Path]:
    yield above
    for key, below in value.items() if isinstance(value, dict) else ():
        yield from paths(below, (*above, key))
    for index, below in enumerate(value) if isinstance(value, list) else ():
        yield from paths(below, (*above, index))


EXAMPLES = list(examples())
FIELDS = [(which, path) for which, found in enumerate(EXAMPLES) for path in paths(found) if len(path) > 1]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.sampled_from(["-1", "1e3", "a=b:c", "{{ x }}", "$A", "Exists", "nvidia.com/gpu", "*", "1Gi"]),
)
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.dictionaries(st.sampled_from(["key", "name", "operator", "spec", "a"]), SCALARS, max_size=2),
    st.lists(
        st.dictionaries(st.sampled_from(["key", "name", "effect", "a"]), SCALARS, max_size=2), max_size=2
    ),
)


def replaced(found: list[dict[str, Any]], path: Path, value: Any) -> list[dict[str, Any]]:
    made = copy.deepcopy(found)
    place: Any = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return made


@settings(max_examples=MANY, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FIELDS), VALUES)
def test_no_form_of_a_field_ends_a_rule(field: tuple[int, Path], value: Any) -> None:
    which, path = field
    report = checked(dump(*replaced(EXAMPLES[which], path, value)))
    assert list(output.lines(report))
    assert output.code_scanning(report)
    assert not [one for one in report.unchecked if "failed on this document" in one.reason]


def checked(*texts: str) -> CheckReport:
    reading = Reading()
    for number, text in enumerate(texts):
        reading.text(text, f"{number}.yaml")
    return apply_rules(reading, Context(resources=tuple(reading.resources)))


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  %s
  containers: [{name: a, image: "r.example/a:1", resources: {limits: {nvidia.com/gpu: 1}}}]
"""
AFFINITY = (
    "affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: "
    "[{matchExpressions: [%s]}]}}}"
)
POOL = """\
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: gpu}
spec: {template: {spec: {taints: [{effect: NoSchedule}], requirements: []}}}
"""


FORMS = [
    POD % (AFFINITY % "{key: karpenter.k8s.aws/instance-cpu, operator: In, values: [8, 16]}"),
    POD % (AFFINITY % "{key: a, operator: Equals, values: [b]}"),
    POD % (AFFINITY % "{key: a, operator: In, values: b}"),
    POD % "nodeSelector: [a]",
]


@pytest.mark.parametrize("text", FORMS)
def test_a_pod_that_is_not_placed_is_a_note(text: str) -> None:
    [note] = checked(text).unchecked
    assert note.reason == "Pod p: its node selection is malformed, so no machine is searched"


@pytest.mark.parametrize("text", [*FORMS, POD % "overhead: {cpu: 1000000000000000000000000000000}", POOL])
def test_what_people_write_wrong_leaves_the_others_their_findings(text: str) -> None:
    report = checked(text, POD % "restartPolicy: Sometimes")
    assert not [one for one in report.unchecked if "failed on this document" in one.reason]
    assert "1.yaml" in {one.evidence["file"] for one in report.findings}
    assert [one.file for one in report.placed if one.on] == ["1.yaml"]


def test_a_rule_that_fails_is_a_note_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Iterator[Any]:
        raise KeyError("key")

    broken = [
        dataclasses.replace(one, check=fails) if one.id == "schema" else one for one in registry.rules()
    ]
    monkeypatch.setattr(evaluate, "rules", lambda: broken)
    monkeypatch.setattr(evaluate, "placement", fails)
    report = checked(POD % "restartPolicy: Sometimes", POD % "x: 1")
    assert [(one.file, one.line) for one in report.unchecked] == [("0.yaml", 1), ("1.yaml", 1)] * 2
    assert report.unchecked[0].reason == (
        "rule schema failed on this document; please report that with the document (KeyError: 'key')"
    )
    assert "the search for machines failed on this document" in report.unchecked[2].reason
    assert report.counts.unchecked == 4
    assert {one.evidence["file"] for one in report.findings} == {"0.yaml", "1.yaml"}


def test_a_document_that_the_reader_fails_on_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Reading._container  # a document with a container fails, others do not

    def fails(self: Reading, *arguments: Any) -> None:
        if arguments[0].resource.name == "p":
            raise TypeError("no text")
        original(self, *arguments)

    monkeypatch.setattr(Reading, "_container", fails)
    pod = POD % "restartPolicy: Sometimes"
    report = checked(f"{pod}---\n{pod.replace('name: p', 'name: other')}")
    assert "the reader failed on this document" in report.unchecked[0].reason
    assert "Pod other" in {one.object for one in report.findings}
