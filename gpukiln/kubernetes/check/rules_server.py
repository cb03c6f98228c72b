"""Rules on what the API server rejects beyond schemas (pkg/apis/{core,batch,apps}/validation)."""

from __future__ import annotations

import re
import zoneinfo
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from gpukiln.kubernetes.check.formats import LABEL, LABEL_KEY, LABEL_VALUE, SEGMENT, SUBDOMAIN
from gpukiln.kubernetes.check.relations import toleration_errors
from gpukiln.kubernetes.check.rules import NEWEST, Context, rule
from gpukiln.kubernetes.check.schema import has_custom_schema, has_schema
from gpukiln.kubernetes.check.workload import (
    Path,
    PodContainer,
    Resource,
    Violation,
    Workload,
    at,
    dotted,
    is_placeholder,
    mapping,
    sequence,
)
from gpukiln.kubernetes.quantity import quantity
from gpukiln.typed import short

VALIDATION = "kubernetes/kubernetes:pkg/apis/core/validation/validation.go"
BATCH = "kubernetes/kubernetes:pkg/apis/batch/validation/validation.go"
NAMES = "kubernetes.io/docs/concepts/overview/working-with-objects/names"
GPUS = "kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus"
JOB_KINDS = ("Job", "CronJob", "JobSet")
CONTROLLER_KINDS = ("Deployment", "DaemonSet", "ReplicaSet", "ReplicationController", "StatefulSet")
# Kinds whose name may be any segment of a path.
PATH_NAMES = ("Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding", "APIService", "PodDisruptionBudget")
POD_SECURITY = tuple(f"pod-security.kubernetes.io/{mode}" for mode in ("enforce", "audit", "warn"))
NAMED_BY_SERVER = ("LimitRange",)  # the API server generates a name


@rule(
    "job-restart-policy",
    "error",
    Workload,
    title="The pods of a Job have restartPolicy Never or OnFailure",
    reason="the default is Always, which the API server rejects in a Job",
    source=BATCH,
    fix="restartPolicy: Never in the pod's spec (podFailurePolicy needs Never, too)",
    fragments=False,
)
def job_restart_policy(workload: Workload, _: Context) -> Iterator[Violation]:
    policy = workload.pod.get("restartPolicy")
    if workload.kind == "JobSet" and not policy:
        return  # its webhook sets OnFailure (kubernetes-sigs/jobset:pkg/webhooks/jobset_webhook.go, Default)
    if workload.kind in JOB_KINDS and policy not in ("Never", "OnFailure"):
        policy_text = f"restartPolicy {policy}" if policy else "no restartPolicy, and the default is Always"
        yield Violation(
            f"{policy_text}; wanted Never or OnFailure", workload.at(*(["restartPolicy"] if policy else []))
        )


@rule(
    "restart-policy-always",
    "error",
    Workload,
    title="The pods of a Deployment, StatefulSet or DaemonSet have restartPolicy Always",
    reason="the API server rejects any other value; a program that ends belongs into a Job",
    source="kubernetes/kubernetes:pkg/apis/apps/validation/validation.go",
    fix="remove restartPolicy, or use a Job",
    fragments=False,
)
def restart_policy_always(workload: Workload, _: Context) -> Iterator[Violation]:
    policy = workload.pod.get("restartPolicy", "Always")
    if workload.kind in CONTROLLER_KINDS and policy != "Always":
        yield Violation(
            f"restartPolicy {policy} in a {workload.kind}; wanted Always", workload.at("restartPolicy")
        )


def _amounts(workload: Workload) -> Iterator[tuple[PodContainer, Path, str, str, Any]]:
    """Container, path, requests or limits, resource and amount of each request and limit."""
    for container in workload.containers:
        for side, amounts in (("requests", container.requests), ("limits", container.limits)):
            for resource, amount in amounts.items():
                path = workload.at(*container.where, "resources", side, resource)
                yield container, path, side, resource, amount


def _is_extended(resource: str) -> bool:
    # As IsExtendedResourceName (pkg/apis/core/helper): a domain, and not Kubernetes' own
    return "/" in resource and not resource.partition("/")[0].endswith("kubernetes.io")


@rule(
    "gpu-not-in-limits",
    "error",
    Workload,
    title="GPUs are in limits",
    reason="extended resources can't be overcommitted: the API server rejects a request without a limit",
    source=GPUS,
    fix="write them in limits; the API server sets the request to the limit",
)
def gpu_not_in_limits(workload: Workload, _: Context) -> Iterator[Violation]:
    for container, path, side, resource, _amount in _amounts(workload):
        if side == "requests" and _is_extended(resource) and resource not in container.limits:
            yield Violation(f"{resource} in requests, and not in limits", path)


@rule(
    "gpu-request-is-limit",
    "error",
    Workload,
    title="Request and limit of GPUs are equal",
    reason="extended resources can't be overcommitted: the API server rejects different numbers",
    source=GPUS,
    fix="remove the request: the API server sets it to the limit",
)
def gpu_request_is_limit(workload: Workload, _: Context) -> Iterator[Violation]:
    for container, path, side, resource, amount in _amounts(workload):
        if side == "requests" and _is_extended(resource) and resource in container.limits:
            limit = container.limits[resource]
            if quantity(amount) != quantity(limit):
                yield Violation(f"{resource}: request {amount}, limit {limit}; wanted one number", path)


@rule(
    "gpu-whole",
    "error",
    Workload,
    title="GPUs are whole numbers",
    reason="the API server rejects fractions; parts of a GPU are separate resources",
    source=GPUS,
    fix="request 1; to share a GPU, use time slicing, MPS or MIG (nvidia.com/mig-1g.5gb)",
)
def gpu_whole(workload: Workload, _: Context) -> Iterator[Violation]:
    for _container, path, _side, resource, amount in _amounts(workload):
        number = quantity(amount)
        if _is_extended(resource) and number is not None and (number != number.to_integral() or number < 0):
            yield Violation(f"{resource}: {amount}; wanted a whole number", path)


@rule(
    "quantity",
    "error",
    Workload,
    title="Amounts are quantities of Kubernetes",
    reason="the API server rejects other texts",
    source="kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity",
    fix="16Gi or 16G for bytes, 500m or 0.5 for cores, without a space",
)
def quantities(workload: Workload, _: Context) -> Iterator[Violation]:
    for _container, path, _side, resource, amount in _amounts(workload):
        number = quantity(amount)
        if number is None and isinstance(amount, str) and not is_placeholder(amount):
            yield Violation(f"{resource}: {short(amount)} is no quantity", path)
        elif number is not None and number < 0 and not _is_extended(resource):
            yield Violation(f"{resource}: {amount} is below zero", path)
    for index, volume in enumerate(sequence(workload.pod.get("volumes"))):
        limit = mapping(mapping(volume).get("emptyDir")).get("sizeLimit")
        if isinstance(limit, str) and quantity(limit) is None and not is_placeholder(limit):
            path = workload.at("volumes", index, "emptyDir", "sizeLimit")
            yield Violation(f"sizeLimit {short(limit)} is no quantity", path)


@rule(
    "request-above-limit",
    "error",
    Workload,
    title="A request is at most its limit",
    reason="the API server rejects it",
    source=VALIDATION,
    fix="lower the request, or raise the limit",
)
def request_above_limit(workload: Workload, _: Context) -> Iterator[Violation]:
    for container, path, side, resource, amount in _amounts(workload):
        request, limit = quantity(amount), quantity(container.limits.get(resource))
        # Of extended resources gpu-request-is-limit reports every difference.
        if side == "limits" or _is_extended(resource) or request is None or limit is None:
            continue
        if request > limit:
            yield Violation(f"{resource}: request {amount} above limit {container.limits[resource]}", path)


@rule(
    "selector-labels",
    "error",
    Resource,
    title="A selector matches the labels of its own template",
    reason="the API server rejects a template whose labels the selector does not match",
    source="kubernetes/kubernetes:pkg/apis/apps/validation/validation.go",
    fix="add every label of the selector to the template",
)
def selector_labels(resource: Resource, _: Context) -> Iterator[Violation]:
    manual = resource.kind == "Job" and at(resource.object, ("spec", "manualSelector")) is True
    if resource.kind not in CONTROLLER_KINDS and not manual:
        return
    selector = mapping(at(resource.object, ("spec", "selector")))
    labels = mapping(at(resource.object, ("spec", "template", "metadata", "labels")))
    # It is older than selectors with expressions: its selector is a plain mapping.
    selected = selector if resource.kind == "ReplicationController" else mapping(selector.get("matchLabels"))
    for key, value in selected.items():
        if labels.get(key) != value:
            has = f"the template has {key}: {labels[key]}" if key in labels else f"the template has no {key}"
            yield Violation(f"selector {key}: {value}; {has}", ("spec", "selector"))
    for expression in sequence(selector.get("matchExpressions")):
        if isinstance(expression, Mapping) and not _matches(expression, labels):
            operator = expression.get("operator")
            text = f"selector {expression.get('key')} {operator} {expression.get('values', '')}".rstrip()
            yield Violation(f"{text}: the template's labels do not match", ("spec", "selector"))


def _matches(expression: Mapping[str, Any], labels: Mapping[str, Any]) -> bool:
    key, values = str(expression.get("key")), sequence(expression.get("values"))
    answers = {
        "In": labels.get(key) in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }
    # The rule schema reports other operators.
    return answers.get(str(expression.get("operator")), True)


@rule(
    "volume-of-mount",
    "error",
    Workload,
    title="Every mount names a volume of the pod",
    reason="the API server rejects a mount of a volume that the pod does not have",
    source=VALIDATION,
    fix="add the volume to the pod's volumes, or a claim of that name to volumeClaimTemplates",
    fragments=False,
)
def volume_of_mount(workload: Workload, _: Context) -> Iterator[Violation]:
    names = {str(mapping(volume).get("name")) for volume in sequence(workload.pod.get("volumes"))}
    # Each claim template of a StatefulSet becomes a volume of the pod.
    claims = sequence(at(workload.object, ("spec", "volumeClaimTemplates")))
    if workload.kind == "JobSet":  # kubernetes-sigs/jobset:api/jobset/v1alpha2, VolumeClaimPolicy
        policies = sequence(at(workload.object, ("spec", "volumeClaimPolicies")))
        claims = [template for policy in policies for template in sequence(mapping(policy).get("templates"))]
    names |= {str(at(claim, ("metadata", "name"))) for claim in claims}
    for container in workload.containers:
        for index, mount in enumerate(sequence(container.spec.get("volumeMounts"))):
            name = str(mapping(mount).get("name"))
            if name not in names:
                path = workload.at(*container.where, "volumeMounts", index)
                yield Violation(f"{container.name} mounts {name}, and the pod has no such volume", path)


@rule(
    "name-twice",
    "error",
    Workload,
    title="Names of containers and volumes, and mount paths, are unique",
    reason="the API server rejects a repeated name or path",
    source=VALIDATION,
    fix="rename or remove one",
)
def name_twice(workload: Workload, _: Context) -> Iterator[Violation]:
    names = Counter(container.name for container in workload.containers if container.name)
    yield from (
        Violation(f"two containers {name}", workload.at()) for name, many in names.items() if many > 1
    )
    volumes = Counter(str(mapping(volume).get("name")) for volume in sequence(workload.pod.get("volumes")))
    yield from (
        Violation(f"two volumes {name}", workload.at("volumes")) for name, many in volumes.items() if many > 1
    )
    for container in workload.containers:
        mounts = sequence(container.spec.get("volumeMounts"))
        paths = Counter(str(mapping(mount).get("mountPath")) for mount in mounts)
        for path, many in paths.items():
            if many > 1:
                where = workload.at(*container.where, "volumeMounts")
                yield Violation(f"{container.name} mounts two volumes at {path}", where)


@rule(
    "job-numbers",
    "error",
    Workload,
    title="The numbers of a Job are not negative",
    reason="the API server rejects them",
    source=BATCH,
    fix="0 or more, or remove it for the default",
)
def job_numbers(workload: Workload, _: Context) -> Iterator[Violation]:
    for key in (
        "backoffLimit",
        "parallelism",
        "completions",
        "activeDeadlineSeconds",
        "ttlSecondsAfterFinished",
        "backoffLimitPerIndex",
        "maxFailedIndexes",
    ):
        value = (workload.job or {}).get(key)
        if isinstance(value, int) and value < 0:
            yield Violation(f"{key} {value} is below zero", (*workload.job_where, key))


@rule(
    "pod-failure-policy",
    "error",
    Workload,
    title="podFailurePolicy needs restartPolicy Never",
    reason="with OnFailure the kubelet restarts the container and no pod ever fails, so the API server "
    "rejects it",
    source=BATCH,
    fix="restartPolicy: Never",
)
def pod_failure_policy(workload: Workload, _: Context) -> Iterator[Violation]:
    policy = mapping((workload.job or {}).get("podFailurePolicy"))
    if not policy:
        return
    restart = workload.pod.get("restartPolicy")
    if restart != "Never":
        yield Violation(
            f"podFailurePolicy with restartPolicy {restart or 'left out'}; wanted Never",
            (*workload.job_where, "podFailurePolicy"),
        )
    names = {container.name for container in workload.containers}
    for index, entry in enumerate(sequence(policy.get("rules"))):
        codes = mapping(mapping(entry).get("onExitCodes"))
        path = (*workload.job_where, "podFailurePolicy", "rules", index)
        if (name := codes.get("containerName")) and str(name) not in names:
            yield Violation(f"onExitCodes of a container {name}, which the pod does not have", path)
        if codes.get("operator") == "In" and 0 in sequence(codes.get("values")):
            yield Violation("onExitCodes In with 0, which is no failure", path)


@rule(
    "indexed-job",
    "error",
    Workload,
    title="Fields of Indexed Jobs are only in Indexed Jobs",
    reason="the API server rejects them in other Jobs",
    source=BATCH,
    fix="completionMode: Indexed with completions",
)
def indexed_job(workload: Workload, _: Context) -> Iterator[Violation]:
    job = workload.job or {}
    default = "Indexed" if workload.kind == "JobSet" else "NonIndexed"  # what JobSet's webhook sets
    indexed = job.get("completionMode", default) == "Indexed"
    completions = job.get("completions")
    if indexed and workload.kind == "Job" and isinstance(completions, int) and completions > 0:
        # The host name of a pod is the name of the Job with the index, and a DNS label.
        last = f"{workload.name}-{completions - 1}"
        if workload.name and not is_placeholder(last) and not LABEL.fullmatch(last):
            text = (
                f"its last pod would be {short(last)}; wanted small letters, digits and hyphens, 63 at most"
            )
            yield Violation(text, ("metadata", "name"))
    # Without both, the API server sets both to 1 (pkg/apis/batch/v1/defaults.go).
    several = job.get("parallelism") is not None and job.get("completions") is None
    if indexed and several and workload.kind != "JobSet":
        text = "completionMode Indexed with parallelism and without completions"
        yield Violation(text, (*workload.job_where, "completionMode"))
    if not indexed and job.get("backoffLimitPerIndex") is not None:
        path = (*workload.job_where, "backoffLimitPerIndex")
        yield Violation("backoffLimitPerIndex without completionMode Indexed", path)
    if job.get("maxFailedIndexes") is not None and job.get("backoffLimitPerIndex") is None:
        yield Violation(
            "maxFailedIndexes without backoffLimitPerIndex", (*workload.job_where, "maxFailedIndexes")
        )


@rule(
    "names",
    "error",
    Resource,
    title="Names and labels have an allowed form",
    reason="the API server rejects upper case, underscores and names that are too long",
    source=NAMES,
    fix="small letters, digits and hyphens; 63 characters at most, a CronJob's name 52",
)
def names(resource: Resource, _: Context) -> Iterator[Violation]:
    if resource.role != "object":
        return
    name, kind = resource.metadata.get("name"), resource.kind
    if isinstance(name, str) and name and not is_placeholder(name):
        long = _longest(resource)
        if not _name_form(kind).fullmatch(name):
            yield Violation(f"{short(name)} is no name of a {kind}", ("metadata", "name"))
        elif len(name) > long:
            yield Violation(
                f"{len(name)} characters in the name of a {kind}; at most {long}", ("metadata", "name")
            )
    elif _needs_name(resource) and not name and not resource.metadata.get("generateName"):
        yield Violation("neither name nor generateName", ("metadata",))
    yield from _labels(resource)
    yield from _annotations(resource)


def _labels(resource: Resource) -> Iterator[Violation]:
    for path in (("metadata", "labels"), ("spec", "template", "metadata", "labels")):
        for key, value in mapping(at(resource.object, path)).items():
            if isinstance(value, str) and not LABEL_VALUE.fullmatch(value) and not is_placeholder(value):
                yield Violation(f"{dotted(path)}: {short(value)} is no value of a label", (*path, key))
            if not LABEL_KEY.fullmatch(key) and not is_placeholder(key):
                yield Violation(f"{dotted(path)}: {short(key)} is no key of a label", (*path, key))
    for label in POD_SECURITY if resource.kind == "Namespace" else ():
        level = mapping(resource.metadata.get("labels")).get(label, "privileged")
        if level not in ("privileged", "baseline", "restricted") and not is_placeholder(level):
            text = f"{label}: {short(level)}; wanted privileged, baseline or restricted"
            yield Violation(text, ("metadata", "labels", label))


def _annotations(resource: Resource) -> Iterator[Violation]:
    for path in (("metadata", "annotations"), ("spec", "template", "metadata", "annotations")):
        annotations = mapping(at(resource.object, path))
        for key in annotations:
            # As ValidateAnnotations (apimachinery, pkg/api/validation), which accepts upper case in the
            # domain.
            if not LABEL_KEY.fullmatch(key.lower()) and not is_placeholder(key):
                yield Violation(f"{dotted(path)}: {short(key)} is no key of an annotation", (*path, key))
        # TotalAnnotationSizeLimitB of apimachinery.
        if sum(len(f"{key}{value}".encode()) for key, value in annotations.items()) > 262_144:
            yield Violation(f"{dotted(path)}: more than 256 KiB", path)


def _name_form(kind: str) -> re.Pattern[str]:
    if kind in PATH_NAMES:
        return SEGMENT
    # These names become parts of host names in the cluster's DNS.
    return LABEL if kind in ("Namespace", "Service", "StatefulSet") else SUBDOMAIN


def _longest(resource: Resource) -> int:
    """The maximum length of a name; pods that are named after the object count."""
    if resource.kind == "CronJob":
        # The controller appends 11 characters to the name of each Job.
        return 52
    if resource.kind in PATH_NAMES:
        return 1 << 20  # limited only by the size of a request
    # The name of a Job is the value of a label on its pods.
    return 63 if resource.kind == "Job" else 253


def _needs_name(resource: Resource) -> bool:
    """Whether an object is of a kind of Kubernetes that needs a name; a review needs none."""
    return (
        has_schema(resource, NEWEST)
        and not has_custom_schema(resource)
        and resource.kind not in NAMED_BY_SERVER
        # Requests rather than objects: they are not stored, and need no name.
        and not resource.kind.endswith(("Review", "List", "Options"))
    )


@rule(
    "container-name",
    "error",
    Workload,
    title="Names of containers and volumes have an allowed form",
    reason="the API server rejects upper case, underscores and more than 63 characters",
    source=NAMES,
    fix="small letters, digits and hyphens",
)
def container_name(workload: Workload, _: Context) -> Iterator[Violation]:
    for container in workload.containers:
        if container.name and not LABEL.fullmatch(container.name) and not is_placeholder(container.name):
            path = workload.at(*container.where, "name")
            yield Violation(f"{short(container.name)} is no name of a container", path)
    for index, volume in enumerate(sequence(workload.pod.get("volumes"))):
        name = mapping(volume).get("name")
        if isinstance(name, str) and not LABEL.fullmatch(name) and not is_placeholder(name):
            yield Violation(f"{short(name)} is no name of a volume", workload.at("volumes", index, "name"))


@rule(
    "toleration-form",
    "error",
    Workload,
    title="A toleration has no contradictions",
    reason="the API server rejects Exists with a value, Equal without a key, and unknown effects",
    source=VALIDATION,
    fix="{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}",
)
def toleration_form(workload: Workload, _: Context) -> Iterator[Violation]:
    for index, toleration in enumerate(sequence(workload.pod.get("tolerations"))):
        for text in toleration_errors(mapping(toleration)):
            yield Violation(text, workload.at("tolerations", index))


@rule(
    "affinity-form",
    "error",
    Workload,
    title="Expressions of a node affinity have the values that their operator needs",
    reason="the API server rejects In without values, Exists with values, and weights outside 1 to 100; "
    "Gt and Lt without a number match no node",
    source=VALIDATION,
    fix="In and NotIn have values, Exists and DoesNotExist none, Gt and Lt one whole number in quotes",
)
def affinity_form(workload: Workload, _: Context) -> Iterator[Violation]:
    node = mapping(at(workload.pod, ("affinity", "nodeAffinity")))
    # Required terms have no weight.
    above = ("affinity", "nodeAffinity", "preferredDuringSchedulingIgnoredDuringExecution")
    for index, entry in enumerate(sequence(node.get(str(above[-1])))):
        weight = mapping(entry).get("weight")
        if isinstance(weight, int) and not 1 <= weight <= 100:
            yield Violation(f"weight {weight}; wanted 1 to 100", workload.at(*above, index))
    for path, expression in expressions(workload):
        operator, values = expression.get("operator"), sequence(expression.get("values"))
        text = f"{expression.get('key')} {operator}"
        if operator in ("In", "NotIn") and not values:
            yield Violation(f"{text} without values", path)
        if operator in ("Exists", "DoesNotExist") and values:
            yield Violation(f"{text} with values", path)
        if operator in ("Gt", "Lt") and not (len(values) == 1 and str(values[0]).lstrip("-").isdecimal()):
            yield Violation(f"{text} {values}; wanted one whole number", path)


def expressions(workload: Workload) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """Path and content of each expression on node labels, required and preferred."""
    above: Path = ("affinity", "nodeAffinity")
    node = mapping(at(workload.pod, above))
    required = (*above, "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
    preferred = (*above, "preferredDuringSchedulingIgnoredDuringExecution")
    terms: list[tuple[Path, Any]] = [
        ((*required, index), term) for index, term in enumerate(sequence(at(workload.pod, required)))
    ]
    terms += [
        ((*preferred, index, "preference"), mapping(entry).get("preference"))
        for index, entry in enumerate(sequence(node.get(str(preferred[-1]))))
    ]
    for where, term in terms:
        for index, expression in enumerate(sequence(mapping(term).get("matchExpressions"))):
            if isinstance(expression, Mapping):
                yield workload.at(*where, "matchExpressions", index), expression


# robfig/cron as the CronJob controller uses it: five fields, with names for months and days of the week.
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_CRON_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of the month", 1, 31, {}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    # Sunday is 0; robfig/cron has no 7.
    ("day of the week", 0, 6, {name: number for number, name in enumerate(_DAYS)}),
)
_CRON_WORDS = re.compile(
    r"@(?:yearly|annually|monthly|weekly|daily|midnight|hourly|every (?:\d+(?:\.\d+)?(?:ns|us|ms|s|m|h))+)"
)
_CRON_PART = re.compile(r"(?P<first>[*?]|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d{1,4}))?")


def _cron_error(schedule: str) -> str:
    """The error in a schedule; empty if it is valid.

    >>> _cron_error("0 9 * * 1-5"), _cron_error("0 25 * * *")
    ('', "'25' is no hour; wanted 0 to 23")
    """
    if _CRON_WORDS.fullmatch(schedule):
        return ""
    # robfig/cron reads TZ= and CRON_TZ=; the API server refuses both.
    if "TZ=" in schedule:
        return "a time zone in the schedule; wanted spec.timeZone"
    fields = schedule.split()
    if len(fields) != len(_CRON_FIELDS):
        return "wanted five fields"
    for text, field in zip(fields, _CRON_FIELDS, strict=True):
        # robfig/cron splits with strings.FieldsFunc, which drops empty parts.
        for part in filter(None, text.split(",")):
            if error := _cron_part_error(part, *field):
                return error
    return ""


def _cron_part_error(part: str, field: str, least: int, most: int, names: Mapping[str, int]) -> str:
    match = _CRON_PART.fullmatch(part)
    ends = [match["first"], match["last"]] if match and match["first"] not in ("*", "?") else []
    numbers = [str(names.get(end.lower(), end)) for end in ends if end]
    if not match or not all(number.isascii() and number.isdecimal() for number in numbers):
        return f"{short(part)} is no {field}"
    values = [int(number) for number in numbers]
    if any(not least <= value <= most for value in values):
        return f"{short(part)} is no {field}; wanted {least} to {most}"
    if values != sorted(values):
        return f"{short(part)}: the range of the {field} ends before it begins"
    return f"{short(part)}: a step of 0" if match["step"] and not int(match["step"]) else ""


@rule(
    "cron-schedule",
    "error",
    Resource,
    title="A CronJob has a valid schedule and time zone",
    reason="the API server rejects others, and a time zone in the schedule",
    source=BATCH,
    fix='five fields in quotes, "0 9 * * 1-5", and the zone in spec.timeZone',
)
def cron_schedule(resource: Resource, _: Context) -> Iterator[Violation]:
    if resource.kind != "CronJob":
        return
    spec = mapping(resource.object.get("spec"))
    schedule, zone = spec.get("schedule"), spec.get("timeZone")
    if (
        isinstance(schedule, str)
        and not is_placeholder(schedule)
        and (error := _cron_error(schedule.strip()))
    ):
        yield Violation(f"schedule {short(schedule)}: {error}", ("spec", "schedule"))
    if isinstance(zone, str) and zone not in zoneinfo.available_timezones() and not is_placeholder(zone):
        yield Violation(f"timeZone {short(zone)} is no time zone of tzdata", ("spec", "timeZone"))
