"""Rules on command lines of scripts and documents, and on the text of documents."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator

from gpukiln.kubernetes.check.reading import options_of
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.rules_charts import OLDEST_PLUGIN, PLUGIN_IMAGE
from gpukiln.kubernetes.check.rules_running import MANUAL_LABELS
from gpukiln.kubernetes.check.workload import CommandLine, Prose, Violation

# kubernetes/kubernetes pull request 108820 (1.24), and before it 1.18 (--generator and others).
RUN_FLAGS = (
    "limits",
    "requests",
    "generator",
    "replicas",
    "schedule",
    "serviceaccount",
    "hostport",
    "record",
)
# oc is OpenShift's client, k a common alias.
KUBECTL = ("kubectl", "oc", "k")
# A document that warns of something names it as well.
NEGATIONS = re.compile(
    r"(?i)\b(?:no longer|instead of|superseded|deprecated|replaced|obsolete|never|not|old|without|retired)\b"
)


@rule(
    "kubectl-run-flags",
    "error",
    CommandLine,
    title="`kubectl run` has only flags that exist",
    reason="`unknown flag: --limits`: 1.24 removed it, 1.18 others",
    source="kubernetes/kubernetes pull request 108820",
    fix="a Pod or Job in YAML: `invoke k8s.job --image ... --gpus 1 -- nvidia-smi`, or `invoke k8s.test`",
)
def kubectl_run_flags(command: CommandLine, _: Context) -> Iterator[Violation]:
    if command.words[0] in KUBECTL and "run" in command.words[1:3]:
        for flag in RUN_FLAGS:
            if flag in options_of(command.words):
                yield Violation(f"kubectl run --{flag}")


@rule(
    "url-moves",
    "warning",
    CommandLine,
    title="A manifest from a URL has a fixed version",
    reason="a branch or `latest` changes, and the deployed version is unknown",
    source="kubernetes.io/docs/concepts/configuration/overview",
    fix="the URL of a tag; for the add-ons of GPU nodes, `invoke k8s.addons`",
)
def url_moves(command: CommandLine, _: Context) -> Iterator[Violation]:
    # Branches on raw.githubusercontent.com and github.com, and the latest release.
    moving = re.compile(
        r"https?://(?:raw\.githubusercontent\.com/[^/]+/[^/]+/(?:refs/heads/)?(?:main|master|HEAD|develop)/"
        r"|github\.com/[^/]+/[^/]+/(?:raw|blob)/(?:main|master)/|github\.com/[^/]+/[^/]+/releases/latest/)"
    )
    if command.words[0] in (*KUBECTL, "helm") and {"apply", "create", "install", "upgrade"} & {
        *command.words
    }:
        for word in command.words:
            if moving.search(word):
                yield Violation(word)


@rule(
    "labels-by-hand",
    "warning",
    CommandLine,
    title="GPU nodes are not labelled by hand",
    reason="nodes that the autoscaler starts lack the label, and feature discovery sets better ones",
    source="NVIDIA/k8s-device-plugin:docs/gpu-feature-discovery/README.md",
    fix="feature discovery (`invoke k8s.addons`); for labels that must be known before a node starts, the "
    "labels of the pool",
)
def labels_by_hand(command: CommandLine, _: Context) -> Iterator[Violation]:
    words = [word for word in command.words if not word.startswith("-")]
    if (
        len(words) < 4
        or words[0] not in KUBECTL
        or words[1] != "label"
        or words[2] not in ("node", "nodes", "no")
    ):
        return
    for word in words[3:]:
        key, equals, _value = word.partition("=")
        # `kubectl label node NAME KEY-` removes a label, and is right.
        if equals and key in MANUAL_LABELS:
            yield Violation(" ".join(command.words))


@rule(
    "label-no-node-has",
    "warning",
    CommandLine,
    title="Nodes are listed by labels that exist",
    reason="no node has the label nvidia.com/gpu; it is the name of a resource",
    source="NVIDIA/k8s-device-plugin:docs/gpu-feature-discovery/README.md",
    fix="-l nvidia.com/gpu.present=true",
)
def label_no_node_has(command: CommandLine, _: Context) -> Iterator[Violation]:
    options = options_of(command.words)
    flags = [key for key in ("l", "selector", "L", "label-columns") if key in options]
    asked = options[flags[0]] if flags else ""
    nodes = {"node", "nodes", "no"} & {*command.words[:4]}
    if command.words[0] in KUBECTL and nodes and asked.partition("=")[0] in MANUAL_LABELS:
        yield Violation(f"kubectl ... -{flags[0]} {asked}")


@rule(
    "plugin-exec",
    "warning",
    CommandLine,
    title="nvidia-smi is not run in the device plugin",
    reason="since 0.18 its image has no shell and no tools",
    source="NVIDIA/k8s-device-plugin:CHANGELOG.md, 0.18.0",
    fix="dcgm-exporter for metrics (`invoke k8s.addons`), `invoke k8s.test` for a check",
)
def plugin_exec(command: CommandLine, _: Context) -> Iterator[Violation]:
    text = " ".join(command.words)
    into_plugin = "exec" in command.words[1:3] and "device-plugin" in text
    if command.words[0] in KUBECTL and into_plugin and re.search(r"\b(?:nvidia-smi|bash|sh)\b", text):
        yield Violation(text)


@rule(
    "metrics-server-gpu",
    "warning",
    Prose,
    title="GPUs are not monitored with metrics-server",
    reason="it has only CPU and memory",
    source="kubernetes-sigs/metrics-server:README.md",
    fix="dcgm-exporter: `invoke k8s.addons`",
)
def metrics_server_gpu(prose: Prose, _: Context) -> Iterator[Violation]:
    for heading, line, block in _sections(prose):
        if "gpu" in heading.lower() and (match := re.search(r"metrics-server", block)):
            where = line + block.count("\n", 0, match.start())
            yield Violation(f"metrics-server under {heading!r}", line=where)


@rule(
    "cloudwatch-without-agent",
    "warning",
    Prose,
    title="An agent sends metrics to CloudWatch",
    reason="dcgm-exporter only answers scrapes of Prometheus and sends nothing",
    source="docs.aws.amazon.com/AmazonCloudWatch/latest/monitoring/CloudWatch-Agent-NVIDIA-GPU.html",
    fix="the CloudWatch agent's nvidia_gpu section: `invoke k8s.addons`",
)
def cloudwatch_without_agent(prose: Prose, _: Context) -> Iterator[Violation]:
    for heading, line, block in _sections(prose):
        sent = re.search(r"cloudwatch-agent|amazon-cloudwatch|nvidia_gpu", block)
        if "cloudwatch" in heading.lower() and "dcgm-exporter" in block and not sent:
            yield Violation(f"dcgm-exporter alone under {heading!r}", line=line)


def _sections(prose: Prose) -> Iterator[tuple[str, int, str]]:
    """Heading, first line and text of each block of code."""
    # Lines of headings, ascending, for the binary search below.
    numbers = [number for number, text in enumerate(prose.lines, 1) if text.startswith("#")]
    for above, _language, block in prose.blocks:
        at = bisect.bisect_right(numbers, above)
        heading = prose.lines[numbers[at - 1] - 1].lstrip("# ").strip() if at else ""
        yield heading, above + 1, block


# Obsolete names in documents and scripts, and what is true now.
OBSOLETE = (
    (re.compile(r"\bnvidia-docker2?\b"), "nvidia-docker2 is superseded by nvidia-container-toolkit"),
    (re.compile(r"\bapt-key\b"), "apt-key is deprecated; a keyring with signed-by is read"),
    (
        re.compile(r"nvidia\.github\.io/nvidia-docker"),
        "the list nvidia-docker is superseded by libnvidia-container's",
    ),
    (
        re.compile(
            r"(?i)docker\b.{0,20}\bwith nvidia as (?:the )?default runtime"
            r"|--runtime=docker\b.{0,200}set-as-default"
        ),
        "Kubernetes runs containerd since 1.24: Docker's runtime has no effect",
    ),
)


@rule(
    "era-of-docker",
    "warning",
    Prose,
    title="Instructions for nodes are for containerd",
    reason="it has no effect on Kubernetes, or comes from an unmaintained source",
    source="docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",
    fix="nvidia-container-toolkit; on EKS AL2023 nodeadm configures it; gpukiln's images have both",
)
def era_of_docker(prose: Prose, _: Context) -> Iterator[Violation]:
    if not any("kubectl" in text for _line, text in _all_lines(prose)):
        return  # a document about Docker alone, for which these names may be right
    for line, text in _all_lines(prose):
        for expression, why in OBSOLETE:
            # A sentence such as "nvidia-docker2 is deprecated" is right.
            if expression.search(text) and not NEGATIONS.search(text) and not text.lstrip().startswith("#"):
                yield Violation(f"{text.strip()[:80]}: {why}", line=line)


@rule(
    "plugin-version-in-document",
    "warning",
    Prose,
    title="Documents name a maintained device plugin",
    reason="readers install the version in the document",
    source="NVIDIA/k8s-device-plugin:CHANGELOG.md",
    fix="the version of components.yaml: `invoke k8s.addons`",
)
def plugin_version_in_document(prose: Prose, _: Context) -> Iterator[Violation]:
    for line, text in _lines(prose):
        if (match := PLUGIN_IMAGE.search(text)) and (int(match[1]), int(match[2])) < OLDEST_PLUGIN:
            yield Violation(match[0], line=line)


# EKS had 1.30 to 1.36 in 2026-07 (awslabs/amazon-eks-ami); a year of them is out of support.
OLDEST_KUBERNETES = 32


@rule(
    "kubernetes-too-old",
    "warning",
    Prose,
    title="Documents name a supported Kubernetes version",
    reason="EKS builds no images for it, and current Kueue and DRA need a later version",
    source="awslabs/amazon-eks-ami:CHANGELOG.md; kubernetes-sigs/kueue:README.md",
    fix="a version that `invoke k8s.check --kubernetes VERSION` accepts",
)
def kubernetes_too_old(prose: Prose, _: Context) -> Iterator[Violation]:
    for line, text in _lines(prose):
        match = re.search(r"(?i)\b(?:kubernetes|k8s)\s+(?:version\s+)?v?1\.(\d\d)\b\+?", text)
        if match and int(match[1]) < OLDEST_KUBERNETES and not NEGATIONS.search(text):
            yield Violation(match[0], line=line)


@rule(
    "label-in-document",
    "warning",
    Prose,
    title="Documents name labels that exist",
    reason="no node has the label nvidia.com/gpu; readers would select no nodes",
    source="NVIDIA/k8s-device-plugin:docs/gpu-feature-discovery/README.md",
    fix="nvidia.com/gpu.present=true",
)
def label_in_document(prose: Prose, _: Context) -> Iterator[Violation]:
    for line, text in _lines(prose):
        if re.search(r"(?i)nvidia\.com/gpu=true", text) and re.search(r"(?i)\blabel", text):
            yield Violation(text.strip()[:80], line=line)


def _lines(prose: Prose) -> Iterator[tuple[int, str]]:
    return ((number, text) for number, text in enumerate(prose.lines, 1) if text)


def _all_lines(prose: Prose) -> Iterator[tuple[int, str]]:
    """All lines, those of code blocks included."""
    yield from _lines(prose)
    for above, _language, block in prose.blocks:
        yield from enumerate(block.splitlines(), above + 1)
