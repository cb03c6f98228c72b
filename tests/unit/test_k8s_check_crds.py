"""Custom objects are checked by their CustomResourceDefinition; what is known by reading is the fallback."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpukiln.kubernetes.check.crds import definitions
from gpukiln.kubernetes.check.custom_schemas import SCHEMA_RELEASES, SCHEMAS
from gpukiln.kubernetes.check.evaluate import CheckReport, apply_rules
from gpukiln.kubernetes.check.reading import Reading
from gpukiln.kubernetes.check.rules import Context
from tests.support.api_server import ApiServer
from tests.support.exit_codes import invoke

CRD = """\
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: farms.gpu.example.com}
spec:
  group: gpu.example.com
  scope: Namespaced
  names: {plural: farms, singular: farm, kind: Farm}
  versions:
    - {name: v1alpha1, served: false, storage: false, schema: {openAPIV3Schema: {type: object}}}
    - name: v1
      served: true
      storage: true
      schema:
        openAPIV3Schema:
          type: object
          properties:
            spec:
              type: object
              required: [mode, size]
              x-kubernetes-validations:
                - rule: "self.size >= size(self.nodes)"
                  message: more nodes than the farm's size
                  fieldPath: .nodes
                - rule: "self.mode == oldSelf.mode"
                - rule: "!has(self.image) || format.dns1123Label().validate(self.image).hasValue()"
              properties:
                mode: {type: string, enum: [Shared, Single], default: Shared}
                size: {type: integer, minimum: 1, maximum: 8}
                lease:
                  type: string
                  format: duration
                  x-kubernetes-validations:
                    - rule: "self >= duration('1m')"
                      messageExpression: "'lease ' + string(self) + ' is short'"
                domain:
                  type: string
                  x-kubernetes-validations: [{rule: "self.find('^[^/]+') == 'example.com'"}]
                memory:
                  x-kubernetes-int-or-string: true
                  x-kubernetes-validations: [{rule: "quantity(string(self)).isGreaterThan(quantity('1Gi'))"}]
                share: {type: number, minimum: 0, exclusiveMinimum: true}
                image: {type: string}
                nodes:
                  type: array
                  default: []
                  x-kubernetes-list-type: set
                  items: {type: string}
                free: {type: object, x-kubernetes-preserve-unknown-fields: true}
                note: {type: string, nullable: true}
"""
FARM = "apiVersion: gpu.example.com/v1\nkind: Farm\nmetadata: {name: a}\nspec: {size: 2, %s}\n"


def checked(text: str, crd: str = CRD) -> CheckReport:
    reading = Reading()
    reading.text(text, "a.yaml")
    given = definitions(yaml.safe_load_all(crd)) if crd else {}
    context = Context(resources=tuple(reading.resources), definitions=given)
    return apply_rules(reading, context, only=["schema", "api-unknown", "names"])


@pytest.mark.parametrize(
    ("spec", "path", "found"),
    [
        ("mode: shared", "spec.mode", "wanted Shared or Single"),
        ("sizes: 3", "spec.sizes", "unknown field sizes"),
        ("size: 9", "spec.size", "9 is greater than the maximum of 8"),
        ("share: 0", "spec.share", "0 is less than or equal to the minimum of 0"),
        ("nodes: [a, a]", "spec.nodes", "occurs 2 times"),
        ("nodes: [a, b, c]", "spec.nodes", "more nodes than the farm's size"),
        ("lease: 30s", "spec.lease", "is short"),
        ("domain: example.org/a", "spec.domain", "the rule does not hold"),
        ("memory: 512Mi", "spec.memory", "the rule does not hold"),
        ("memory: 512", "spec.memory", "the rule does not hold"),
        ("memory: 1.5", "spec.memory", "wanted a whole number or a text"),
    ],
)
def test_a_custom_object_is_checked_by_its_definition(spec: str, path: str, found: str) -> None:
    one, *others = checked(FARM % spec).findings
    assert (one.evidence["path"], others) == (path, [])
    assert found in one.message


@pytest.mark.parametrize(
    "spec",
    [
        "mode: Single, lease: 1h, domain: example.com/a, memory: 2Gi, share: 1, nodes: [a, b]",
        "free: {a: {b: 1}}",
        "note: null",
        "mode: null",  # the default
        "domain: null",  # as if it were left out
        "mode: ${MODE}, domain: <domain>",
    ],
)
def test_what_the_definition_takes_is_no_fault(spec: str) -> None:
    report = checked(FARM % spec)
    assert (report.findings, report.unchecked) == ((), ())


def test_a_rule_that_can_not_be_evaluated_is_not_checked() -> None:
    report = checked(FARM % "image: a")
    assert report.findings == ()
    (one,) = report.unchecked
    assert "spec: the CEL rule" in one.reason
    assert "format" in one.reason


@pytest.mark.parametrize(
    "schema",
    [
        "{type: 5, properties: {spec: {type: [object], properties: 7}}}",
        "{type: object, properties: {spec: {type: object, required: size, minProperties: a, enum: {a: b}}}}",
        "{type: object, properties: {spec: 5}}",
        "text",
    ],
)
def test_a_definition_with_faults_of_its_own_costs_no_other_result(schema: str) -> None:
    one = yaml.safe_load(CRD)
    one["spec"]["versions"][1]["schema"]["openAPIV3Schema"] = yaml.safe_load(schema)
    pod = "---\napiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: {containers: []}\n"
    report = checked(FARM % "" + pod, yaml.safe_dump(one))
    assert "containers is empty" in report.findings[-1].message


def test_a_pattern_that_python_can_not_read_is_not_checked() -> None:
    report = checked(
        FARM % "image: a", CRD.replace("image: {type: string}", "image: {type: string, pattern: '\\pL'}")
    )
    assert [one.reason for one in report.unchecked if "pattern" in one.reason]


def test_a_version_that_the_definition_does_not_serve() -> None:
    (one,) = checked((FARM % "").replace("/v1\n", "/v1alpha1\n")).findings
    assert one.message == "Farm has no version v1alpha1; its CustomResourceDefinition has gpu.example.com/v1"


def test_a_definition_among_the_files_counts() -> None:
    report = checked(CRD + "---\n" + FARM % "mode: shared", crd="")
    assert [one.evidence["path"] for one in report.findings] == ["spec.mode"]
    assert checked(FARM % "mode: shared", crd="").unchecked[0].reason.startswith("gpu.example.com/v1 Farm")


def test_the_option_and_the_clusters_own_definitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "crds").mkdir()
    (tmp_path / "crds/farm.yaml").write_text(CRD)
    (tmp_path / "farm.yaml").write_text(FARM % "mode: shared")
    server = ApiServer()
    server.add_kind("apiextensions.k8s.io/v1")
    server.add(yaml.safe_load(CRD))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    monkeypatch.chdir(tmp_path)

    def said(*options: str) -> dict[str, Any]:
        with pytest.raises(SystemExit):
            invoke(["k8s.check", "farm.yaml", "--json", *options])
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    assert [one["evidence"]["path"] for one in said("--crd", "crds")["findings"]] == ["spec.mode"]
    assert [one["evidence"]["path"] for one in said("--cluster")["findings"]] == ["spec.mode"]
    server.close()
    with pytest.raises(SystemExit) as ended:
        invoke(["k8s.check", "farm.yaml", "--crd", "farm.yaml"])
    assert ended.value.code == 2
    assert "no CustomResourceDefinition is in farm.yaml" in capsys.readouterr().err


POOL = """\
apiVersion: karpenter.sh/v1
kind: NodePool
metadata: {name: gpu}
spec:
  %s
  template:
    metadata: {labels: {%s}}
    spec:
      nodeClassRef: {group: karpenter.k8s.aws, kind: EC2NodeClass, name: gpu}
      requirements: [{key: %s, operator: In, values: [on-demand]}]
"""
NODE_CLASS = """\
apiVersion: karpenter.k8s.aws/v1
kind: EC2NodeClass
metadata: {name: gpu}
spec:
  role: nodes
  amiSelectorTerms: [{%s}]
  subnetSelectorTerms: [{tags: {a: b}}]
  securityGroupSelectorTerms: [{id: sg-1}]
  blockDeviceMappings: [{deviceName: /dev/xvda, ebs: {volumeSize: %s}}]
"""
QUEUE = """\
apiVersion: kueue.x-k8s.io/%s
kind: ClusterQueue
metadata: {name: gpu}
spec:
  %s
  resourceGroups:
    - coveredResources: [cpu]
      flavors: [{name: t4, resources: [{name: cpu, nominalQuota: 4%s}]}]
"""
CAPACITY = "karpenter.sh/capacity-type"


# The answers of kube-apiserver 1.36.2 with the CRDs of Karpenter v1.14.1 and Kueue v0.19.2; lendingLimit is
# checked by Kueue's webhook.
@pytest.mark.parametrize(
    ("text", "path"),
    [
        (POOL % ("weight: 10", "team: ml", CAPACITY), ""),
        (POOL % ("weight: 0", "", CAPACITY), "spec.weight"),
        (POOL % ("weight: 101", "", CAPACITY), "spec.weight"),
        (POOL % ("disruption: {consolidateAfter: 5d}", "", CAPACITY), "spec.disruption.consolidateAfter"),
        (POOL % ("disruption: {consolidateAfter: Never}", "", CAPACITY), ""),
        (POOL % ("disruption: {budgets: [{nodes: 150%}]}", "", CAPACITY), "spec.disruption.budgets[0].nodes"),
        (POOL % ("disruption: {budgets: [{nodes: 100%}]}", "", CAPACITY), ""),
        (POOL % ("disruption: {budgets: [{duration: 8h}]}", "", CAPACITY), "spec.disruption.budgets[0]"),
        (POOL % ("weight: 1", "", "karpenter.sh/foo"), "spec.template.spec.requirements[0].key"),
        (POOL % ("weight: 1", "", "karpenter.k8s.aws/foo"), "spec.template.spec.requirements[0].key"),
        (POOL % ("weight: 1", "", "kubernetes.io/hostname"), "spec.template.spec.requirements[0].key"),
        (
            POOL % ("weight: 1", "karpenter.sh/foo: a", CAPACITY),
            "spec.template.metadata.labels.karpenter.sh/foo",
        ),
        (NODE_CLASS % ("alias: al2023@latest", "100Gi"), ""),
        (NODE_CLASS % ("alias: al2023", "100Gi"), "spec.amiSelectorTerms[0].alias"),
        (NODE_CLASS % ("alias: custom@latest", "100Gi"), "spec.amiSelectorTerms[0].alias"),
        (NODE_CLASS % ("alias: windows2022@v1", "100Gi"), "spec.amiSelectorTerms[0].alias"),
        (NODE_CLASS % ("alias: al2023@latest, id: ami-1", "100Gi"), "spec.amiSelectorTerms[0]"),
        (NODE_CLASS % ("id: ami-1", "100Gi"), "spec.amiFamily"),
        (NODE_CLASS % ("alias: al2@latest", "100GB"), "spec.blockDeviceMappings[0].ebs.volumeSize"),
        (NODE_CLASS % ("alias: al2@latest", "65Ti"), "spec.blockDeviceMappings[0].ebs.volumeSize"),
        (QUEUE % ("v1beta2", "cohortName: all", ", borrowingLimit: 2"), ""),
        (QUEUE % ("v1beta1", "cohort: all", ", borrowingLimit: 2"), ""),
        (
            QUEUE % ("v1beta2", "stopPolicy: None", ", borrowingLimit: 2"),
            "spec.resourceGroups[0].flavors[0].resources[0]",
        ),
        (
            QUEUE % ("v1beta2", "cohortName: all", ", lendingLimit: 5"),
            "spec.resourceGroups[0].flavors[0].resources[0]",
        ),
        (QUEUE % ("v1beta2", "cohort: all", ""), "spec.cohort"),
        (QUEUE % ("v1beta1", "cohortName: all", ""), "spec.cohortName"),
        (QUEUE % ("v1beta2", "concurrentAdmissionPolicy: {}", ""), ""),
        (QUEUE % ("v1beta2", "concurrentAdmission: {}", ""), "spec.concurrentAdmission"),
    ],
)
def test_the_fallback_answers_as_the_definitions_do(text: str, path: str) -> None:
    findings = checked(text, crd="").findings
    assert [one.evidence["path"] for one in findings] == [path] * bool(path)
    assert all("--crd" in one.remedy for one in findings)


def test_each_form_that_was_read_names_its_release() -> None:
    assert {api.partition("/")[0] for api, _ in SCHEMAS} == SCHEMA_RELEASES.keys()
