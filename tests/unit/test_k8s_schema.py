"""What k8s.* prints has the form that is published."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from gpukiln.commands import k8s_schema
from gpukiln.commands.forms import form_of
from gpukiln.commands.program import Program
from gpukiln.kubernetes.check import registry
from tasks import namespace
from tests.support.api_server import ApiServer, node

ROOT = Path(__file__).parents[2]
JOB = ("--image", "registry.example/a:1", "--gpus", "1", "--cpu", "1", "--memory", "8Gi", "--timeout", "1h")


def test_the_schema_is_published():
    made = "python -m gpukiln.commands.k8s_schema > docs/k8s.schema.json"
    assert json.loads((ROOT / "docs/k8s.schema.json").read_text()) == k8s_schema.schema(), f"run: {made}"


@pytest.mark.parametrize(
    "words",
    [
        ("k8s.check", str(ROOT / "tests/support/k8s_guides/kubernetes.txt")),
        ("k8s.check", "--rules"),
        ("k8s.doctor",),
        ("k8s.job", *JOB),
        ("k8s.addons",),
    ],
)
def test_documents_have_it(words, tmp_path, monkeypatch, capsys):
    server = ApiServer()
    server.add(node("gpu-1"))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    rest = ("--", "python3", "train.py") if words[0] == "k8s.job" else ()
    with contextlib.suppress(SystemExit):  # a job's command follows `--`, files their command
        Program(namespace).run(["invoke", *words, "--json", *rest])
    server.close()
    document = json.loads(capsys.readouterr().out)
    errors = list(Draft202012Validator(k8s_schema.schema()).iter_errors(document))
    assert not errors
    assert document["schema"] in k8s_schema.DOCUMENTS


def test_two_types_of_one_name_are_not_one_form():
    @dataclass(frozen=True)
    class Listing:
        others: int

    defs = {}
    form_of(registry.Listing, defs)
    with pytest.raises(ValueError, match="two types of one schema are called Listing"):
        form_of(Listing, defs)
