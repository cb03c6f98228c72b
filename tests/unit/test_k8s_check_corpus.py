"""k8s.check on what people write: two guides with every fault they are known for, and what is right."""

from pathlib import Path

import pytest

from gpukiln.kubernetes.check.evaluate import CheckReport, apply_rules
from gpukiln.kubernetes.check.reading import Reading, read
from gpukiln.kubernetes.check.rules import Context

SUPPORT = Path(__file__).parents[1] / "support"
VALID = (SUPPORT / "k8s_valid.yaml").read_text().split("---\n# ")[1:]

# What is wrong or stale in the guides: the file, the rule that has to find it, and words that it must say.
FAULTS = [
    ("eks.txt", "era-of-docker", "nvidia-docker2"),
    ("eks.txt", "era-of-docker", "Docker's runtime has no effect"),
    ("eks.txt", "plugin-version-in-document", "v0.14.5"),
    ("eks.txt", "label-no-node-has", "nvidia.com/gpu=true"),
    ("eks.txt", "values-unknown-key", "runnerLabels"),
    ("eks.txt", "values-unknown-key", "runnerResources"),
    ("eks.txt", "values-unknown-key", "tolerations"),
    ("eks.txt", "values-unknown-key", "image"),
    ("eks.txt", "values-unknown-key", "runnerScaleDownDelaySecondsAfterScaleOut"),
    ("eks.txt", "image-latest", "runner-gpu:latest"),
    ("eks.txt", "kubectl-run-flags", "--limits"),
    ("eks.txt", "image-ends", "12.1"),
    ("eks.txt", "runs-on", "[self-hosted, linux, x64, gpu]"),
    ("eks.txt", "metrics-server-gpu", "metrics-server"),
    ("eks.txt", "plugin-exec", "nvidia-smi dmon"),
    ("eks.txt", "cloudwatch-without-agent", "CloudWatch"),
    ("eks.txt", "url-moves", "dcgm-exporter/main"),
    ("eks.txt", "type-retired-in-document", "p3.2xlarge"),
    ("kubernetes.txt", "kubernetes-too-old", "1.28"),
    ("kubernetes.txt", "plugin-url", "v0.14"),
    ("kubernetes.txt", "labels-by-hand", "accelerator=nvidia-tesla-v100"),
    ("kubernetes.txt", "job-restart-policy", "Job gpu-ml-task"),
    ("kubernetes.txt", "job-restart-policy", "CronJob scale-gpu-nodes"),
    ("kubernetes.txt", "memory-limit", "gpu-ml-task"),
    ("kubernetes.txt", "cuda-visible-devices", "CUDA_VISIBLE_DEVICES=0,1"),
    ("kubernetes.txt", "type-retired", "p3.2xlarge"),
    ("kubernetes.txt", "label-by-hand", "accelerator: nvidia-tesla-a100"),
    ("kubernetes.txt", "metric-label", "kubernetes_node"),
    ("kubernetes.txt", "spot-label", "node.kubernetes.io/lifecycle"),
    ("kubernetes.txt", "spot-toleration", "spot"),
    ("kubernetes.txt", "image-retired", "bitnami/kubectl"),
    ("kubernetes.txt", "scale-nodepool", "kubectl scale nodepool"),
    ("kubernetes.txt", "kubectl-account", "serviceAccountName"),
    ("kubernetes.txt", "image-never-was", "nvidia/cuda:12.0-base"),
    ("kubernetes.txt", "kubectl-run-flags", "--limits"),
    ("kubernetes.txt", "type-too-large", "p4d.24xlarge has 8"),
    ("kubernetes.txt", "job-deadline", "ml-training-job"),
]


def report(path: Path, *types: str) -> CheckReport:
    reading = read([str(path)])
    return apply_rules(reading, Context(types=types, resources=tuple(reading.resources)))


@pytest.fixture(scope="module")
def guides() -> dict[str, CheckReport]:
    return {name: report(SUPPORT / "k8s_guides" / name) for name in ("eks.txt", "kubernetes.txt")}


@pytest.mark.parametrize(("guide", "rule", "words"), FAULTS)
def test_every_known_fault_of_the_guides_is_found(guides, guide, rule, words):
    found = [f"{one.object} {one.message}" for one in guides[guide].findings if one.id == rule]
    assert any(words in text for text in found), found


@pytest.mark.parametrize(
    ("guide", "machine", "words"),
    [
        ("eks.txt", "g4dn.xlarge", "Insufficient cpu: 4 requested, 3770m left"),
        ("kubernetes.txt", "g4dn.2xlarge", "Insufficient cpu: 8 requested, 7760m left"),
    ],
)
def test_what_a_guide_asks_of_a_machine_does_not_fit_it(guide, machine, words):
    found = report(SUPPORT / "k8s_guides" / guide, machine).findings
    assert any(words in one.message for one in found if one.id == "fits-no-machine")


def test_the_corrected_manifests_are_clean():
    found = report(SUPPORT / "k8s_guides" / "corrected.yaml")
    assert (found.findings, found.unchecked) == ((), ())
    assert found.counts.pods == 4


def test_there_are_enough_of_them():
    assert len(VALID) >= 30


@pytest.mark.parametrize("text", VALID, ids=lambda text: text.partition("\n")[0])
def test_what_is_valid_in_unusual_ways_is_no_fault(text):
    reading = Reading()
    reading.text(text.partition("\n")[2], "a.yaml")
    found = apply_rules(reading, Context(resources=tuple(reading.resources)))
    assert [f"{one.severity} {one.id}: {one.message}" for one in found.findings] == []
    assert found.unchecked == ()
    assert all(one.on for one in found.placed)
