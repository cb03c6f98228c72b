"""The form rules of `k8s.check` against the answers of a kube-apiserver to objects with one fault.

`tests/support/k8s_server/objects.yaml` has objects that kube-apiserver 1.36.2 takes. A line of the other file
there has the number of one, a path in it, and changes there with the answer to the changed object: the
beginning of the message, or nothing where it was accepted. The requests had dryRun=All and
fieldValidation=Strict; those with node ports had no dryRun, which does not allocate them.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.kubernetes.check import rules_form, rules_server
from gpukiln.kubernetes.check.evaluate import apply_rules
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import Context, ManifestRule

DATA = Path(__file__).parents[1] / "support/k8s_server"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all((DATA / "objects.yaml").read_text()))
RULES = [
    one.id
    for module in (rules_form, rules_server)
    for one in vars(module).values()
    if isinstance(one, ManifestRule) and one.severity == "error"
]
# The API server takes it, and the scheduler places no such pod.
TAKEN_AND_WRONG = "wanted one whole number"


def answers() -> Iterator[tuple[dict[str, Any], str, str]]:
    """A changed object, the change in words, and the answer to it."""
    for line in (DATA / "answers.jsonl").read_text().splitlines():
        for length in (64, 254):
            line = line.replace(f'"{length} a"', f'"{"a" * length}"')  # noqa: PLW2901 - the same, written out
        number, path, *changes = json.loads(line)
        steps = [int(one) if one.isdigit() else one.replace("~1", "/") for one in path.split("/") if one]
        for operation, value, answer in changes:
            yield changed(OBJECTS[number], steps, operation, value), f"{number} {path} {value}", answer


def changed(whole: dict[str, Any], steps: list[str | int], operation: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(whole)
    above: Any = made
    for step in steps[: None if operation == "add" else -1]:
        above = above[step]
    if operation == "add":
        above[value[0]] = value[1]
    elif operation == "del":
        del above[steps[-1]]
    else:
        above[steps[-1]] = value
    return made


def errors(one: dict[str, Any]) -> list[str]:
    reading = Reading()
    reading.objects([one], "a")
    report = apply_rules(reading, Context(minors=(36,), resources=tuple(reading.resources)), only=RULES)
    return [f"{one.id}: {one.message}" for one in report.findings if TAKEN_AND_WRONG not in one.message]


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_an_object_that_the_server_takes_has_no_error(number: int) -> None:
    assert errors(OBJECTS[number]) == []


def test_most_of_what_the_server_refuses_is_found_and_nothing_that_it_takes() -> None:
    refused = found = 0
    wrong = []
    for one, change, answer in answers():
        messages = errors(one)
        refused += bool(answer)
        found += bool(answer) and bool(messages)
        if messages and not answer:
            wrong.append((change, messages))
    assert wrong == []
    assert refused > 2000
    assert found / refused >= 0.95


@pytest.mark.parametrize("minor", range(25, 38))
def test_the_table_of_validation_joins_every_version(minor: int) -> None:
    reading = Reading()
    reading.objects([OBJECTS[2], {**OBJECTS[2], "spec": {**OBJECTS[2]["spec"], "replicas": -1}}], "a")
    report = apply_rules(
        reading, Context(minors=(minor,), resources=tuple(reading.resources)), only=["schema"]
    )
    assert [one.evidence["path"] for one in report.findings] == ["spec.replicas"]
