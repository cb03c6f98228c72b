"""`k8s.check`: what it reads, what it says, in which form, and its exit codes."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from gpukiln.errors import UnavailableError
from gpukiln.kubernetes.check import crds, live
from gpukiln.kubernetes.check.evaluate import CheckReport, apply_rules
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import NEWEST, Context
from gpukiln.kubernetes.check.workload import UncheckedItem, dotted
from gpukiln.kubernetes.cluster import Cluster
from gpukiln.kubernetes.quantity import quantity
from gpukiln.kubernetes.rbac import COMMAND_RULES
from tests.support.api_server import ApiServer, Fault
from tests.support.exit_codes import invoke

POD = """\
apiVersion: v1
kind: Pod
metadata: {name: p}
spec:
  containers:
    - name: main
      image: registry.example/main:1
      resources: {limits: {nvidia.com/gpu: %s, memory: 1Gi, cpu: 1}}
"""
GOOD, BAD = POD % 1, POD % 0.5
# Essential fields of SARIF 2.1.0 (docs.oasis-open.org/sarif/sarif/v2.1.0/os, sections 3.13 to 3.51).
TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name", "rules"],
                                "properties": {
                                    "rules": {
                                        "type": "array",
                                        "items": {
                                            "type": "object",
                                            "required": ["id", "shortDescription", "help"],
                                            "properties": {"shortDescription": TEXT, "help": TEXT},
                                        },
                                    }
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["ruleId", "ruleIndex", "level", "message", "locations"],
                            "properties": {
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "message": TEXT,
                                "locations": {
                                    "items": {
                                        "required": ["physicalLocation"],
                                        "properties": {
                                            "physicalLocation": {
                                                "required": ["artifactLocation", "region"],
                                                "properties": {
                                                    "region": {
                                                        "properties": {
                                                            "startLine": {"type": "integer", "minimum": 1}
                                                        }
                                                    }
                                                },
                                            }
                                        },
                                    }
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


class Said(NamedTuple):
    stdout: str
    stderr: str


Typed = Callable[..., Said]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Typed:
    """Run the command in a folder of its own; it must end with a code."""
    monkeypatch.chdir(tmp_path)

    def typed(*words: str, code: int = 0) -> Said:
        with pytest.raises(SystemExit) as ended:
            invoke(["k8s.check", *words])
        shown = Said(*capsys.readouterr())
        assert (ended.value.code or 0) == code, shown
        return shown

    return typed


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.close()


def read(text: str, name: str = "a.yaml") -> Reading:
    reading = Reading()
    reading.text(text, name)
    return reading


def judged(text: str, name: str = "a.yaml", **context: Any) -> CheckReport:
    reading = read(text, name)
    return apply_rules(reading, Context(resources=tuple(reading.resources), **context))


def wheres(text: str) -> list[str]:
    return [dotted(one.where) for one in read(text).workloads]


@pytest.mark.parametrize(
    ("kind", "spec", "where"),
    [
        ("Pod", "{containers: []}", ["spec"]),
        ("Job", "{template: {spec: {}}}", ["spec.template.spec"]),
        ("CronJob", "{jobTemplate: {spec: {template: {spec: {}}}}}", ["spec.jobTemplate.spec.template.spec"]),
        ("Deployment", "{template: {spec: {}}}", ["spec.template.spec"]),
        ("ReplicationController", "{template: {spec: {}}}", ["spec.template.spec"]),
        ("AutoscalingRunnerSet", "{template: {spec: {}}}", ["spec.template.spec"]),
        (
            "RayCluster",
            "{headGroupSpec: {template: {spec: {}}}, workerGroupSpecs: [{template: {spec: {}}}]}",
            ["spec.headGroupSpec.template.spec", "spec.workerGroupSpecs[0].template.spec"],
        ),
        (
            "RayJob",
            "{rayClusterSpec: {headGroupSpec: {template: {spec: {}}}}, submitterPodTemplate: {spec: {}}}",
            ["spec.rayClusterSpec.headGroupSpec.template.spec", "spec.submitterPodTemplate.spec"],
        ),
        (
            "RayService",
            "{rayClusterConfig: {headGroupSpec: {template: {spec: {}}}}}",
            ["spec.rayClusterConfig.headGroupSpec.template.spec"],
        ),
        (
            "PyTorchJob",
            "{pytorchReplicaSpecs: {Master: {template: {spec: {}}}, Worker: {template: {spec: {}}}}}",
            [
                "spec.pytorchReplicaSpecs.Master.template.spec",
                "spec.pytorchReplicaSpecs.Worker.template.spec",
            ],
        ),
        (
            "MPIJob",
            "{mpiReplicaSpecs: {Launcher: {template: {spec: {}}}}}",
            ["spec.mpiReplicaSpecs.Launcher.template.spec"],
        ),
        (
            "JobSet",
            "{replicatedJobs: [{template: {spec: {template: {spec: {}}}}}]}",
            ["spec.replicatedJobs[0].template.spec.template.spec"],
        ),
        ("ConfigMap", "{template: {spec: {}}}", []),
    ],
)
def test_pods_are_found_in_what_starts_them(kind: str, spec: str, where: list[str]) -> None:
    assert wheres(f"apiVersion: x/v1\nkind: {kind}\nmetadata: {{name: a}}\nspec: {spec}\n") == where


def test_the_objects_of_a_list_are_objects_with_their_own_lines() -> None:
    text = "apiVersion: v1\nkind: List\nitems:\n" + "".join(
        "  - " + one.replace("\n", "\n    ").rstrip() + "\n" for one in (GOOD, BAD)
    )
    (found,) = judged(text).findings
    assert (found.id, found.object, found.evidence["line"]) == ("gpu-whole", "Pod p", 19)


def test_values_of_a_runner_set_are_judged_where_they_stand() -> None:
    text = """\
githubConfigUrl: https://github.com/o
template:
  spec:
    containers:
      - name: runner
        image: runner
        resources:
          limits: {nvidia.com/gpu: 0.5}
"""
    found = {one.id: (one.evidence["line"], one.evidence["path"]) for one in judged(text).findings}
    assert found["gpu-whole"] == (8, "template.spec.containers[0].resources.limits.nvidia.com/gpu")
    assert found["image-latest"] == (6, "template.spec.containers[0].image")


def test_what_people_mean_by_values_that_a_chart_has_not_is_judged_too() -> None:
    text = "runnerResources:\n  requests:\n    nvidia.com/gpu: 1\nimage: {repository: r/gpu, tag: latest}\n"
    report = judged(text)
    found = {(one.id, one.evidence["line"]) for one in report.findings}
    assert {("gpu-not-in-limits", 3), ("image-latest", 4), ("values-unknown-key", 1)} <= found
    assert "template.spec.containers" in next(
        one.remedy for one in report.findings if one.evidence["line"] == 1
    )


@pytest.mark.parametrize("selector", ["karpenter.sh/capacity-type: SPOT", "accelerator: nvidia-tesla-t4"])
def test_a_pod_whose_selector_is_wrong_is_not_said_to_run(selector: str) -> None:
    text = GOOD.replace("spec:\n", f"spec:\n  nodeSelector: {{{selector}}}\n", 1)
    [placed] = judged(text).placed
    assert placed.on == ()
    assert [selector in one.why for one in placed.not_on] == [True]
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    key, _, value = selector.partition(": ")
    term = (
        f"{{weight: 1, preference: {{matchExpressions: [{{key: {key}, operator: In, values: [{value}]}}]}}}}"
    )
    affinity = f"spec:\n  affinity: {{nodeAffinity: {{{preferred}: [{term}]}}}}\n"
    [placed] = judged(GOOD.replace("spec:\n", affinity, 1)).placed
    assert "g4dn.xlarge" in placed.on


def test_a_daemon_set_takes_room_on_the_nodes_alone_that_it_selects() -> None:
    daemon_set = """\
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: d}
spec:
  selector: {matchLabels: {app: d}}
  template:
    metadata: {labels: {app: d}}
    spec:
      nodeSelector: {team: vision}
      tolerations: [{operator: Exists}]
      containers: [{name: d, image: "r.example/d:1", resources: {requests: {cpu: "2"}}}]
"""
    pod = GOOD.replace("cpu: 1", "cpu: 3")  # of the 4 of a g4dn.xlarge; 80m are the kubelet's, 150m EKS' own
    selecting = pod.replace("name: p", "name: q", 1).replace(
        "spec:\n", "spec:\n  nodeSelector: {team: vision}\n", 1
    )
    anywhere, there = judged(f"{pod}---\n{selecting}{daemon_set}", types=("g4dn.xlarge",)).placed
    assert anywhere.on == ("g4dn.xlarge",)
    assert [one.why for one in there.not_on] == ["Insufficient cpu: 3 requested, 1770m left"]


POOL = """\
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: gpu}
spec:
  limits: {%s}
  template:
    spec:
      nodeClassRef: {group: karpenter.k8s.aws, kind: EC2NodeClass, name: gpu}
      requirements:
        - {key: node.kubernetes.io/instance-type, operator: In, values: [g4dn.xlarge, g4dn.2xlarge]}
---
apiVersion: karpenter.k8s.aws/v1
kind: EC2NodeClass
metadata: {name: gpu}
spec: {amiFamily: AL2023, %s}
---
"""


@pytest.mark.parametrize(
    ("limits", "of_class", "asked", "on"),
    [
        # A g4dn.xlarge has 4 vCPU, 16 GiB and 125 GB of NVMe, a g4dn.2xlarge twice that and 225 GB (EC2).
        ("cpu: 100", "", {"cpu": "3"}, ["g4dn.xlarge", "g4dn.2xlarge"]),
        ("cpu: 4", "", {"cpu": "3"}, ["g4dn.xlarge"]),
        ("memory: 20Gi", "", {"cpu": "3"}, ["g4dn.xlarge"]),
        ("", "", {"ephemeral-storage": "16Gi"}, ["g4dn.xlarge", "g4dn.2xlarge"]),  # 20, less 10 % and 1
        ("", "", {"ephemeral-storage": "18Gi"}, []),
        (
            "",
            "blockDeviceMappings: [{deviceName: /dev/xvda, ebs: {volumeSize: 100Gi}}]",
            {"ephemeral-storage": "89Gi"},
            ["g4dn.xlarge", "g4dn.2xlarge"],
        ),
        ("", "instanceStorePolicy: RAID0", {"ephemeral-storage": "150G"}, ["g4dn.2xlarge"]),
        ("", "kubelet: {maxPods: 2}", {"cpu": "1"}, []),  # aws-node and kube-proxy are there first
        ("", "kubelet: {maxPods: 3}", {"cpu": "1"}, ["g4dn.xlarge", "g4dn.2xlarge"]),
        ("", "kubelet: {podsPerCore: 1}", {"cpu": "1"}, ["g4dn.xlarge", "g4dn.2xlarge"]),
        ("", "kubelet: {systemReserved: {cpu: 500m}}", {"cpu": "3500m"}, ["g4dn.2xlarge"]),
        ("", "kubelet: {kubeReserved: {cpu: '1'}}", {"cpu": "3500m"}, ["g4dn.2xlarge"]),
        ("", "kubelet: {kubeReserved: {memory: 4Gi}}", {"memory": "12Gi"}, ["g4dn.2xlarge"]),
        ("", "kubelet: {evictionHard: {memory.available: 25%}}", {"memory": "12Gi"}, ["g4dn.2xlarge"]),
        ("", "kubelet: {maxPods: 'eniPods - 1'}", {"cpu": "1"}, ["g4dn.xlarge", "g4dn.2xlarge"]),
    ],
)
def test_what_a_pool_and_its_class_leave_for_pods(
    limits: str, of_class: str, asked: dict[str, str], on: list[str]
) -> None:
    resources = json.dumps({"requests": asked, "limits": {"nvidia.com/gpu": "1"}})
    pod = GOOD.replace("{limits: {nvidia.com/gpu: 1, memory: 1Gi, cpu: 1}}", resources)
    [placed] = judged(POOL % (limits, of_class) + pod).placed
    assert list(placed.on) == on


@pytest.mark.parametrize(
    ("of_pod", "on"),
    [
        ("{requests: {cpu: '5'}}", ["g4dn.2xlarge"]),
        ("{limits: {memory: 20Gi}}", ["g4dn.xlarge", "g4dn.2xlarge"]),  # the containers ask for less
        ("{requests: {memory: 2Gi}}", ["g4dn.xlarge", "g4dn.2xlarge"]),
    ],
)
def test_what_a_pod_itself_asks_for_counts(of_pod: str, on: list[str]) -> None:
    text = GOOD.replace("spec:\n", f"spec:\n  resources: {of_pod}\n", 1)
    [placed] = judged(POOL % ("", "") + text).placed
    assert list(placed.on) == on


@pytest.mark.parametrize(
    ("resource", "found", "fix"),
    [
        ("mig-1g.11gb", "no GPU has a MIG profile 1g.11gb", "1g.10gb"),
        ("mig-1g.5gb", "p4d.24xlarge is nearest", "NVIDIA-A100-SXM4-40GB"),
    ],
)
def test_advice_on_a_mig_profile_is_about_mig(resource: str, found: str, fix: str) -> None:
    # A p4d.24xlarge has 8 A100, each of 7 instances of 1g.5gb (NVIDIA, MIG user guide).
    text = (POD % 57).replace("gpu: 57", f"{resource}: 57")
    text = text.replace("spec:\n", "spec:\n  tolerations: [{key: nvidia.com/gpu, operator: Exists}]\n", 1)
    [finding] = [one for one in judged(text).findings if one.id == "fits-no-machine"]
    assert found in finding.message
    assert fix in finding.remedy
    assert "g4dn" not in finding.message + finding.remedy


def test_documents_are_read_block_by_block() -> None:
    text = f"""\
# GPUs

1. A pod:

   ```yaml
   {BAD.replace(chr(10), chr(10) + "   ").rstrip()}
   ```

```
NAME   READY
a      1/1
```

~~~sh
cat <<EOF | kubectl apply -f -
{BAD}EOF
~~~
"""
    found = [(one.id, one.evidence["line"]) for one in judged(text, "page.md").findings]
    assert found == [("gpu-whole", 13), ("gpu-whole", 30)]


def test_a_document_without_marks_shows_here_documents() -> None:
    text = f"Then run this:\n\nkubectl apply -f - <<'END'\n{BAD}END\nand wait.\n"
    assert [one.evidence["line"] for one in judged(text, "notes.txt").findings] == [11]


def test_kubectl_run_is_a_pod() -> None:
    overrides = '{"spec":{"nodeSelector":{"accelerator":"nvidia-tesla-t4"}}}'
    text = f"#!/bin/sh\nkubectl run t --image=nvidia/cuda:12.0-base \\\n  --overrides='{overrides}'\n"
    assert {one.id for one in judged(text, "t.sh").findings} == {"label-by-hand", "image-never-was"}


def test_a_broken_document_is_told_and_the_next_is_read() -> None:
    report = judged(f"{GOOD}---\nkind: Pod\nspec: {{containers: [}}\n---\n{BAD}")
    assert [(one.id, one.evidence["line"]) for one in report.findings] == [
        ("unreadable", 11),
        ("gpu-whole", 20),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: &a [*a]\n", 1),
        (
            "a: &a [x, x, x, x, x, x, x, x, x]\n"
            + "".join(
                f"b{n}: &b{n} [{', '.join(['*a' if n == 0 else f'*b{n - 1}'] * 9)}]\n" for n in range(9)
            ),
            7,
        ),
        ("[" * 500 + "]" * 500, 1),
        ("? [a]\n: b\n", 1),
        ("a: \x00\n", 1),
    ],
    ids=["itself", "laughs", "deep", "key", "control"],
)
def test_what_would_harm_a_reader_is_unreadable(text: str, line: int) -> None:
    (found,) = judged(text).findings
    assert (found.id, found.evidence["line"]) == ("unreadable", line)


def test_charts_are_not_checkable_and_told() -> None:
    report = judged("kind: Pod\nspec:\n  nodeName: {{ .Values.node }}\n")
    assert not report.findings
    assert [(one.line, "helm template" in one.reason) for one in report.unchecked] == [(3, True)]
    alert = 'groups: [{name: a, rules: [{alert: A, expr: "x > 1", annotations: {s: "{{ $labels.gpu }}"}}]}]\n'
    assert not judged(alert).unchecked  # of Prometheus, and read as it is


def test_kinds_of_others_are_told_and_their_pods_judged() -> None:
    report = judged(
        "apiVersion: example.com/v1\nkind: Job\nmetadata: {name: a}\nspec: {template: {spec: {}}}\n"
    )
    assert [one.reason for one in report.unchecked] == ["example.com/v1 Job: gpukiln has no schema of it"]
    assert [one.id for one in report.findings] == ["job-restart-policy"]


def test_json_with_tabs_and_byte_order_marks_are_read(tmp_path: Path, check: Typed) -> None:
    (tmp_path / "a.json").write_text(
        '{\n\t"apiVersion": "v1",\n\t"kind": "Pods",\n\t"metadata": {"name": "a"}\n}\n'
    )
    (tmp_path / "b.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    (tmp_path / "c.yaml").write_bytes(b"kind: Pod\nname: \xff\n")
    said = check(".", code=1).stdout
    assert "3 error   api-unknown: Pods a: no kind Pods in v1; did you mean Pod?" in said
    assert "b.yaml" not in said
    assert "2 error   unreadable: not UTF-8 text" in said


@pytest.mark.parametrize(
    ("minors", "found"), [((34,), "unknown field"), ((37,), ""), ((34, 37), "unknown field")]
)
def test_a_field_is_judged_by_every_version_that_is_asked_for(minors: tuple[int, ...], found: str) -> None:
    spec = "{containers: [{name: a, image: a}], schedulingGroup: {}}"
    text = f"apiVersion: v1\nkind: Pod\nmetadata: {{name: a}}\nspec: {spec}\n"
    told = " ".join(one.message for one in judged(text, minors=minors).findings if one.id == "schema")
    assert bool(told) == bool(found), told
    assert found in told


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5),
        ("16Gi", 16 * 2**30),
        ("1e3", 1000),
        ("2k", 2000),
        (".5", 0.5),
        (8, 8),
        ("-1", -1),
        ("16GB", None),
        ("1 Gi", None),
        ("", None),
        (True, None),
        ("1e9999", None),
        ("Gi", None),
    ],
)
def test_quantities(text: Any, value: float | None) -> None:
    assert quantity(text) == value


def test_an_annotation_skips_a_rule_with_its_reason() -> None:
    text = BAD.replace("{name: p}", "{name: p, annotations: {gpukiln.io/skip.gpu-whole: it must fail}}")
    report = judged(text)
    assert not report.findings
    assert [(one.rule, one.reason, one.findings) for one in report.skipped] == [
        ("gpu-whole", "it must fail", 1)
    ]


def test_text_and_exit_codes(tmp_path: Path, check: Typed) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)
    assert check("good.yaml").stdout.endswith(
        "1 file, 1 object, 1 pod: 0 errors, 0 warnings (Kubernetes 1.37)\n"
    )
    said = check("good.yaml", "bad.yaml", code=1).stdout
    assert said.startswith(
        "bad.yaml\n  8 error   gpu-whole: Pod p: nvidia.com/gpu: 0.5; wanted a whole number\n"
    )
    (tmp_path / "warn.yaml").write_text(GOOD.replace("main:1", "main"))
    assert "1 warning" in check("warn.yaml").stdout
    check("warn.yaml", "--strict", code=1)
    said = check("warn.yaml", "bad.yaml", "--skip", "gpu-whole=MIG, one day,image-latest").stdout
    assert "skipped: gpu-whole, 1 finding (MIG, one day)" in said
    assert "skipped: image-latest, 1 finding, without a reason" in said
    assert "0 errors, 0 warnings" in check("bad.yaml", "--rule", "image-latest,shm-default").stdout


def test_standard_input(check: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(BAD))
    assert json.loads(check("-", "--json", code=1).stdout)["findings"][0]["evidence"]["file"] == "-"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to check"),
        (["nosuch.yaml"], "nosuch.yaml: no such file or folder"),
        (["a.yml"], "did you mean a.yaml?"),
        (["a.yaml", "--rule", "gpu-whol"], "did you mean gpu-whole"),
        (["a.yaml", "--skip", "gpu-hole=x"], "unknown rule 'gpu-hole'"),
        (["a.yaml", "--kubernetes", "1.99"], "Kubernetes 1.99 has no schema here"),
        (["a.yaml", "--kubernetes", "latest"], "'latest' is no version of Kubernetes"),
        (["a.yaml", "--namespace", "x"], "belong to --cluster and --server"),
        (["empty"], "no file in it ends in"),
    ],
)
def test_what_is_typed_wrong_is_2(tmp_path: Path, check: Typed, words: list[str], message: str) -> None:
    (tmp_path / "a.yaml").write_text(GOOD)
    (tmp_path / "empty").mkdir()
    assert message in check(*words, code=2).stderr


def test_sarif_and_junit(tmp_path: Path, check: Typed) -> None:
    (tmp_path / "bad one.yaml").write_text(BAD.replace("main:1", "main"))
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "chart.yaml").write_text("a: {{ .Values.a }}\n")
    check("good.yaml", "bad one.yaml", "chart.yaml", "--sarif", "c.sarif", "--junit", "c.xml", code=1)
    sarif = json.loads((tmp_path / "c.sarif").read_text())
    jsonschema.validate(sarif, SARIF)
    run = sarif["runs"][0]
    assert [one["ruleId"] for one in run["results"]] == ["image-latest", "gpu-whole"]
    for one in run["results"]:
        assert run["tool"]["driver"]["rules"][one["ruleIndex"]]["id"] == one["ruleId"]
        assert one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "bad%20one.yaml"
    assert "helm template" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]
    root = ET.parse(tmp_path / "c.xml").getroot()  # noqa: S314 - it is ours
    assert {key: root.get(key) for key in ("tests", "failures", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "skipped": "1",
    }
    assert [one.get("name") for one in root.iter("testsuite")] == ["good.yaml", "bad one.yaml", "chart.yaml"]
    assert [len(one) for one in root.iter("testcase")] == [0, 1, 1, 1]


def test_the_rules_are_listed(check: Typed) -> None:
    said = check("--rules").stdout
    assert "job-restart-policy (error): The pods of a Job have restartPolicy Never or OnFailure" in said
    listed = json.loads(check("--rules", "--json").stdout)
    assert listed["schema"] == "k8s.rules/1"
    assert {"id", "severity", "reason", "source", "fix"} <= listed["rules"][0].keys()


@pytest.mark.usefixtures("server")
def test_the_server_is_asked_and_keeps_nothing(tmp_path: Path, check: Typed) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    assert "0 errors" in check("good.yaml", "--server").stdout
    (tmp_path / "other.yaml").write_text(GOOD.replace("{name: p}", "{name: p, namespace: nosuch}"))
    said = check("good.yaml", "other.yaml", "--server", "--rule", "server-refuses", code=1).stdout
    assert "server-refuses" in said
    assert "nosuch" in said
    assert Cluster().list("Pod") == []


PLAIN_POOL = """\
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: gpu}
spec: {template: {spec: {requirements: [], nodeClassRef: {group: a.b, kind: C, name: d}}}}
"""
CRD = """\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: nodepools.karpenter.sh}
spec: {group: karpenter.sh, names: {kind: NodePool, plural: nodepools}, scope: Cluster, versions: []}
"""


@pytest.mark.usefixtures("server")
def test_what_the_server_does_not_serve_is_a_finding_and_the_others_are_asked(
    tmp_path: Path, check: Typed
) -> None:
    refused = GOOD.replace("{name: p}", "{name: p, namespace: nosuch}")
    (tmp_path / "a.yaml").write_text("---\n".join([PLAIN_POOL, refused, GOOD]))
    said = json.loads(check("a.yaml", "--server", "--json", "--rule", "server-refuses", code=1).stdout)
    assert [(one["object"], one["evidence"]["line"], one["message"]) for one in said["findings"]] == [
        ("NodePool gpu", 1, "double does not serve karpenter.sh/v1"),
        ("Pod p", 6, 'can\'t create Pod p: namespaces "nosuch" not found'),
    ]


def test_what_the_files_create_first_is_no_fault(server: ApiServer) -> None:
    server.kinds["apiextensions.k8s.io/v1"] = {
        "CustomResourceDefinition": ("customresourcedefinitions", False)
    }
    reading = Reading()
    team = "apiVersion: v1\nkind: Namespace\nmetadata: {name: team}\n"
    pod = GOOD.replace("{name: p}", "{name: p, namespace: team}")
    reading.text("---\n".join([CRD, PLAIN_POOL, team, pod]), "a.yaml")
    live.dry_run_objects(reading, Cluster())
    assert reading.rejections == []
    assert [(one.line, "apply that first" in one.reason) for one in reading.unchecked] == [
        (6, True),
        (15, True),
    ]


@pytest.mark.parametrize("status", [403, 500])
def test_an_object_that_the_server_fails_on_is_a_finding(server: ApiServer, status: int) -> None:
    server.faults.append(Fault("create", "pods", status, message="failed calling webhook"))
    reading = Reading()
    reading.text(f"{GOOD}---\n{GOOD.replace('{name: p}', '{name: q, namespace: nosuch}')}", "a.yaml")
    live.dry_run_objects(reading, Cluster())
    assert [one.text for one in reading.rejections] == [
        "can't create Pod p: failed calling webhook",
        'can\'t create Pod q: namespaces "nosuch" not found',
    ]


def test_a_busy_server_leaves_a_gap(server: ApiServer) -> None:
    server.faults.append(Fault("create", "pods", 503, message="unable to handle the request"))
    reading = Reading()
    reading.text(f"{GOOD}---\n{GOOD.replace('{name: p}', '{name: q, namespace: nosuch}')}", "a.yaml")
    live.dry_run_objects(reading, Cluster())
    assert reading.unchecked == [
        UncheckedItem("a.yaml", 1, "Pod p: can't create Pod p: unable to handle the request")
    ]
    assert len(reading.rejections) == 1


@pytest.mark.parametrize(
    ("minor", "options", "kubernetes"),
    [
        ("29+", (), ["1.29"]),
        ("31", ("--kubernetes", "1.33..1.34"), ["1.33", "1.34"]),
        ("99", (), [f"1.{NEWEST}"]),
    ],
)
def test_a_cluster_is_checked_by_its_own_version(
    check: Typed, server: ApiServer, minor: str, options: tuple[str, ...], kubernetes: list[str]
) -> None:
    server.minor = minor
    said = json.loads(check("--cluster", "--json", *options).stdout)
    assert said["kubernetes"] == kubernetes
    assert ["1.99 has no schema here" in one["reason"] for one in said["unchecked"]] == [True] * (
        minor == "99"
    )


@pytest.mark.usefixtures("server")
def test_a_cluster_is_judged(check: Typed) -> None:
    cluster = Cluster()
    container = {"name": "main", "image": "registry.example/main"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
    cluster.create(pod)
    template = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    cluster.create(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"template": template}}
    )
    said = json.loads(check("--cluster", "--json").stdout)
    assert {one["object"] for one in said["findings"] if one["id"] == "image-latest"} == {"Pod p", "Job j"}
    assert {one["evidence"]["file"] for one in said["findings"]} == {"context double namespace default"}
    assert said["counts"]["objects"] == 2  # the Job's own pod is the Job's fault


def test_a_cluster_that_can_not_be_asked_is_4(check: Typed, server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(GOOD)
    server.close()
    assert "can't" in check("--cluster", code=4).stderr
    assert "can't" in check("good.yaml", "--server", code=4).stderr


def test_a_kind_that_may_not_be_listed_is_told(check: Typed, server: ApiServer) -> None:
    server.faults.append(Fault("list", "jobs", 403))
    said = check("--cluster").stdout
    assert "not checked: context double:1: Job: can't list Job" in said


def test_the_rights_to_judge_a_cluster_are_enough_and_the_least(server: ApiServer) -> None:
    rights = [(right, one) for right in COMMAND_RULES["check"] for one in right.resources]
    kinds = {
        f"{one}es" if one[-1] == "s" else f"{one}s": kind for kind in live.KINDS for one in [_plain(kind)]
    }
    kinds["nodes"] = "Node"  # where pods may land
    kinds["customresourcedefinitions"] = f"apiextensions.k8s.io/v1/{crds.KIND}"  # custom objects' forms
    assert {one for _right, one in rights} == set(kinds)
    cluster, reading = Cluster(), Reading()

    def allow(left_out: object = None) -> None:
        server.rules = [
            {"apiGroups": [right.group], "resources": [one], "verbs": right.verbs}
            for right, one in rights
            if (right, one) != left_out
        ]

    allow()
    live.read_cluster(reading, cluster, everywhere=True)
    live.live_pools(reading, cluster)
    crds.cluster_definitions(cluster)
    assert not reading.unchecked
    for right, resource in rights:
        if right.group in ("", "apps", "batch"):  # the double has these
            allow((right, resource))
            with pytest.raises(UnavailableError, match=f'cannot list resource "{resource}"'):
                cluster.list(kinds[resource], everywhere=True)


def _plain(kind: str) -> str:
    return kind.rpartition("/")[2].lower()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compose.yaml", "services: {a: {image: a, volumes: [x:/y]}}\nvolumes: {x: {}}\n"),
        ("config", "apiVersion: v1\nkind: Config\nclusters: []\n"),
        (
            "values.yaml",
            "image: {repository: a, tag: '1'}\nenv: {A: b}\nresources: {limits: {cpu: 1}}\nvolumes: {}\n",
        ),
        ("page.md", "```yaml\nenv: {CC: ccache gcc}\nsteps: []\n```\n"),
        (
            "page.md",
            "```yaml\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: <name>}\nspec:\n"
            "  replicas: ${REPLICAS}\n  selector: {matchLabels: {app: a}}\n"
            "  template: {metadata: {labels: {app: a}}, spec: {containers: [{name: $NAME, "
            "image: a:1, resources: {limits: {memory: <memory>}}}]}}\n```\n",
        ),
        (
            "ray.yaml",
            "apiVersion: ray.io/v1\nkind: RayCluster\nmetadata: {name: a}\nspec: {headGroupSpec: "
            "{rayStartParams: {}, template: {spec: {containers: [{name: h, image: rayproject/ray:2.50.0, "
            "resources: {limits: {cpu: 1, memory: 1Gi, nvidia.com/gpu: 2}}}]}}}}\n",
        ),
        ("empty.yaml", "---\n---\n# nothing\n"),
        ("empty.md", ""),
        ("dates.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, labels: {on: 2026-01-01}}\n"),
        ("merge.yaml", "apiVersion: v1\nkind: ConfigMap\nmetadata: &m {name: a}\ndata: {<<: {a: b}, c: d}\n"),
    ],
    ids=lambda value: value if "\n" not in value and value else "",
)
def test_no_alarm_on_what_is_right_in_unusual_ways(name: str, text: str) -> None:
    assert not judged(text, name).findings


def test_a_folder_is_read_without_what_is_hidden(tmp_path: Path, check: Typed) -> None:
    for name in (
        ".github/workflows/a.yaml",
        "node_modules/a.yaml",
        ".git/a.yaml",
        "deep/er/a.yaml",
        "main.tf",
    ):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(BAD)
    said = json.loads(check("in", "--json", code=1).stdout)["findings"]
    found = {one["evidence"]["file"] for one in said}
    assert found == {"in/.github/workflows/a.yaml", "in/deep/er/a.yaml"}
