"""The node's own health as the cluster sees it: a condition and a taint by an agent on every GPU node.

The agent, `health_agent.py`, says what it does. Here is what it may do: read and patch nodes, which RBAC can
not narrow down to one, so an admission policy does: its own node, nothing but its taint and its condition.
Expressions: kubernetes.io, Validating Admission Policy; the node's name comes in every pod's token from 1.32.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from gpukiln.catalog.components import load_add_ons
from gpukiln.kubernetes.addons import health_agent, helm
from gpukiln.kubernetes.addons.settings import Settings
from gpukiln.kubernetes.machines import GPU_PRESENT
from gpukiln.kubernetes.manifest import Manifest, dump

OBJECTS = "health/gpu-health.yaml"
NAME = "gpu-health"
PROGRAM_FILE, RESULT_FILE = "/etc/gpukiln/health_agent.py", "/run/gpukiln/health.json"
LABELS = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": "gpukiln"}
NODE_CLAIM = "authentication.kubernetes.io/node-name"
NOBODY_UID = 65534


def files(settings: Settings) -> dict[str, str]:
    program = Path(health_agent.__file__).read_text(encoding="utf-8")
    namespace = settings.namespace
    return {
        OBJECTS: dump(
            _manifest("v1", "ServiceAccount", namespace, automountServiceAccountToken=False),
            _manifest("rbac.authorization.k8s.io/v1", "ClusterRole", rules=_rules()),
            _manifest(
                "rbac.authorization.k8s.io/v1",
                "ClusterRoleBinding",
                roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME},
                subjects=[{"kind": "ServiceAccount", "name": NAME, "namespace": namespace}],
            ),
            _manifest(
                "admissionregistration.k8s.io/v1", "ValidatingAdmissionPolicy", spec=_policy(namespace)
            ),
            _manifest(
                "admissionregistration.k8s.io/v1",
                "ValidatingAdmissionPolicyBinding",
                spec={"policyName": NAME, "validationActions": ["Deny"]},
            ),
            _manifest("v1", "ConfigMap", namespace, data={Path(PROGRAM_FILE).name: program}),
            _manifest("apps/v1", "DaemonSet", namespace, spec=_daemon_set(program)),
            head=(
                f"The condition {health_agent.CONDITION} of each GPU node, and the taint "
                f"{health_agent.TAINT} while its GPUs are sick.",
                "Who takes the agent away takes the taint off: "
                f"kubectl taint nodes --all {health_agent.TAINT}-",
            ),
        )
    }


def install(_: Settings) -> tuple[str, ...]:
    return (helm.apply_command(OBJECTS),)


def _manifest(version: str, kind: str, namespace: str = "", **content: Any) -> Manifest:
    place = {"namespace": namespace} if namespace else {}
    metadata = {"name": NAME, **place, "labels": LABELS}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _rules() -> list[dict[str, Any]]:
    return [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ]


def _policy(namespace: str) -> dict[str, Any]:
    claim = "request.userInfo.extra"
    named = f"has({claim}) && '{NODE_CLAIM}' in {claim} ? {claim}['{NODE_CLAIM}'][0] : ''"
    taint, condition = health_agent.TAINT, health_agent.CONDITION
    return {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["UPDATE"],
                    "resources": ["nodes", "nodes/status"],
                }
            ]
        },
        "matchConditions": [
            {
                "name": "the-agent",
                "expression": f"request.userInfo.username == 'system:serviceaccount:{namespace}:{NAME}'",
            }
        ],
        "variables": [{"name": "node", "expression": named}, *_node_parts()],
        "validations": [
            {
                "expression": "variables.node == object.metadata.name",
                "message": "the agent may change the node that it runs on, and no other",
            },
            *(
                {
                    "expression": _unchanged_except(part, *changing),
                    "message": f"the agent may not change the node's {what}",
                }
                for part, changing, what in (
                    # what the API server itself changes with each write; a node has no generation yet
                    ("metadata", ("managedFields", "resourceVersion", "generation"), "metadata"),
                    ("spec", ("taints",), "specification, but for its taints"),
                    ("status", ("conditions",), "status, but for its conditions"),
                )
            ),
            {
                "expression": _other_entries_unchanged("spec", "taints", "key", taint),
                "message": f"the agent may change the taint {taint}, and no other",
            },
            {
                # of any other effect it would evict pods
                "expression": f"{_node_list('spec', 'taints')}.all(one, one.key != '{taint}' || "
                "one.effect == 'NoSchedule')",
                "message": f"the taint {taint} has the effect NoSchedule",
            },
            {
                "expression": _other_entries_unchanged("status", "conditions", "type", condition),
                "message": f"the agent may change the condition {condition}, and no other",
            },
        ],
    }


def _node_parts() -> list[dict[str, str]]:
    """Metadata, spec and status of the node as it is to be, and as it was, as maps with any keys.

    Typed, a field that a server does not have yet could not be named: its policy would fail for every write.
    """
    return [
        {"name": f"{part}{suffix}", "expression": f"has({of}.{part}) ? dyn({of}.{part}) : dyn({{}})"}
        for part in ("metadata", "spec", "status")
        for suffix, of in (("", "object"), ("Before", "oldObject"))
    ]


def _unchanged_except(part: str, *changing: str) -> str:
    """A part of the node has the fields that it had, each as it was, but for the named ones; in CEL."""
    after, before = f"variables.{part}", f"variables.{part}Before"
    names = "[" + ", ".join(f"'{name}'" for name in changing) + "]"
    return (
        f"{after}.all(key, key in {names} || (key in {before} && {after}[key] == {before}[key])) &&\n"
        f"{before}.all(key, key in {names} || key in {after})"
    )


def _node_list(part: str, field: str, suffix: str = "") -> str:
    """A list of the node, empty where it has none; in CEL."""
    of = f"variables.{part}{suffix}"
    return f"(has({of}.{field}) ? {of}.{field} : [])"


def _other_entries_unchanged(part: str, field: str, key: str, ours: str) -> str:
    """The entries of a list that are not the agent's are what they were; in CEL."""
    rest = f".filter(one, one.{key} != '{ours}')"
    return f"{_node_list(part, field)}{rest} == {_node_list(part, field, 'Before')}{rest}"


def _daemon_set(program: str) -> dict[str, Any]:
    return {
        "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}},
        "template": {
            "metadata": {
                "labels": LABELS,
                # Another program is another pod.
                "annotations": {"gpukiln.io/program": hashlib.sha256(program.encode()).hexdigest()[:12]},
            },
            "spec": {
                "serviceAccountName": NAME,
                "automountServiceAccountToken": False,  # the one that looks gets none
                "priorityClassName": "system-node-critical",
                "hostPID": True,
                "nodeSelector": {GPU_PRESENT: "true"},
                "tolerations": [{"operator": "Exists"}],
                "terminationGracePeriodSeconds": 5,
                "containers": [
                    _container("check", {"privileged": True}, []),
                    _container("report", _UNPRIVILEGED, [_ENV], "credentials"),
                ],
                "volumes": [
                    {"name": "program", "configMap": {"name": NAME}},
                    {"name": "found", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                    {"name": "credentials", "projected": {"sources": _CREDENTIALS}},
                ],
            },
        },
    }


_UNPRIVILEGED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": NOBODY_UID,
    "runAsGroup": NOBODY_UID,
    "seccompProfile": {"type": "RuntimeDefault"},
}
_ENV = {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
_CREDENTIALS = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
]


def _container(
    verb: str, context: dict[str, Any], env: list[dict[str, Any]], credentials: str = ""
) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "program", "mountPath": str(Path(PROGRAM_FILE).parent), "readOnly": True},
        {
            "name": "found",
            "mountPath": str(Path(RESULT_FILE).parent),
            **({"readOnly": True} if credentials else {}),
        },
    ]
    if credentials:
        place = str(health_agent.CREDENTIALS)
        mounts.append({"name": credentials, "mountPath": place, "readOnly": True})
    return {
        "name": verb,
        "image": load_add_ons()["python"].image,
        "command": ["python3", PROGRAM_FILE, verb, RESULT_FILE],
        **({"env": env} if env else {}),
        "resources": {
            "requests": {"cpu": "10m", "memory": "48Mi"},
            "limits": {"memory": "128Mi"},
        },
        "securityContext": context,
        "volumeMounts": mounts,
    }
