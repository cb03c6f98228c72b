"""Node health: an agent on every GPU node that sets a condition and a taint (`health_agent.py`).

The agent needs to read and patch nodes. RBAC can't limit that to one node, so an admission policy limits it
to the agent's own node, its taint and its condition. Expressions: kubernetes.io, Validating Admission Policy;
the token of a pod names its node since Kubernetes 1.32.
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
                "After you remove the agent, remove its taint: "
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
        # Patching needs no update; both arrive at the policy as the operation UPDATE.
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
        {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    ]


def _policy(namespace: str) -> dict[str, Any]:
    claim = "request.userInfo.extra"
    named = f"has({claim}) && '{NODE_CLAIM}' in {claim} ? {claim}['{NODE_CLAIM}'][0] : ''"
    taint, condition = health_agent.TAINT, health_agent.CONDITION
    return {
        # Without an answer of the policy the agent may change nothing.
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
        # Other users of the API are not affected, the kubelet in particular.
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
                "message": "the agent may change no node but its own",
            },
            *(
                {
                    "expression": _unchanged_except(part, *changing),
                    "message": f"the agent may not change the node's {what}",
                }
                for part, changing, what in (
                    # the API server itself changes these with each write; a Node has no generation today
                    ("metadata", ("managedFields", "resourceVersion", "generation"), "metadata"),
                    ("spec", ("taints",), "specification, except its taints"),
                    ("status", ("conditions",), "status, except its conditions"),
                )
            ),
            {
                "expression": _other_entries_unchanged("spec", "taints", "key", taint),
                "message": f"the agent may change no taint but {taint}",
            },
            {
                # NoExecute would evict the pods that run
                "expression": f"{_node_list('spec', 'taints')}.all(one, one.key != '{taint}' || "
                "one.effect == 'NoSchedule')",
                "message": f"the taint {taint} has the effect NoSchedule",
            },
            {
                "expression": _other_entries_unchanged("status", "conditions", "type", condition),
                "message": f"the agent may change no condition but {condition}",
            },
        ],
    }


def _node_parts() -> list[dict[str, str]]:
    """Metadata, spec and status of the new and of the old node, as maps with any keys.

    dyn() turns type checks off: a policy that names a field which this server's Node type does not have would
    fail for every write.
    """
    return [
        {"name": f"{part}{suffix}", "expression": f"has({of}.{part}) ? dyn({of}.{part}) : dyn({{}})"}
        for part in ("metadata", "spec", "status")
        for suffix, of in (("", "object"), ("Before", "oldObject"))
    ]


def _unchanged_except(part: str, *changing: str) -> str:
    """CEL: a part of the node is unchanged, except the named fields."""
    after, before = f"variables.{part}", f"variables.{part}Before"
    names = "[" + ", ".join(f"'{name}'" for name in changing) + "]"
    return (
        f"{after}.all(key, key in {names} || (key in {before} && {after}[key] == {before}[key])) &&\n"
        f"{before}.all(key, key in {names} || key in {after})"
    )


def _node_list(part: str, field: str, suffix: str = "") -> str:
    """CEL: a list of the node; empty if the node has none."""
    of = f"variables.{part}{suffix}"
    return f"(has({of}.{field}) ? {of}.{field} : [])"


def _other_entries_unchanged(part: str, field: str, key: str, own: str) -> str:
    """CEL: the entries of a list that do not belong to the agent are unchanged."""
    rest = f".filter(one, one.{key} != '{own}')"
    return f"{_node_list(part, field)}{rest} == {_node_list(part, field, 'Before')}{rest}"


def _daemon_set(program: str) -> dict[str, Any]:
    return {
        "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
        # The default of one node at a time would take hours on a large cluster.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "25%"}},
        "template": {
            "metadata": {
                "labels": LABELS,
                # A changed ConfigMap does not restart pods; a changed annotation of the template does.
                "annotations": {"gpukiln.io/program": hashlib.sha256(program.encode()).hexdigest()[:12]},
            },
            "spec": {
                "serviceAccountName": NAME,
                "automountServiceAccountToken": False,  # only the container `report` mounts credentials
                # The agent must run on a node that is full, or under memory pressure.
                "priorityClassName": "system-node-critical",
                # nsenter enters the mount namespace of PID 1, to run the node's own gpukiln-gpu.
                "hostPID": True,
                "nodeSelector": {GPU_PRESENT: "true"},
                # It must stay on nodes with its own taint and with any other.
                "tolerations": [{"operator": "Exists"}],
                "terminationGracePeriodSeconds": 5,
                "containers": [
                    _container("check", {"privileged": True}, []),
                    _container("report", _UNPRIVILEGED, [_ENV], "credentials"),
                ],
                "volumes": [
                    {"name": "program", "configMap": {"name": NAME}},
                    # In memory: the result must not depend on a full or read-only disk.
                    {"name": "result", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
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
    # The kubelet replaces the token after 80 % of its lifetime
    # (kubernetes.io/docs/concepts/storage/projected-volumes).
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
]


def _container(
    verb: str, context: dict[str, Any], env: list[dict[str, Any]], credentials: str = ""
) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        {"name": "program", "mountPath": str(Path(PROGRAM_FILE).parent), "readOnly": True},
        {
            "name": "result",
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
