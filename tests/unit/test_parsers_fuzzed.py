"""Whatever a parser is given, it returns or raises the error that it documents, and never another one.

The examples are derived from each test's name, so that a run finds what the last one found; what was found is
kept as an explicit example, in order that it is tried for ever.
"""

import contextlib
import copy
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gpukiln.attest import newest_release, sbom, signing, statements
from gpukiln.catalog.load import read_yaml
from gpukiln.clouds.embedded import scarcity
from gpukiln.clouds.embedded.gpus.settings import read_scenario
from gpukiln.disks import identify
from gpukiln.docker import repository
from gpukiln.errors import CheckFailedError, GpukilnError, IncompatibleError, UsageError
from gpukiln.gpus import amd, config, engines, mig
from gpukiln.images import keys, pointer
from gpukiln.images.builds import Build
from gpukiln.kubernetes.addons import sharing
from gpukiln.kubernetes.check import evaluate, output, reading, rules, schema
from gpukiln.kubernetes.nodes import hours
from gpukiln.kubernetes.pools import pools_in
from gpukiln.kubernetes.quantity import parse_quantity, quantity
from gpukiln.nodes.hosts import find_targets
from gpukiln.nodes.passthrough.api import _parse_host_port
from gpukiln.nodes.passthrough.apply import read_undo
from gpukiln.offers import request, size
from gpukiln.parsing import check_yaml, parse_json, parse_yaml, refuse_credentials
from gpukiln.pipeline import verdict_tags
from gpukiln.release.osv import load_osv
from gpukiln.sources.rpm import _parse_streams
from gpukiln.sources.ubuntu import parse_index
from gpukiln.ssh import parse_ssh
from gpukiln.units import Duration, Memory, Money, Span, is_whole, whole
from gpukiln.workspaces import spec as contracts
from gpukiln.workspaces.spec import _assignment
from tests.support.disks import gpt
from tests.support.plans import BAKE

BOUNDED = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# Words that parsers of options look for, in any order and number.
WORDS = (
    *(
        "80GB",
        "24GiB",
        "..",
        ":",
        ",",
        "=",
        "-",
        "@",
        "/",
        "://",
        "[",
        "]",
        "::1",
        "]:",
        "?",
        "'",
        '"',
        "\\",
        "\n",
    ),
    *(
        "ssh",
        "https",
        "T4",
        "A100",
        "1g.5gb",
        "mig",
        "time-slicing",
        "mon-fri",
        "08:00",
        "9" * 20,
        "9" * 5000,
    ),
    *(
        "0x",
        "1e400",
        "inf",
        "nan",
        "-1",
        "0.5",
        "Ki",
        "m",
        "²",
        "٣",
        "\x00",
        "\u2028",
        "{",
        "}",
        "&a",
        "*a",
        "!!int",
    ),
    *(
        "quota:L-1",
        "reservation",
        "spot",
        "1h",
        "30d",
        "v1.35",
        "1.34..1.36",
        "true",
        "null",
        "~",
        "#",
        "{{",
        "<<E",
    ),
)
typed = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=6).map("".join)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**300, max_value=10**310),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=6),
)


def values(keys: st.SearchStrategy[str] = st.text(max_size=6)) -> st.SearchStrategy[Any]:  # noqa: B008 - a constant
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
        max_leaves=12,
    )


OPTIONS: Mapping[str, tuple[Callable[[str], Any], tuple[type[Exception], ...]]] = {
    "offer --gpu": (request.parse_request, (UsageError,)),
    "memory": (lambda word: Memory.parse(word, "--memory").shown, (UsageError,)),
    "duration": (lambda word: Duration.parse(word, "--for").shown, (UsageError,)),
    "money": (lambda word: Money.parse(word, "--max-price"), (UsageError,)),
    "range": (lambda word: Span.parse(word, "--gpu"), (UsageError,)),
    "offer.size": (size.parameters, (UsageError,)),
    "gpu --count": (lambda word: whole(word, "--count"), (UsageError,)),
    "whole number": (lambda word: int(word) if is_whole(word) else None, ()),
    "quantity": (quantity, ()),
    "k8s.job --cpu": (lambda word: parse_quantity(word, "--cpu", "4"), (UsageError,)),
    "k8s.check --kubernetes": (schema.minors, (UsageError,)),
    "k8s.addons --sharing": (sharing.parse, (UsageError, IncompatibleError)),
    "k8s.nodes --hours": (hours.parse, (UsageError,)),
    "--hosts": (lambda word: find_targets(word.replace("ansible", "x") or "local://", None), (UsageError,)),
    "ssh": (lambda word: parse_ssh(f"ssh://{word}"), (UsageError,)),
    "--pve": (_parse_host_port, (UsageError,)),
    "docker.push": (repository.parse, (UsageError,)),
    "cloud.gpus --scarce": (scarcity._parse, (UsageError,)),
    "workspace --set": (lambda word: _assignment(f"a.b={word}"), (UsageError,)),
    "address": (lambda word: refuse_credentials(word, "--url", where="a file"), (UsageError,)),
    "verdict": (lambda word: verdict_tags._parse("ami-1", "gpukiln:verdict:t", word, "t"), (UsageError,)),
    "list of packages": (parse_index, (GpukilnError,)),
    "list of modules": (
        lambda word: _parse_streams(word.encode(), "https://mirror.example"),
        (GpukilnError,),
    ),
    "pointer": (
        lambda word: pointer._version(
            {"Description": word, "Value": "ami-1", "Version": 1, "LastModifiedDate": NOW}
        ),
        (),
    ),
    "JSON": (parse_json, (ValueError,)),
    "YAML": (parse_yaml, (ValueError, yaml.YAMLError)),
    "limits of YAML": (check_yaml, (ValueError, yaml.YAMLError)),
    "signature": (signing._parse_envelope, (CheckFailedError,)),
    "statement in parts": (lambda word: statements.stored_statements(parameter(word), "ami-1"), ()),
    "--sign-key": (lambda word: keys.kms_key(f"awskms:{word}"), (UsageError,)),
}
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def parameter(value: str) -> Any:
    """A client of SSM that has one parameter."""
    row = {"Name": "/gpukiln-attestations/ami-1/release/stable", "Value": value}
    pages = SimpleNamespace(paginate=lambda **_: [{"Parameters": [row]}])
    return SimpleNamespace(get_paginator=lambda _: pages)


@pytest.mark.parametrize("name", OPTIONS)
@BOUNDED
@given(word=typed)
@example(word="A100:80GB80GB")
@example(word="80GiB80GiB")
@example(word="[::1")
@example(word="[:::::]")
@example(word="host:99999")
@example(word="9" * 5000)
@example(word="[" * 40_000)
@example(word="0x" + "f" * 5000)
@example(word="!!int ''")
def test_what_is_typed_is_read_or_refused(name: str, word: str) -> None:
    read, errors = OPTIONS[name]
    with contextlib.suppress(*errors):
        read(word)


def written(reader: Callable[[Path], Any], ending: str) -> Callable[[str, Path], Any]:
    def read(content: str, folder: Path) -> Any:
        file = folder / f"file{ending}"
        file.write_text(content, encoding="utf-8", errors="surrogatepass")
        return reader(file)

    return read


def contract(file: Path) -> None:
    contracts.read_spec(contracts.contract_document(file), where=str(file))


FILES: Mapping[str, Callable[[str, Path], Any]] = {
    "YAML": written(read_yaml, ".yaml"),
    "scenario": written(read_scenario, ".yaml"),
    "MIG": written(lambda file: mig.read_config(file, ""), ".yaml"),
    "contract": written(contract, ".json"),
    "contract as YAML": written(contract, ".yaml"),
    "limits": written(config.load, ".toml"),
    "record": written(Build.read_file, ".json"),
    "undo": written(read_undo, ".json"),
    "osv": written(lambda file: load_osv([file]), ".json"),
    "newest release": written(newest_release._read, ".json"),
}
KEYS = {
    "scenario": ("set",),
    "MIG": (
        "version",
        "mig-configs",
        "devices",
        "mig-enabled",
        "mig-devices",
        "device-filter",
        "all",
        "1g.5gb",
    ),
    "contract": ("schema_version", "workspace_name", "compute_profile", "gpu_type", "gpu_count", "services"),
    "record": ("schema", "plan", "id", "state", "bake", "verdicts", "durations_s"),
    "undo": ("schema", "vm", "before", "after", "pve", "node"),
    "newest release": ("number", "image_id", "key", "/gpukiln/eks-gpu/1.34/stable/image_id"),
    "osv": ("id", "modified", "affected", "package", "ranges", "events", "versions", "name", "ecosystem"),
}


@pytest.mark.parametrize("name", FILES)
@BOUNDED
@given(content=st.one_of(typed, st.text(max_size=40)))
@example(content="[" * 40_000)
@example(content="a = " + "[" * 40_000)
@example(content='{"schema": ' + "9" * 5000 + "}")
@example(content="limits = {gpus = 0x" + "f" * 5000 + "}")
def test_any_text_in_a_file_is_read_or_refused(tmp_path: Path, name: str, content: str) -> None:
    with contextlib.suppress(GpukilnError):
        FILES[name](content, tmp_path)


@pytest.mark.parametrize("name", KEYS)
@BOUNDED
@given(data=st.data())
def test_any_value_in_a_file_is_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    keys = st.sampled_from(KEYS[name])
    document = data.draw(st.dictionaries(keys, values(keys), max_size=6))
    document |= {"schema": 1, "version": "v1"} if data.draw(st.booleans()) else {}
    with contextlib.suppress(GpukilnError):
        FILES[name](json.dumps(document), tmp_path)


# Manifests: what is valid, with any value anywhere.
MANIFEST: dict[str, Any] = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "a", "labels": {"a": "b"}, "annotations": {"gpukiln.io/skip": "rule"}},
    "spec": {
        "backoffLimit": 1,
        "template": {
            "metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "true"}},
            "spec": {
                "restartPolicy": "Never",
                "nodeSelector": {"nvidia.com/gpu.present": "true"},
                "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [
                                {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["1"]}]}
                            ]
                        }
                    }
                },
                "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
                "containers": [
                    {
                        "name": "a",
                        "image": "nvidia/cuda:12.1.0-base-ubuntu22.04",
                        "command": ["sh", "-c", "nvidia-smi"],
                        "env": [{"name": "CUDA_VISIBLE_DEVICES", "value": "0"}],
                        "resources": {
                            "limits": {"nvidia.com/gpu": 1, "memory": "1Gi"},
                            "requests": {"cpu": 1},
                        },
                        "volumeMounts": [{"name": "shm", "mountPath": "/shm"}],
                    }
                ],
            },
        },
    },
}
NODE_POOL: dict[str, Any] = {
    "apiVersion": "karpenter.sh/v1",
    "kind": "NodePool",
    "metadata": {"name": "gpu"},
    "spec": {
        "limits": {"nvidia.com/gpu": 8},
        "disruption": {"consolidationPolicy": "WhenEmpty", "budgets": [{"nodes": "10%"}]},
        "template": {
            "spec": {
                "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": "gpu"},
                "requirements": [
                    {"key": "karpenter.k8s.aws/instance-gpu-count", "operator": "Gt", "values": ["0"]},
                    {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["g5.xlarge"]},
                ],
            }
        },
    },
}
CLUSTER: dict[str, Any] = {
    "apiVersion": "eksctl.io/v1alpha5",
    "kind": "ClusterConfig",
    "nodeGroups": [
        {"instancesDistribution": {"instanceTypes": ["g5.xlarge"]}, "taints": {"a": "b:NoSchedule"}}
    ],
    "managedNodeGroups": [
        {
            "name": "gpu",
            "instanceType": "g4dn.xlarge",
            "labels": {"a": "b"},
            "taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
        }
    ],
}
VALUES: dict[str, Any] = {
    "nvidia": {"runtimeClassName": "nvidia"},
    "image": {"repository": "nvcr.io/nvidia/k8s-device-plugin", "tag": "v0.17.0"},
    "config": {"map": {"default": "version: v1"}},
    "tolerations": [{"operator": "Exists"}],
    "driver": {"enabled": True},
    "resources": {"limits": {"nvidia.com/gpu": 1}},
}
ALERTS: dict[str, Any] = {
    "apiVersion": "monitoring.coreos.com/v1",
    "kind": "PrometheusRule",
    "metadata": {"name": "a"},
    "spec": {
        "groups": [
            {"name": "a", "rules": [{"alert": "A", "expr": "DCGM_FI_DEV_XID_ERRORS > 0", "for": "1m"}]}
        ]
    },
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        found += places(below, (*path, key))
    return found


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(document)
    at = made
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return made


def judged(content: str, name: str) -> None:
    found = reading.Reading()
    found.text(content, name)
    report = evaluate.apply_rules(found, rules.Context(resources=tuple(found.resources)))
    list(output.lines(report))
    json.dumps(output.code_scanning(report))


@pytest.mark.parametrize(
    "document", [MANIFEST, NODE_POOL, VALUES, ALERTS], ids=["job", "pool", "values", "alerts"]
)
@settings(BOUNDED, max_examples=50)
@given(data=st.data())
def test_the_check_judges_any_value_anywhere(document: dict[str, Any], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(places(document)))
    value = data.draw(values())
    judged(yaml.safe_dump(changed(document, path, value), allow_unicode=True), "a.yaml")


@pytest.mark.parametrize("document", [NODE_POOL, CLUSTER], ids=["karpenter", "eksctl"])
@BOUNDED
@given(data=st.data())
def test_a_pod_is_held_against_whatever_a_pool_says(document: dict[str, Any], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(places(document)))
    made = changed(document, path, data.draw(values()))
    judged(yaml.safe_dump_all([made, MANIFEST], allow_unicode=True), "a.yaml")


@pytest.mark.parametrize(
    "path", places(NODE_POOL) + places(CLUSTER), ids=lambda path: ".".join(map(str, path))
)
@pytest.mark.parametrize("value", [None, [], {}, "x", 1, [None], {"a": None}], ids=repr)
def test_every_place_of_a_pool_may_have_another_form(path: tuple[Any, ...], value: Any) -> None:
    document = NODE_POOL if path in places(NODE_POOL) else CLUSTER
    found = pools_in([changed(document, path, value)])
    assert all(pool.types for pool in found)


LINES = (
    *("```yaml\n", "```\n", "kind: Pod\n", "apiVersion: v1\n", "---\n", "cat <<E\n", "E\n", "# gpu\n"),
    *("kubectl run a --overrides='{}'\n", "kubectl label nodes a b=c\n", "helm install a b\n", "\\\n"),
    *(
        "docker run --gpus all x\n",
        "expr: DCGM_FI_DEV_GPU_UTIL{a=\n",
        "spec: {containers: [\n",
        "resources:\n",
    ),
    "k8s-device-plugin:v" + "9" * 5000 + ".1\n",
)


@pytest.mark.parametrize("name", ["a.sh", "a.md", "a.yaml", "a"])
@BOUNDED
@given(content=st.lists(st.one_of(st.sampled_from(LINES), typed), max_size=12).map("".join))
@example(content="```yaml\n" + "[" * 40_000)
@example(content="kubectl run a --overrides='" + "[" * 40_000 + "'")
@example(content="kind: Pod\nspec: !!int ''\n")
def test_the_check_judges_any_text(name: str, content: str) -> None:
    judged(content, name)


SAID = (
    *(
        "gpu",
        "bdf",
        "asic",
        "market_name",
        "vendor_id",
        "asic_serial",
        "vram",
        "size",
        "usage",
        "power",
        "unit",
    ),
    *("unit", "mem_usage", "value", "process_list", "process_info", "pid", "mem", "temperature", "edge"),
)
answers = st.dictionaries(st.sampled_from(SAID), values(st.sampled_from(SAID)), max_size=4)


@BOUNDED
@given(
    rows=st.dictionaries(
        st.integers(0, 3),
        st.dictionaries(st.sampled_from(("list", "static", "metric", "process")), answers, max_size=4),
        max_size=3,
    )
)
@example(rows={0: {"static": {"asic": {"vendor_id": "x", "device_id": "y", "asic_serial": "0x"}}}})
@example(rows={0: {"metric": {"power": {"socket_power": {"value": float("nan"), "unit": "W"}}}}})
@example(rows={0: {"metric": {"mem_usage": {"total_vram": {"value": 10**400, "unit": "TB"}}}}})
def test_whatever_amd_smi_prints_makes_devices(rows: dict[int, dict[str, Any]]) -> None:
    look = amd.AmdAnswer(rows=rows)
    devices = amd._devices(look, [])
    amd._processes(look, devices)
    amd._driver(look)
    assert len(devices) == len(rows)


@BOUNDED
@given(
    container=st.fixed_dictionaries(
        {
            "HostConfig": st.fixed_dictionaries(
                {
                    "DeviceRequests": st.lists(
                        st.fixed_dictionaries(
                            {
                                "Count": st.one_of(st.none(), st.integers()),
                                "Driver": st.sampled_from(("", "nvidia", "cdi")),
                                "DeviceIDs": st.one_of(st.none(), st.lists(typed, max_size=2)),
                                "Capabilities": st.sampled_from((None, [["gpu"]])),
                            }
                        ),
                        max_size=2,
                    )
                }
            )
        }
    )
)
def test_whatever_a_container_asks_for_is_read(container: dict[str, Any]) -> None:
    engines.devices_of_container(container, [])


@BOUNDED
@given(at=st.integers(0, 1200), data=st.binary(min_size=1, max_size=16), sealed=st.booleans())
@example(at=512 + 72, data=(2**60).to_bytes(8, "little"), sealed=True)
@example(at=1024 + 32, data=(2**60).to_bytes(8, "little"), sealed=True)
def test_any_partition_table_is_read_or_refused(tmp_path: Path, at: int, data: bytes, sealed: bool) -> None:
    with contextlib.suppress(IncompatibleError):
        identify.inspect_disk(gpt(tmp_path, at, data, sealed=sealed))


PARTS = ("components", "metadata", "component", "version", "name", "purl", "bom-ref")


@BOUNDED
@given(document=values(st.sampled_from(PARTS)))
def test_any_sbom_is_compared(document: Any) -> None:
    assert sbom.sbom_difference(json.dumps(document).encode(), BAKE)
