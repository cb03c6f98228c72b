"""The contract as people write it: what is read, what is refused, and in which words."""

import json
import random
from dataclasses import fields
from pathlib import Path

import jsonschema
import pytest

from gpukiln.cli import schemas
from gpukiln.errors import UsageError
from gpukiln.offers.request import parse_request
from gpukiln.typed import dump
from gpukiln.workspaces.contract import Capabilities, ComputeProfile, Workspace
from gpukiln.workspaces.spec import FORMER_FIELDS, contract_document, read_spec

ROOT = Path(__file__).parents[2]
LEAST = {"workspace_name": "vision", "owner": "ann", "region": "us-west-2"}
SEED = 20


def parse(document, *, where):
    return read_spec(document, where=where).contract


def read(file):
    return parse(contract_document(file), where=str(file))


def said(**more):
    """What is told of a contract that is refused: the message and its details."""
    with pytest.raises(UsageError) as refused:
        parse({**LEAST, **more}, where="w.yaml")
    return "\n".join((refused.value.message, *refused.value.details, refused.value.hint or ""))


def test_a_contract_of_the_first_document_but_its_place_is_read(tmp_path):
    """Its usage, with the subnet as a list and without the zone."""
    file = tmp_path / "w.yaml"
    file.write_text(
        """
workspace_name: vision
owner: ann
region: us-west-2
compute_profile: {cpu: 8, memory: 32Gi, storage: 500Gi, gpu_count: 1, gpu_type: nvidia-t4}
capabilities: {persistent_home: true, network_egress: https-only, identity_mode: iam, gpu_support: true}
toolchain_template: {name: datasci-toolchain, version: 1.1.0}
vpc_id: vpc-1
subnet_ids: [subnet-1, subnet-2]
instance_profile_name: people
agent_init_script: echo hello
"""
    )
    wanted = read(file)
    assert wanted.compute_profile == ComputeProfile(8, "32Gi", "500Gi", 1, "nvidia-t4")
    assert wanted.subnet_ids == ("subnet-1", "subnet-2")
    same = tmp_path / "w.json"
    same.write_text(json.dumps(dump(wanted), indent="\t"))  # which no YAML may be
    assert read(same) == wanted


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("subnet_id", "subnet_ids: [subnet-1]"),
        ("availability_zone", "leave it out"),
        ("os_type", "the image says the system"),
        ("coder_agent_init_script", "agent_init_script"),
    ],
)
def test_what_contracts_said_before_is_refused_with_what_they_say_now(name, instead):
    assert name in FORMER_FIELDS
    words = said(**{name: "subnet-1"})
    assert words.startswith(f"w.yaml: {name} was found, wanted")
    assert instead in words


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"compute_profil": {}}, "did you mean compute_profile?"),
        ({"capabilities": {"persistent-home": True}}, "did you mean persistent_home?"),
        ({"capabilities": {"gui_rdp": True}}, "it is for Windows"),
        ({"capabilities": {"network_egress": "all"}}, "wanted 'none', 'https-only' or 'open'"),
        ({"capabilities": {"artifact_cache": "nfs://x"}}, "s3://BUCKET/PREFIX, or an EFS id"),
        ({"capabilities": {"secrets": {"A-B": "a/b"}}}, "wanted the name of an environment variable"),
        ({"capabilities": {"secrets": ["TOKEN"]}}, "NAME: REFERENCE"),
        (
            {"capabilities": {"secrets": {"X": "/a"}, "identity_mode": "none"}},
            "fetched with the machine's rights",
        ),
        ({"capabilities": {"secrets": {"../x": "/a"}}}, "wanted the name of an environment variable"),
        ({"compute_profile": {"gpu_type": "nvidia-t44"}}, "unknown GPU 'nvidia-t44'; valid: A10, A100 40GB"),
        ({"compute_profile": {"gpu_type": "g4dn.xlarge"}}, "is an instance type, wanted GPUs"),
        ({"compute_profile": {"gpu_type": "T4:2"}}, "gpu_count says how many"),
        ({"compute_profile": {"memory": "32"}}, "found '32', wanted with its unit, such as 32GiB"),
        ({"compute_profile": {"cpu": -1}}, "compute_profile.cpu: found -1, wanted 0 or more"),
        ({"idle_minutes": -5}, "idle_minutes: found -5, wanted 0 or more"),
        ({"toolchain_template": {"name": "a", "version": 1.1}}, 'put it in quotes, "1.1"'),
        ({"services": "ollama"}, "wanted a list"),
        ({"workspace_name": "Vision"}, "wanted small letters, digits and `-`"),
        ({"region": "us-west-22"}, "did you mean us-west-2"),
        ({"ssh_from": "0.0.0.0/0"}, "is every address"),
        ({"ssh_from": "my house"}, "for example 203.0.113.7/32"),
    ],
)
def test_a_mistake_is_told_with_what_is_wanted(more, words):
    assert words in said(**more)


def test_every_mistake_is_told_at_once():
    found = said(compute_profile={"cpu": -1, "gpu_count": -2}, ssh_from="::/0")
    assert found.startswith("w.yaml: 3 mistakes")


@pytest.mark.parametrize("value", ["hunter2 hunter2", 17_061_986, ["hunter2"]])
def test_what_stands_where_a_reference_should_is_not_shown(value):
    found = said(capabilities={"secrets": {"TOKEN": value}})
    assert "TOKEN" in found
    assert not any(part in found for part in ("hunter2", "17061986", "17_061_986"))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("w.json", "{", "is no valid JSON"),
        ("w.json", "[]", "wanted: keys with values"),
        ("w.yaml", "a: [", "no valid YAML"),
        ("w.yaml", "", "is empty"),
        ("w.json", "[" * 100_000, "is no valid JSON"),
    ],
)
def test_a_file_that_is_none(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UsageError, match=words):
        read(file)
    file.unlink()
    with pytest.raises(UsageError, match="can't read"):
        read(file)


def test_a_name_and_a_size_may_be_written_two_ways():
    for one, other in (("T4", "nvidia-t4"), ("A10G", "nvidia-a10g"), ("A100", "nvidia-a100")):
        assert parse_request(one) == parse_request(other)
    assert parse({**LEAST, "compute_profile": {"memory": "32GiB"}}, where="w").compute_profile.memory


def some_contract(rng):
    """A contract that is right, with any of its fields left out."""
    letters = "abcdefghijklmnopqrstuvwxyz"

    def some(values):
        return {key: value for key, value in values.items() if rng.random() < 0.5}

    mode = rng.choice(["iam", "none"])
    secrets = {"TOKEN": "/people/token"} if mode == "iam" else {}  # fetched with the machine's rights
    sizes = [f"{rng.randint(1, 999)}{unit}" for unit in ("Mi", "Gi", "Ti", "MiB", "GiB", "TiB")]
    return {
        "workspace_name": "".join(rng.choices(letters, k=rng.randint(1, 32))),
        "owner": "".join(rng.choices(letters, k=rng.randint(1, 32))),
        "region": rng.choice(["us-west-2", "eu-west-1", "cn-north-1"]),
        **some(
            {
                "compute_profile": some(
                    {
                        "cpu": rng.randint(0, 192),
                        "memory": rng.choice([*sizes, None]),
                        "storage": rng.choice(sizes),
                        "gpu_count": rng.randint(0, 8),
                        "gpu_type": rng.choice(["", "T4", "nvidia-t4", "A10G,L4"]),
                    }
                ),
                "capabilities": some(
                    {
                        "persistent_home": rng.random() < 0.5,
                        "network_egress": rng.choice(["none", "https-only", "open"]),
                        "identity_mode": mode,
                        "artifact_cache": rng.choice(["", "s3://people/cache", "fs-01234567"]),
                        "secrets": secrets,
                        "gui_rdp": False,
                    }
                ),
                "toolchain_template": rng.choice([None, {"name": "a", "version": "1.1.0"}]),
                "subnet_ids": [f"subnet-{rng.randint(1, 9)}"],
                "agent_init_script": "echo ${HOME} %{x} 'y'\n",
                "ssh_from": rng.choice(["", "203.0.113.7/32", "2001:db8::/64"]),
                "spot": rng.random() < 0.5,
                "idle_minutes": rng.randint(0, 600),
            }
        ),
    }


def test_what_is_read_fits_the_schema_and_is_read_again_the_same():
    rng = random.Random(SEED)  # noqa: S311 - contracts, no secrets
    form = {**schemas.schema_of("workspace"), "oneOf": [{"$ref": "#/$defs/Workspace"}]}
    fits = jsonschema.Draft202012Validator(form)
    for _ in range(300):
        document = some_contract(rng)
        fits.validate(document)
        wanted = parse(document, where="w")
        assert parse(dump(wanted), where="w") == wanted
        fits.validate(dump(wanted))


def test_no_document_ends_but_with_a_contract_or_with_words():
    """Fields of right contracts, each with what stands elsewhere."""
    rng = random.Random(SEED)  # noqa: S311 - contracts, no secrets
    odd = [None, True, -1, 10**400, 0.5, "", "\0", "x" * 200, [], {}, [[]], {"": None}, {1: 2}]
    groups = {"": Workspace, "compute_profile": ComputeProfile, "capabilities": Capabilities}
    refused = []
    for _ in range(1500):
        document = some_contract(rng)
        where, kind = rng.choice([*groups.items()])
        name, value = (
            rng.choice([*(one.name for one in fields(kind)), *FORMER_FIELDS, "new"]),
            rng.choice(odd),
        )
        if not where:
            document[name] = value
        else:
            document[where] = {**(document.get(where) or {}), name: value}
        try:
            parse(document, where="w.yaml")
        except UsageError as error:
            refused.append(error.message)
    assert len(refused) > 700
    assert [one for one in refused if not one.startswith("w.yaml: ") or len(one) > 1000] == []
