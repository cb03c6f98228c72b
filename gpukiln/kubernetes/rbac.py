"""The permissions that each command needs on a cluster, as RBAC rules.

Tests run the commands against an API server that allows these rules and nothing else; an unused rule fails a
test, too.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpukiln.errors import UsageError
from gpukiln.kubernetes.manifest import Manifest

RBAC = "rbac.authorization.k8s.io"
SUBJECT_KINDS = ("User", "Group", "ServiceAccount")


@dataclass(frozen=True)
class RbacRule:
    """Verbs on resources of an API group.

    Args:
        everywhere: For all namespaces and for cluster-scoped resources; otherwise for one namespace.
    """

    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    group: str = ""
    everywhere: bool = False

    def rule(self) -> dict[str, Any]:
        """The rule as an entry of a Role."""
        return {"apiGroups": [self.group], "resources": [*self.resources], "verbs": [*self.verbs]}


COMMAND_RULES: dict[str, tuple[RbacRule, ...]] = {
    "test": (
        RbacRule(("nodes", "pods"), ("list",), everywhere=True),
        RbacRule(("pods",), ("create", "delete", "get")),
        RbacRule(("pods/log",), ("get",)),
    ),
    # `ami.verify --cluster`, with what the doctor reads of a node that does not become ready.
    "canary": (
        RbacRule(("nodes",), ("list", "patch", "delete"), everywhere=True),
        RbacRule(("pods",), ("list",), everywhere=True),
        RbacRule(("pods/eviction",), ("create",), everywhere=True),
        RbacRule(("pods",), ("create", "delete", "get")),
        RbacRule(("pods/log",), ("get",), everywhere=True),
        RbacRule(("daemonsets",), ("list",), group="apps", everywhere=True),
    ),
    "job": (
        RbacRule(("jobs",), ("create", "delete", "get", "list"), group="batch"),
        RbacRule(("pods", "events"), ("list",)),
        RbacRule(("pods/log",), ("get",)),
        # With --nodes: the headless Service
        RbacRule(("services",), ("create", "get")),
        # To read the Pod Security level; a Role can grant it for its own namespace.
        RbacRule(("namespaces",), ("get",)),
        RbacRule(("localqueues",), ("get", "list"), group="kueue.x-k8s.io"),
        RbacRule(("workloads",), ("list",), group="kueue.x-k8s.io"),
    ),
    "doctor": (
        RbacRule(("nodes", "pods"), ("list",), everywhere=True),
        # Logs of the device plugin, which runs in another namespace than the pods
        RbacRule(("pods/log",), ("get",), everywhere=True),
        RbacRule(("events",), ("list",), everywhere=True),
        RbacRule(("jobs", "cronjobs"), ("get", "list"), group="batch", everywhere=True),
        RbacRule(
            ("deployments", "replicasets", "statefulsets", "daemonsets"),
            ("get", "list"),
            group="apps",
            everywhere=True,
        ),
        RbacRule(("jobsets",), ("get", "list"), group="jobset.x-k8s.io", everywhere=True),
        RbacRule(("rayjobs", "rayclusters", "rayservices"), ("get", "list"), group="ray.io", everywhere=True),
        RbacRule(("pytorchjobs", "mpijobs"), ("get", "list"), group="kubeflow.org", everywhere=True),
        RbacRule(("leaderworkersets",), ("get", "list"), group="leaderworkerset.x-k8s.io", everywhere=True),
        RbacRule(("workloads",), ("list",), group="kueue.x-k8s.io", everywhere=True),
    ),
    # For --context: the pool that runs.
    "nodes": (
        RbacRule(("nodepools", "nodeclaims"), ("list",), group="karpenter.sh", everywhere=True),
        RbacRule(("ec2nodeclasses",), ("get",), group="karpenter.k8s.aws", everywhere=True),
    ),
    # For --cluster. --server also needs `create` for the objects that it sends, dry run or not.
    "check": (
        RbacRule(("nodes", "pods"), ("list",), everywhere=True),
        RbacRule(("jobs", "cronjobs"), ("list",), group="batch", everywhere=True),
        RbacRule(
            ("deployments", "statefulsets", "daemonsets", "replicasets"), ("list",), "apps", everywhere=True
        ),
        RbacRule(("nodepools",), ("list",), group="karpenter.sh", everywhere=True),
        RbacRule(("ec2nodeclasses",), ("list",), group="karpenter.k8s.aws", everywhere=True),
        RbacRule(("rayclusters", "rayjobs", "rayservices"), ("list",), group="ray.io", everywhere=True),
        RbacRule(("pytorchjobs", "mpijobs"), ("list",), group="kubeflow.org", everywhere=True),
        RbacRule(("jobsets",), ("list",), group="jobset.x-k8s.io", everywhere=True),
        RbacRule(("autoscalingrunnersets",), ("list",), group="actions.github.com", everywhere=True),
        RbacRule(("customresourcedefinitions",), ("list",), group="apiextensions.k8s.io", everywhere=True),
    ),
}


def roles(commands: Sequence[str], namespace: str, subject: str) -> list[Manifest]:
    """Roles and bindings that allow a subject to run commands.

    >>> [role["kind"] for role in roles(["job"], "ml", "Group:gpu-users")]
    ['Role', 'RoleBinding']
    >>> roles(["job"], "ml", "gpu-users")
    Traceback (most recent call last):
    gpukiln.errors.UsageError: --to 'gpu-users' has another form

    Args:
        namespace: Namespace in which the commands work.
        subject: KIND:NAME, for example Group:gpu-users or ServiceAccount:ci, a service account of the
            namespace.

    Raises:
        UsageError: A command or a kind is unknown.
    """
    for command in commands:
        if command not in COMMAND_RULES:
            near = difflib.get_close_matches(command, COMMAND_RULES, 1)
            raise UsageError(
                f"{command} is no command that uses a cluster",
                hint=f"did you mean {near[0]}?" if near else f"wanted: {', '.join(COMMAND_RULES)}",
            )
    kind, _, who = subject.partition(":")
    if kind not in SUBJECT_KINDS or not who:
        raise UsageError(
            f"--to {subject!r} has another form",
            hint=f"wanted KIND:NAME, KIND is one of {', '.join(SUBJECT_KINDS)}",
        )
    rules_of_commands = list(dict.fromkeys(right for command in commands for right in COMMAND_RULES[command]))
    name = f"gpukiln-{'-'.join(commands)}"
    manifests: list[Manifest] = []
    for everywhere in (True, False):
        rules = [right.rule() for right in rules_of_commands if right.everywhere is everywhere]
        if rules:
            manifests += _role(name, rules, "" if everywhere else namespace, kind, who, namespace)
    return manifests


def _role(
    name: str, rules: list[dict[str, Any]], where: str, kind: str, who: str, namespace: str
) -> list[Manifest]:
    form = "Role" if where else "ClusterRole"
    meta = {"name": name, **({"namespace": where} if where else {})}
    # Only service accounts are in a namespace; users and groups are in RBAC's API group.
    account = kind == "ServiceAccount"
    subject = {"kind": kind, "name": who, **({"namespace": namespace} if account else {"apiGroup": RBAC})}
    bound = {**meta, "name": _binding_name(name, kind, namespace if account else "", who)}
    return [
        {"apiVersion": f"{RBAC}/v1", "kind": form, "metadata": meta, "rules": rules},
        {
            "apiVersion": f"{RBAC}/v1",
            "kind": f"{form}Binding",
            "metadata": bound,
            "subjects": [subject],
            "roleRef": {"apiGroup": RBAC, "kind": form, "name": name},
        },
    ]


def _binding_name(*parts: str) -> str:
    """A binding name for each account: applying a second binding of the same name would replace the first.

    RBAC accepts any path segment as a name, colons included (apimachinery, pkg/api/validation/path).
    """
    whole = ":".join(filter(None, parts))
    # A name is a segment of the API's path, where / and % are not allowed.
    plain = re.sub("[/%]", "-", whole)
    return plain if plain == whole else f"{plain}:{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
