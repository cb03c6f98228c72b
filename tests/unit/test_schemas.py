"""Every document of --json has a published schema, and is an object that names it."""

import ast
import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from gpukiln.cli import schemas
from gpukiln.cli.json_schema import ObjectSchema, SchemaBuilder
from gpukiln.cli.main import command, names
from gpukiln.findings import CheckedItem, Finding
from gpukiln.kubernetes.check import registry
from gpukiln.options import options_of
from tests.support import documents
from tests.support.api_server import ApiServer, node
from tests.support.exit_codes import invoke

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs/schemas"
JOB = ("--image", "registry.example/a:1", "--gpus", "1", "--cpu", "1", "--memory", "8Gi", "--timeout", "1h")


def with_json() -> list[str]:
    return [name for name in names() if "json" in {one.name for one in options_of(command(name))}]


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return schemas.files()


def test_the_published_schemas_are_those_of_the_code(files):
    published = {file.name: file.read_text() for file in PUBLISHED.iterdir()}
    assert published == files, "run: python -m gpukiln.cli.schemas docs/schemas"


def test_each_is_a_schema(files):
    for text in files.values():
        Draft202012Validator.check_schema(json.loads(text))


@pytest.mark.parametrize("name", with_json())
def test_a_command_with_json_has_a_document(name):
    found, _ = schemas.schemas_of(name.partition(".")[0])
    assert [one for one in found if name in documents.commands_of(one)]


def test_a_document_is_of_a_command_with_json():
    commands = set(with_json())
    for name in (name for noun in schemas.NOUNS for name in schemas.schemas_of(noun)[0]):
        assert commands.intersection(documents.commands_of(name)), name


def test_commands_print_documents_alone():
    """`print_json` is for the builder of others: IAM's policies."""
    for file in (ROOT / "gpukiln/commands").glob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert "print_json" not in names or file.stem == "cloud_policy", file


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ([], "a document is an object"),
        ({"builds": []}, "a document says its schema"),
        ({"schema": 1, "builds": []}, "its schema is a name"),
        ({"schema": "ami.lists/1", "builds": []}, "ami.lists/1 is not in"),
        ({"schema": "ami.list/1", "builds": [1]}, r"ami.list/1\['builds'\]\[0\]: 1 is not of type 'object'"),
        ({"schema": "ami.list/1", "builds": [], "more": 1}, "'more' was unexpected"),
        ({"schema": "ami.list/1"}, "'builds' is a required property"),
    ],
)
def test_a_document_of_another_form_fails_its_test(printed, message):
    documents.check({"schema": "ami.list/1", "builds": []})
    with pytest.raises(AssertionError, match=message):
        documents.check(printed)


@pytest.mark.parametrize(
    "words",
    [
        ("k8s.check", str(ROOT / "tests/support/k8s_guides/kubernetes.txt")),
        ("k8s.check", "--rules"),
        ("k8s.doctor",),
        ("k8s.job", *JOB),
        ("k8s.addons",),
        ("k8s.rbac",),
        ("ami.bases",),
        ("ami.list",),
        ("ami.timings",),
        ("cloud.gpus", "all", "--list"),
        ("cloud.status",),
        ("docker.check", "--driver", "535.309.01"),
        ("docker.list",),
        ("node.runs",),
        ("node.test", "--list"),
    ],
)
def test_documents_have_it(words, tmp_path, monkeypatch, capsys):
    server = ApiServer()
    server.add(node("gpu-1"))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.setenv("GPUKILN_HOME", str(tmp_path))
    rest = ("--", "python3", "train.py") if words[0] == "k8s.job" else ()
    with contextlib.suppress(SystemExit):  # a job's command follows `--`, files their command
        invoke([*words, "--json", *rest])
    server.close()
    document = documents.read(capsys.readouterr().out)
    assert words[0] in documents.commands_of(document["schema"])


def test_two_types_of_one_name_have_two_definitions():
    @dataclass(frozen=True)
    class RuleList:
        others: int

    builder = SchemaBuilder({})
    builder.of(registry.RuleList)
    assert builder.of(RuleList) == {"$ref": "#/$defs/TestSchemasRuleList"}
    assert set(builder.defs["RuleList"]["properties"]) == {"schema", "rules"}
    assert set(builder.defs["TestSchemasRuleList"]["properties"]) == {"others"}


def test_a_field_of_a_base_class_has_its_words():
    builder = SchemaBuilder({})
    builder.of(CheckedItem)
    fields = builder.defs["CheckedItem"]["properties"]
    assert fields["message"]["description"] == "What was found and what was wanted."
    assert "outcome" in fields


def test_a_form_is_a_record_with_more_fields():
    builder = SchemaBuilder({})
    made = builder.of(
        ObjectSchema(
            Finding, remedy=int, inner=[ObjectSchema(name=str)], other=(ObjectSchema(name=str), None)
        )
    )
    fields = made["properties"]
    assert fields["remedy"] == {"type": "integer"}
    assert fields["inner"]["items"]["required"] == ["name"]
    assert fields["other"]["anyOf"][1] == {"type": "null"}
    assert made["required"] == [*builder.defs["Finding"]["required"], "inner", "other"]
    assert made["additionalProperties"] is False
