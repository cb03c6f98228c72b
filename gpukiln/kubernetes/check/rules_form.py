"""Rules on form: unreadable documents, objects that violate their schema, removed APIs."""

from __future__ import annotations

from collections.abc import Iterator

from gpukiln.kubernetes.check import schema
from gpukiln.kubernetes.check.rules import Context, rule
from gpukiln.kubernetes.check.workload import Rejection, Resource, Violation

# kubernetes.io/docs/reference/using-api/deprecation-guide: (apiVersion, kind) -> the minor version that
# removed it, and its successor.
REMOVED: dict[tuple[str, str], tuple[int, str]] = {
    **{
        ("extensions/v1beta1", kind): (16, "apps/v1")
        for kind in ("Deployment", "DaemonSet", "ReplicaSet", "NetworkPolicy", "PodSecurityPolicy")
    },
    **{
        (f"apps/{version}", kind): (16, "apps/v1")
        for version in ("v1beta1", "v1beta2")
        for kind in ("Deployment", "DaemonSet", "ReplicaSet", "StatefulSet")
    },
    ("extensions/v1beta1", "Ingress"): (22, "networking.k8s.io/v1"),
    ("networking.k8s.io/v1beta1", "Ingress"): (22, "networking.k8s.io/v1"),
    ("rbac.authorization.k8s.io/v1beta1", "ClusterRole"): (22, "rbac.authorization.k8s.io/v1"),
    ("rbac.authorization.k8s.io/v1beta1", "ClusterRoleBinding"): (22, "rbac.authorization.k8s.io/v1"),
    ("rbac.authorization.k8s.io/v1beta1", "Role"): (22, "rbac.authorization.k8s.io/v1"),
    ("rbac.authorization.k8s.io/v1beta1", "RoleBinding"): (22, "rbac.authorization.k8s.io/v1"),
    ("apiextensions.k8s.io/v1beta1", "CustomResourceDefinition"): (22, "apiextensions.k8s.io/v1"),
    ("scheduling.k8s.io/v1beta1", "PriorityClass"): (22, "scheduling.k8s.io/v1"),
    ("storage.k8s.io/v1beta1", "StorageClass"): (22, "storage.k8s.io/v1"),
    ("batch/v1beta1", "CronJob"): (25, "batch/v1"),
    ("policy/v1beta1", "PodDisruptionBudget"): (25, "policy/v1"),
    ("policy/v1beta1", "PodSecurityPolicy"): (25, "none: Pod Security Admission"),
    ("node.k8s.io/v1beta1", "RuntimeClass"): (25, "node.k8s.io/v1"),
    ("discovery.k8s.io/v1beta1", "EndpointSlice"): (25, "discovery.k8s.io/v1"),
    ("autoscaling/v2beta1", "HorizontalPodAutoscaler"): (25, "autoscaling/v2"),
    ("autoscaling/v2beta2", "HorizontalPodAutoscaler"): (26, "autoscaling/v2"),
    ("flowcontrol.apiserver.k8s.io/v1beta2", "FlowSchema"): (29, "flowcontrol.apiserver.k8s.io/v1"),
    ("flowcontrol.apiserver.k8s.io/v1beta3", "FlowSchema"): (32, "flowcontrol.apiserver.k8s.io/v1"),
    # Other projects': karpenter.sh/docs/upgrading, kueue.sigs.k8s.io, github.com/ray-project/kuberay.
    ("karpenter.sh/v1alpha5", "Provisioner"): (0, "karpenter.sh/v1 NodePool"),
    ("karpenter.sh/v1beta1", "NodePool"): (0, "karpenter.sh/v1"),
    ("karpenter.k8s.aws/v1beta1", "EC2NodeClass"): (0, "karpenter.k8s.aws/v1"),
    ("karpenter.k8s.aws/v1alpha1", "AWSNodeTemplate"): (0, "karpenter.k8s.aws/v1 EC2NodeClass"),
    ("ray.io/v1alpha1", "RayCluster"): (0, "ray.io/v1"),
    ("ray.io/v1alpha1", "RayJob"): (0, "ray.io/v1"),
    ("ray.io/v1alpha1", "RayService"): (0, "ray.io/v1"),
}
NO_OBJECTS = (("v1", "Config"), ("v1", "List"))  # a kubeconfig; an empty list


def unserved(resource: Resource) -> bool:
    """Whether a rule below reports the kind as unknown or removed."""
    return (resource.api, resource.kind) in REMOVED or schema.is_builtin(resource.api)


@rule(
    "unreadable",
    "error",
    Rejection,
    title="A file can be read",
    reason="it could not be checked, and kubectl rejects it as well",
    source="yaml.org/spec/1.2.2",
    fix="fix the line that the message names",
)
def unreadable(rejection: Rejection, _: Context) -> Iterator[Violation]:
    if rejection.resource is None:
        yield Violation(rejection.text)


@rule(
    "server-refuses",
    "error",
    Rejection,
    title="The API server accepts it (--server)",
    reason="the server of the current context rejected it in a dry run",
    source="kubernetes.io/docs/reference/using-api/api-concepts/#dry-run",
    fix="as the server's answer says",
)
def server_refuses(rejection: Rejection, _: Context) -> Iterator[Violation]:
    if rejection.resource is not None:
        yield Violation(rejection.text)


@rule(
    "key-twice",
    "warning",
    Resource,
    title="A mapping has each key once",
    reason="kubectl sends the last value, and the first is lost without a message; strict decoding rejects "
    "it "
    "(YAML sent to the API server with fieldValidation=Strict)",
    source="kubernetes.io/docs/reference/using-api/api-concepts/#field-validation",
    fix="merge both into one key",
)
def key_twice(resource: Resource, _: Context) -> Iterator[Violation]:
    for line, key in resource.repeated:
        yield Violation(f"{key} occurs twice", line=line)


@rule(
    "schema",
    "error",
    Resource,
    title="An object matches the schema of its kind",
    reason="the API server rejects it, or without validation drops unknown fields",
    source="the OpenAPI schemas of Kubernetes (kubernetes-validate); its validation (pkg/apis/*/validation "
    "at v1.36); of other kinds, their CRDs (custom_schemas.py)",
    fix="`kubectl explain KIND.PATH` shows the fields",
)
def form(resource: Resource, context: Context) -> Iterator[Violation]:
    custom = context.custom_form(resource, schema.custom_violations)
    if custom is not None:
        yield from custom[0]
        return
    # Several versions mostly report the same mistake: each path is reported once.
    reported: set[tuple[object, ...]] = set()
    for minor in context.minors:
        for violation in schema.violations(resource, minor):
            if violation.path not in reported:
                reported.add(violation.path)
                yield violation


@rule(
    "api-removed",
    "error",
    Resource,
    title="The API is still served",
    reason="the API server answers `no matches for kind`",
    source="kubernetes.io/docs/reference/using-api/deprecation-guide; upgrade notes of Karpenter and KubeRay",
    fix="use the current apiVersion, and adapt the fields",
)
def api_removed(resource: Resource, context: Context) -> Iterator[Violation]:
    # Minor version 0 is that of other projects, whose APIs do not depend on the version of Kubernetes.
    removed = REMOVED.get((resource.api, resource.kind))
    if removed and removed[0] <= context.minor:
        since = f" since 1.{removed[0]}" if removed[0] else ""
        yield Violation(
            f"{resource.api} {resource.kind} was removed{since}; now: {removed[1]}", ("apiVersion",)
        )


@rule(
    "api-unknown",
    "error",
    Resource,
    title="A kind in an API group of Kubernetes exists",
    reason="the API server answers `no matches for kind`",
    source="the OpenAPI schemas of Kubernetes (kubernetes-validate)",
    fix="`kubectl api-resources` lists kinds and their apiVersions",
)
def api_unknown(resource: Resource, context: Context) -> Iterator[Violation]:
    if resource.role != "object" or (resource.api, resource.kind) in (
        *REMOVED,
        *NO_OBJECTS,
        *context.custom_kinds,
    ):
        return
    group, _, version = resource.api.rpartition("/")
    served = [
        api for api, kind in context.custom_kinds if kind == resource.kind and api.rpartition("/")[0] == group
    ]
    if served:
        text = (
            f"{resource.kind} has no version {version}; its CustomResourceDefinition has {', '.join(served)}"
        )
        yield Violation(text, ("apiVersion",))
        return
    if not resource.kind or not resource.api:
        missing = "kind" if resource.api else "apiVersion"
        yield Violation(f"{missing} is missing")
    elif schema.is_builtin(resource.api) and not schema.has_schema(resource, context.minor):
        right = schema.api_versions(resource.kind, context.minor)
        if right:
            yield Violation(
                f"{resource.kind} has no {resource.api}; it has {', '.join(right)}", ("apiVersion",)
            )
        else:
            near = schema.nearest_kind(resource.kind, context.minor)
            yield Violation(
                f"no kind {resource.kind} in {resource.api}" + (f"; {near}" if near else ""), ("kind",)
            )
