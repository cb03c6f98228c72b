"""Checks across fields of one definition, for the table in `validation.py`.

Each function gets a mapping of its definition and yields a path in it and what is wrong there. Sources:
pkg/apis/*/validation of kubernetes/kubernetes, v1.36.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpukiln.kubernetes.check.formats import FORMATS, resource_name
from gpukiln.kubernetes.check.workload import Path, is_placeholder, mapping, sequence
from gpukiln.kubernetes.quantity import quantity
from gpukiln.typed import short

Mismatches = Iterator[tuple[Path, str]]
Check = Callable[[Mapping[str, Any]], Mismatches]


def selector_requirement(requirement: Mapping[str, Any]) -> Mismatches:
    operator, values = requirement.get("operator"), sequence(requirement.get("values"))
    if operator in ("In", "NotIn") and not values:
        yield ("values",), f"operator {operator} without values"
    # Only In and NotIn compare values.
    if operator in ("Exists", "DoesNotExist") and values:
        yield ("values",), f"operator {operator} with values"


def node_term(term: Mapping[str, Any]) -> Mismatches:
    for index, requirement in enumerate(sequence(term.get("matchExpressions"))):
        for number, value in enumerate(sequence(mapping(requirement).get("values"))):
            if isinstance(value, str) and not FORMATS["value"].holds(value) and not is_placeholder(value):
                path = ("matchExpressions", index, "values", number)
                yield path, f"found {short(value)}, wanted {FORMATS['value'].wanted}"
    # metadata.name is the only field that it accepts (ValidateNodeFieldSelectorRequirement).
    for index, requirement in enumerate(sequence(term.get("matchFields"))):
        if (
            len(sequence(mapping(requirement).get("values"))) != 1
            or mapping(requirement).get("key") != "metadata.name"
        ):
            yield ("matchFields", index), "wanted the key metadata.name, In or NotIn, and one value"


def profile(security: Mapping[str, Any]) -> Mismatches:
    # A file below the kubelet's folder of seccomp profiles, or the name of a loaded AppArmor profile
    local = security.get("localhostProfile")
    if security.get("type") == "Localhost" and local is None:
        yield (), "type Localhost without localhostProfile"
    if security.get("type") != "Localhost" and local:
        yield ("localhostProfile",), f"localhostProfile with type {security.get('type')}; wanted Localhost"


def env(variable: Mapping[str, Any]) -> Mismatches:
    field = mapping(mapping(variable.get("valueFrom")).get("fieldRef")).get("fieldPath")
    # A variable has one value: all labels at once only fit into a file of a downwardAPI volume.
    if field in ("metadata.labels", "metadata.annotations"):
        path = ("valueFrom", "fieldRef", "fieldPath")
        yield path, f"{field} as a variable; wanted one of them, {field}['key']"
    if variable.get("value") and variable.get("valueFrom"):
        yield ("valueFrom",), "value and valueFrom; wanted one of them"


def mount(volume_mount: Mapping[str, Any]) -> Mismatches:
    if (
        # It extends a read-only mount to the mounts below it (KEP-3857).
        volume_mount.get("recursiveReadOnly") in ("Enabled", "IfPossible")
        and volume_mount.get("readOnly") is not True
    ):
        yield (
            ("recursiveReadOnly",),
            f"recursiveReadOnly {volume_mount['recursiveReadOnly']} without readOnly: true",
        )


def spread(constraint: Mapping[str, Any]) -> Mismatches:
    # minDomains makes the scheduler refuse a pod, which ScheduleAnyway never does.
    if constraint.get("whenUnsatisfiable") == "ScheduleAnyway" and constraint.get("minDomains") is not None:
        yield ("minDomains",), "minDomains with whenUnsatisfiable ScheduleAnyway; wanted DoNotSchedule"
    # The pod's own values of these keys are added to the selector (KEP-3243).
    selector, keys_ = constraint.get("labelSelector"), sequence(constraint.get("matchLabelKeys"))
    if keys_ and selector is None:
        yield ("matchLabelKeys",), "matchLabelKeys without labelSelector"
    taken: list[Any] = [*mapping(mapping(selector).get("matchLabels"))]
    taken += [mapping(part).get("key") for part in sequence(mapping(selector).get("matchExpressions"))]
    for index, key in enumerate(keys_):
        if key in taken:
            yield ("matchLabelKeys", index), f"{key} in matchLabelKeys and in labelSelector"


def probes(container: Mapping[str, Any]) -> Mismatches:
    # The first success of these probes already counts (validateLivenessProbe, validateStartupProbe).
    for probe in ("livenessProbe", "startupProbe"):
        many = mapping(container.get(probe)).get("successThreshold")
        if isinstance(many, int) and many > 1:
            yield (probe, "successThreshold"), f"successThreshold {many} of a {probe}; wanted 1"
    # A failed readiness probe never kills the container, so there is no grace period.
    if mapping(container.get("readinessProbe")).get("terminationGracePeriodSeconds") is not None:
        yield (
            ("readinessProbe", "terminationGracePeriodSeconds"),
            "terminationGracePeriodSeconds of a readinessProbe; wanted in livenessProbe or startupProbe",
        )
    # The rules are exceptions from the container's own policy (KEP-5307).
    if container.get("restartPolicyRules") and not container.get("restartPolicy"):
        yield ("restartPolicyRules",), "restartPolicyRules without restartPolicy"


def privileges(container: Mapping[str, Any]) -> Mismatches:
    context = mapping(container.get("securityContext"))
    # It is always true for both of these (kubernetes.io/docs/tasks/configure-pod-container/security-context).
    if context.get("allowPrivilegeEscalation") is False:
        if context.get("privileged") is True:
            yield ("securityContext",), "allowPrivilegeEscalation false with privileged true"
        elif "CAP_SYS_ADMIN" in sequence(mapping(context.get("capabilities")).get("add")):
            yield ("securityContext",), "allowPrivilegeEscalation false with the capability CAP_SYS_ADMIN"
    if context.get("privileged") is not True:
        for index, mount in enumerate(sequence(container.get("volumeMounts"))):
            # Its mounts appear on the node, which only privileged containers may do.
            if mapping(mount).get("mountPropagation") == "Bidirectional":
                yield ("volumeMounts", index), "mountPropagation Bidirectional without privileged: true"


def device_paths(container: Mapping[str, Any]) -> Mismatches:
    mounted = {str(mapping(mount).get("mountPath")) for mount in sequence(container.get("volumeMounts"))}
    for index, device in enumerate(sequence(container.get("volumeDevices"))):
        if str(mapping(device).get("devicePath")) in mounted:
            yield ("volumeDevices", index), "a volume is mounted at the path of the device"


def image(container: Mapping[str, Any]) -> Mismatches:
    image = container.get("image")
    if isinstance(image, str) and image.strip() != image:
        yield ("image",), f"found {short(image)}, wanted it without spaces around it"


def resources(container: Mapping[str, Any]) -> Mismatches:
    resources = mapping(container.get("resources"))
    yield from _huge_pages(resources)
    for side in ("requests", "limits"):
        for name in mapping(resources.get(side)):
            if not resource_name(name) and not is_placeholder(name):
                yield ("resources", side, name), f"{short(name)} is no resource; {FORMATS['resource'].wanted}"


def _huge_pages(resources: Mapping[str, Any]) -> Mismatches:
    limits, requests = mapping(resources.get("limits")), mapping(resources.get("requests"))
    # Huge pages are allocated in advance and can't be overcommitted
    # (kubernetes.io/docs/tasks/manage-hugepages).
    huge = [name for name in {**limits, **requests} if name.startswith("hugepages-")]
    for name in huge:
        if name not in limits:
            yield ("resources", "requests", name), f"{name} in requests, and not in limits"
        elif name in requests and quantity(requests[name]) != quantity(limits[name]):
            yield (
                ("resources", "requests", name),
                f"{name}: request {requests[name]}, limit {limits[name]}; equal",
            )
    if huge and not {"cpu", "memory"} & {**limits, **requests}.keys():
        yield ("resources",), f"{huge[0]} without cpu or memory"


def host_ports(pod: Mapping[str, Any]) -> Mismatches:
    seen: set[tuple[str, str, str]] = set()
    for index, container in enumerate(sequence(pod.get("containers"))):
        for number, port in enumerate(sequence(mapping(container).get("ports"))):
            mapped_port = mapping(port)
            # On the host network each container port is a port of the node.
            outer = mapped_port.get("hostPort") or (
                mapped_port.get("containerPort") if pod.get("hostNetwork") is True else None
            )
            # Ports of different protocols or addresses do not conflict.
            key = (
                str(mapped_port.get("protocol") or "TCP"),
                str(mapped_port.get("hostIP") or ""),
                str(outer),
            )
            if outer and key in seen:
                yield ("containers", index, "ports", number), f"a second hostPort {outer} of {key[0]}"
            seen.add(key)


def network(pod: Mapping[str, Any]) -> Mismatches:
    if pod.get("dnsPolicy") == "None" and not mapping(pod.get("dnsConfig")).get("nameservers"):
        yield ("dnsPolicy",), "dnsPolicy None without nameservers in dnsConfig"
    # Both are the PID namespace of the containers: of the node, or of the pod.
    if pod.get("hostPID") is True and pod.get("shareProcessNamespace") is True:
        yield ("shareProcessNamespace",), "shareProcessNamespace with hostPID"
    for index, container in enumerate(
        sequence(pod.get("containers")) if pod.get("hostNetwork") is True else ()
    ):
        for number, port in enumerate(sequence(mapping(container).get("ports"))):
            inner, outer = mapping(port).get("containerPort"), mapping(port).get("hostPort")
            if outer and outer != inner:
                path = ("containers", index, "ports", number)
                yield path, f"hostPort {outer} with hostNetwork and containerPort {inner}; wanted equal"


def init_containers(pod: Mapping[str, Any]) -> Mismatches:
    for index, container in enumerate(sequence(pod.get("initContainers"))):
        # Only a sidecar runs long enough for probes and hooks (KEP-753).
        if mapping(container).get("restartPolicy") != "Always":
            for key in ("lifecycle", "livenessProbe", "readinessProbe", "startupProbe"):
                if mapping(container).get(key):
                    yield ("initContainers", index, key), f"{key} of an init container that runs once"


def _each_container(pod: Mapping[str, Any]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for key in ("initContainers", "containers"):
        for index, container in enumerate(sequence(pod.get(key))):
            yield (key, index), mapping(container)


def claims(pod: Mapping[str, Any]) -> Mismatches:
    claims = [mapping(entry).get("name") for entry in sequence(pod.get("resourceClaims"))]
    for where, container in _each_container(pod):
        for index, entry in enumerate(sequence(mapping(container.get("resources")).get("claims"))):
            if (name := mapping(entry).get("name")) not in claims:
                yield (
                    (*where, "resources", "claims", index),
                    f"claim {name} is not in the pod's resourceClaims",
                )


def block_volumes(pod: Mapping[str, Any]) -> Mismatches:
    volumes = {str(mapping(entry).get("name")): mapping(entry) for entry in sequence(pod.get("volumes"))}
    for where, container in _each_container(pod):
        for index, device in enumerate(sequence(container.get("volumeDevices"))):
            name = str(mapping(device).get("name"))
            # Only claims have volumeMode Block.
            kinds = volumes.get(name, {}).keys() & {"persistentVolumeClaim", "ephemeral"}
            if not kinds and not is_placeholder(name):
                text = f"volumeDevices names {name}, and the pod has no claim of that name"
                yield (*where, "volumeDevices", index), text


def bare_pod(manifest: Mapping[str, Any]) -> Mismatches:
    """Checks of a Pod object only: in a template an admission plugin may add the service account."""
    pod = mapping(manifest.get("spec"))
    if pod.get("ephemeralContainers"):
        yield ("spec", "ephemeralContainers"), "ephemeralContainers of a new pod; `kubectl debug` adds them"
    if pod.get("serviceAccountName") or pod.get("serviceAccount"):
        return
    for index, volume in enumerate(sequence(pod.get("volumes"))):
        for part in sequence(mapping(mapping(volume).get("projected")).get("sources")):
            if mapping(part).get("serviceAccountToken"):
                yield (
                    ("spec", "volumes", index),
                    "a serviceAccountToken, and the pod has no serviceAccountName",
                )


def projected(source_list: Mapping[str, Any]) -> Mismatches:
    seen: set[str] = set()
    for index, part in enumerate(sequence(source_list.get("sources"))):
        for kind, source in mapping(part).items():
            for path in [str(mapping(item).get("path")) for item in sequence(mapping(source).get("items"))]:
                if path in seen:
                    yield ("sources", index, kind), f"two sources write to {path}"
                seen.add(path)


def resource_field(selector: Mapping[str, Any]) -> Mismatches:
    divisor, resource = selector.get("divisor"), str(selector.get("resource", ""))
    # All of these mean 1.
    if divisor is None or divisor in ("", "0"):
        return
    # CPU has millicores; bytes have no smaller part.
    if resource.endswith(".cpu"):
        if str(divisor) not in ("1", "1m"):
            yield ("divisor",), f"divisor {divisor} of {resource}; wanted 1 or 1m"
    elif str(divisor) == "1m":
        yield ("divisor",), f"divisor {divisor} of {resource}; wanted 1, 1k, 1Mi or another power"


def _selector_filled(spec: Mapping[str, Any]) -> Mismatches:
    selector = spec.get("selector")
    # An empty selector would select every pod of the namespace.
    if isinstance(selector, Mapping) and not any(
        selector.get(key) for key in ("matchLabels", "matchExpressions")
    ):
        yield ("selector",), "the selector is empty; wanted matchLabels or matchExpressions"


def kept_pods(spec: Mapping[str, Any]) -> Mismatches:
    """Checks of controllers that keep their pods running."""
    yield from _selector_filled(spec)
    # The controller would replace each pod that ends at its deadline.
    if mapping(mapping(spec.get("template")).get("spec")).get("activeDeadlineSeconds") is not None:
        yield (
            ("template", "spec", "activeDeadlineSeconds"),
            "activeDeadlineSeconds of pods that are kept running",
        )


def deployment(spec: Mapping[str, Any]) -> Mismatches:
    yield from kept_pods(spec)
    strategy = mapping(spec.get("strategy"))
    rolling = mapping(strategy.get("rollingUpdate"))
    if strategy.get("type") == "Recreate" and strategy.get("rollingUpdate") is not None:
        yield ("strategy", "rollingUpdate"), "rollingUpdate with type Recreate"
    # The defaults of a Deployment are 25 % each.
    if _is_zero(rolling.get("maxSurge", 1)) and _is_zero(rolling.get("maxUnavailable", 1)):
        yield (
            ("strategy", "rollingUpdate"),
            "maxSurge and maxUnavailable are both 0; no pod could be replaced",
        )
    # Defaults of apps/v1 (pkg/apis/apps/v1/defaults.go)
    ready, deadline = spec.get("minReadySeconds", 0), spec.get("progressDeadlineSeconds", 600)
    if isinstance(ready, int) and isinstance(deadline, int) and deadline <= ready:
        yield (
            ("progressDeadlineSeconds" if "progressDeadlineSeconds" in spec else "minReadySeconds",),
            f"progressDeadlineSeconds {deadline}, minReadySeconds {ready}; wanted more than that",
        )


def daemon_set(spec: Mapping[str, Any]) -> Mismatches:
    yield from kept_pods(spec)
    rolling = mapping(mapping(spec.get("updateStrategy")).get("rollingUpdate"))
    # The defaults of a DaemonSet; with a surge the old pod stays until the new one is ready.
    surge, missing = rolling.get("maxSurge", 0), rolling.get("maxUnavailable", 1)
    path = ("updateStrategy", "rollingUpdate")
    if _is_zero(surge) and _is_zero(missing):
        yield path, "maxSurge and maxUnavailable are both 0; no pod could be replaced"
    if not _is_zero(surge) and not _is_zero(missing):
        yield path, "maxSurge and maxUnavailable are both more than 0; wanted one of them 0"


def stateful(spec: Mapping[str, Any]) -> Mismatches:
    yield from kept_pods(spec)
    update = mapping(spec.get("updateStrategy"))
    if update.get("type") == "OnDelete" and update.get("rollingUpdate") is not None:
        yield ("updateStrategy", "rollingUpdate"), "rollingUpdate with type OnDelete"


def _is_zero(value: Any) -> bool:
    return value in (0, "0%")


def indexes(spec: Mapping[str, Any]) -> Mismatches:
    completions, failed = spec.get("completions"), spec.get("maxFailedIndexes")
    parallel = spec.get("parallelism")
    # validateJobSpec; there are only as many indexes as completions.
    if isinstance(failed, int) and isinstance(completions, int) and failed > completions:
        yield ("maxFailedIndexes",), f"maxFailedIndexes {failed} above completions {completions}"
    # maxParallelismForIndexedJob
    if spec.get("completionMode") == "Indexed" and isinstance(parallel, int) and parallel > 100_000:
        yield ("parallelism",), f"parallelism {parallel} of an Indexed Job; at most 100000"
    # The policy names indexes, which only an Indexed Job has (KEP-3998).
    if spec.get("successPolicy") and spec.get("completionMode") != "Indexed":
        yield ("successPolicy",), "successPolicy without completionMode Indexed"


def job_selector(spec: Mapping[str, Any]) -> Mismatches:
    if spec.get("manualSelector") is True:
        if spec.get("selector") is None:
            yield ("manualSelector",), "manualSelector without selector"
        return
    if spec.get("selector"):
        # A label with the UID of the Job, which is unique.
        yield ("selector",), "selector without manualSelector: the Job controller makes it"
    # Both forms of the labels are set; the one with a domain exists since 1.27.
    for label in mapping(mapping(mapping(spec.get("template")).get("metadata")).get("labels")):
        if label.removeprefix("batch.kubernetes.io/") in ("job-name", "controller-uid"):
            yield ("template", "metadata", "labels", label), f"label {label}: the Job controller sets it"


def failure_policy(spec: Mapping[str, Any]) -> Mismatches:
    policy = spec.get("podFailurePolicy")
    # The exit code must be known before a replacement is created (KEP-3939).
    if policy and spec.get("podReplacementPolicy") == "TerminatingOrFailed":
        yield ("podReplacementPolicy",), "TerminatingOrFailed with podFailurePolicy; wanted Failed"
    # FailIndex ends the retries of one index, which are counted only with this field (KEP-3850).
    if spec.get("backoffLimitPerIndex") is None:
        for index, policy_entry in enumerate(sequence(mapping(policy).get("rules"))):
            if mapping(policy_entry).get("action") == "FailIndex":
                path = ("podFailurePolicy", "rules", index, "action")
                yield path, "action FailIndex without backoffLimitPerIndex"


def success_policy(spec: Mapping[str, Any]) -> Mismatches:
    completions = spec.get("completions")
    for index, policy_entry in enumerate(sequence(mapping(spec.get("successPolicy")).get("rules"))):
        many, text = (
            mapping(policy_entry).get("succeededCount"),
            mapping(policy_entry).get("succeededIndexes"),
        )
        path = ("successPolicy", "rules", index)
        if isinstance(many, int) and isinstance(completions, int) and many > completions:
            yield path, f"succeededCount {many} above completions {completions}"
        if not isinstance(text, str) or not FORMATS["indexes"].holds(text):
            continue
        numbers = _numbers(text)
        if isinstance(completions, int) and numbers and numbers[-1][1] >= completions:
            yield (
                path,
                f"succeededIndexes {text}; with completions {completions} the last is {completions - 1}",
            )
        if isinstance(many, int) and many > sum(last - first + 1 for first, last in numbers):
            yield path, f"succeededCount {many}, and succeededIndexes {short(text)} are fewer"


def _numbers(text: str) -> list[tuple[int, int]]:
    parts = [part.partition("-") for part in text.split(",")] if text else []
    return [(int(first), int(last or first)) for first, _, last in parts]


def exit_codes(requirement: Mapping[str, Any]) -> Mismatches:
    values = [value for value in sequence(requirement.get("values")) if isinstance(value, int)]
    # validatePodFailurePolicyRuleOnExitCodes requires ascending values.
    if values != sorted(set(values)):
        yield ("values",), f"values {values}; wanted rising and each once"


def job_template(template: Mapping[str, Any]) -> Mismatches:
    spec = mapping(template.get("spec"))
    if spec.get("manualSelector") is True:
        # With the same selector each Job would take the pods of the earlier ones.
        yield ("spec", "manualSelector"), "manualSelector in a CronJob's jobTemplate"


_LOCAL_ADDRESS = re.compile(r"127\.|0\.0\.0\.0$|169\.254\.|224\.0\.0\.|::1?$|fe80:|ff02:", re.IGNORECASE)


def service(spec: Mapping[str, Any]) -> Mismatches:
    kind, headless = spec.get("type") or "ClusterIP", spec.get("clusterIP") == "None"
    # An ExternalName is a CNAME record of the cluster DNS: it has neither address nor ports of its own.
    if kind == "ExternalName":
        if not spec.get("externalName"):
            yield ("type",), "type ExternalName without externalName"
        for key in ("clusterIP", "ipFamilies", "ipFamilyPolicy"):
            if spec.get(key):
                yield (key,), f"{key} with type ExternalName"
    elif not sequence(spec.get("ports")) and not headless:
        yield (), f"no ports of a Service of type {kind}"
    # These types need an address to forward to.
    if headless and kind in ("NodePort", "LoadBalancer"):
        yield ("clusterIP",), f"clusterIP None with type {kind}; wanted ClusterIP"
    # clusterIP is the first of clusterIPs (k8s.io/api/core/v1, ServiceSpec).
    if spec.get("clusterIPs") and not spec.get("clusterIP"):
        yield ("clusterIPs",), "clusterIPs without clusterIP"


def external_traffic(spec: Mapping[str, Any]) -> Mismatches:
    kind, outside = spec.get("type") or "ClusterIP", spec.get("externalTrafficPolicy")
    if kind != "LoadBalancer":
        for key in ("loadBalancerClass", "loadBalancerSourceRanges", "allocateLoadBalancerNodePorts"):
            if spec.get(key) not in (None, []):
                yield (key,), f"{key} with type {kind}; wanted LoadBalancer"
    if outside and kind not in ("NodePort", "LoadBalancer") and not spec.get("externalIPs"):
        yield ("externalTrafficPolicy",), f"externalTrafficPolicy with type {kind}"
    # Load balancers probe this port to find nodes with local pods.
    if spec.get("healthCheckNodePort") and (kind != "LoadBalancer" or outside != "Local"):
        text = "healthCheckNodePort without type LoadBalancer and externalTrafficPolicy Local"
        yield ("healthCheckNodePort",), text
    for index, text in enumerate(sequence(spec.get("externalIPs"))):
        # Traffic to these addresses never leaves a machine (ValidateNonSpecialIP).
        if isinstance(text, str) and _LOCAL_ADDRESS.match(text):
            yield ("externalIPs", index), f"{text} is a loopback, link-local or unspecified address"


def service_ports(spec: Mapping[str, Any]) -> Mismatches:
    kind, ports = spec.get("type") or "ClusterIP", sequence(spec.get("ports"))
    seen: set[tuple[str, str, str]] = set()
    for index, port in enumerate(ports):
        for key in ("port", "nodePort"):
            number = (key, str(mapping(port).get(key)), str(mapping(port).get("protocol") or "TCP"))
            if mapping(port).get(key) and number in seen:
                yield ("ports", index, key), f"a second {key} {number[1]} of {number[2]}"
            seen.add(number)
        # DNS SRV records and Ingresses refer to a port by its name.
        if len(ports) > 1 and not mapping(port).get("name"):
            yield ("ports", index), "a port without a name among several"
        if mapping(port).get("nodePort") and kind == "ClusterIP":
            yield ("ports", index, "nodePort"), f"nodePort with type {kind}; wanted NodePort or LoadBalancer"


def claim(spec: Mapping[str, Any]) -> Mismatches:
    if not mapping(mapping(spec.get("resources")).get("requests")).get("storage"):
        yield ("resources",), "no size in resources.requests.storage"
    modes = sequence(spec.get("accessModes"))
    # The mode excludes all other pods, so no other mode can hold at the same time (KEP-2485).
    if "ReadWriteOncePod" in modes and len(modes) > 1:
        yield ("accessModes",), "ReadWriteOncePod with other access modes"


# Also of drivers that were removed: the API still has their fields.
VOLUMES = (
    *(
        "awsElasticBlockStore",
        "azureDisk",
        "azureFile",
        "cephfs",
        "cinder",
        "csi",
        "fc",
        "flexVolume",
        "flocker",
    ),
    *("gcePersistentDisk", "glusterfs", "hostPath", "iscsi", "local", "nfs", "photonPersistentDisk"),
    *("portworxVolume", "quobyte", "rbd", "scaleIO", "storageos", "vsphereVolume"),
)


def volume(spec: Mapping[str, Any]) -> Mismatches:
    if mapping(spec.get("capacity")).keys() ^ {"storage"}:
        yield ("capacity",), "wanted the key storage, and no other"
    if not any(spec.get(key) is not None for key in VOLUMES):
        yield (), "no volume: csi, nfs, local or another source"
    # The scheduler must know the node of a local disk.
    if spec.get("local") and not mapping(spec.get("nodeAffinity")).get("required"):
        yield ("local",), "a local volume without nodeAffinity"


def scaler(spec: Mapping[str, Any]) -> Mismatches:
    least, most = spec.get("minReplicas", 1), spec.get("maxReplicas")
    if isinstance(least, int) and isinstance(most, int) and 0 < most < least:
        yield ("maxReplicas",), f"maxReplicas {most} below minReplicas {least}"
    # Without pods there are no metrics of pods (feature gate HPAScaleToZero).
    if least == 0 and not any(
        mapping(entry).get("type") in ("Object", "External") for entry in sequence(spec.get("metrics"))
    ):
        yield ("minReplicas",), "minReplicas 0 without a metric of type Object or External"


def scale_target(reference: Mapping[str, Any]) -> Mismatches:
    # In the core group, whose apiVersion has no slash, only a ReplicationController can be scaled.
    if reference.get("kind") != "ReplicationController" and "/" not in str(reference.get("apiVersion", "")):
        yield (
            (),
            f"apiVersion {reference.get('apiVersion', 'left out')} without a group; wanted apps/v1 or "
            "another",
        )


_SOURCES = {
    "Resource": "resource",
    "Pods": "pods",
    "Object": "object",
    "External": "external",
    "ContainerResource": "containerResource",
}


def metric(entry: Mapping[str, Any]) -> Mismatches:
    source = _SOURCES.get(str(entry.get("type")))
    if source and not entry.get(source):
        yield (), f"type {entry.get('type')} without {source}"
    for key in _SOURCES.values():
        if source and key != source and entry.get(key) is not None:
            yield (key,), f"{key} with type {entry.get('type')}; wanted {source} alone"


def target(*allowed: str, most: int = 1) -> Check:
    def check(source: Mapping[str, Any]) -> Mismatches:
        target = mapping(source.get("target"))
        given = [
            key for key in ("averageUtilization", "averageValue", "value") if target.get(key) is not None
        ]
        if target and not 1 <= len([key for key in given if key in allowed]) <= most:
            yield (
                ("target",),
                f"found {' and '.join(given) or 'no value'}, wanted one of {' and '.join(allowed)}",
            )

    return check


def limits(limit_range: Mapping[str, Any]) -> Mismatches:
    kind = limit_range.get("type")
    if kind in ("Pod", "PersistentVolumeClaim"):
        for key in ("default", "defaultRequest"):
            if kind == "Pod" and limit_range.get(key):
                yield (key,), f"{key} with type Pod; wanted Container"
    if kind == "PersistentVolumeClaim" and not (
        mapping(limit_range.get("min")).get("storage") or mapping(limit_range.get("max")).get("storage")
    ):
        yield (), "type PersistentVolumeClaim without storage in min or max"
    # Each must be at most the next one.
    order = ("min", "defaultRequest", "default", "max")
    for name in {name for key in order for name in mapping(limit_range.get(key))}:
        amounts = [(key, quantity(mapping(limit_range.get(key)).get(name))) for key in order]
        known = [(key, amount) for key, amount in amounts if amount is not None]
        for (low, first), (high, second) in itertools.pairwise(known):
            if first > second:
                yield (
                    (low, name),
                    f"{name}: {low} {mapping(limit_range[low])[name]} above {high} "
                    f"{mapping(limit_range[high])[name]}",
                )
        ratio = quantity(mapping(limit_range.get("maxLimitRequestRatio")).get(name))
        least, most = dict(known).get("min"), dict(known).get("max")
        if ratio is not None and least and most and ratio > most / least:
            yield ("maxLimitRequestRatio", name), f"{name}: the ratio is above that of max and min"


def policy_rule(entry: Mapping[str, Any]) -> Mismatches:
    paths = entry.get("nonResourceURLs")
    if paths and any(entry.get(key) for key in ("apiGroups", "resources", "resourceNames")):
        yield ("nonResourceURLs",), "nonResourceURLs with apiGroups, resources or resourceNames"
    elif not paths:
        for key in ("apiGroups", "resources"):
            if not entry.get(key):
                yield (), f"{key} is missing or empty"


def role(role: Mapping[str, Any]) -> Mismatches:
    for index, entry in enumerate(sequence(role.get("rules"))):
        if mapping(entry).get("nonResourceURLs"):
            # URLs such as /metrics have no namespace, and a Role has one.
            yield ("rules", index, "nonResourceURLs"), "nonResourceURLs in a Role; wanted a ClusterRole"


def subject(entry: Mapping[str, Any]) -> Mismatches:
    kind, group, name = entry.get("kind"), entry.get("apiGroup"), entry.get("name")
    # Service accounts are objects of the core group, which has no name.
    if kind == "ServiceAccount" and group:
        yield ("apiGroup",), f"apiGroup {group} of a ServiceAccount; wanted none"
    if (
        kind == "ServiceAccount"
        and name
        and not is_placeholder(name)
        and not FORMATS["subdomain"].holds(name)
    ):
        yield ("name",), f"{short(name)} is no name of a ServiceAccount"
    if kind in ("User", "Group") and group and group != "rbac.authorization.k8s.io":
        yield ("apiGroup",), f"apiGroup {group} of a {kind}; wanted rbac.authorization.k8s.io"


def role_of(*kinds: str) -> Check:
    def check(binding: Mapping[str, Any]) -> Mismatches:
        role = mapping(binding.get("roleRef"))
        if role and role.get("kind") is not None and role["kind"] not in kinds:
            yield ("roleRef", "kind"), f"found {short(role['kind'])}, wanted {' or '.join(kinds)}"

    return check


def cluster_binding(binding: Mapping[str, Any]) -> Mismatches:
    yield from role_of("ClusterRole")(binding)
    for index, entry in enumerate(sequence(binding.get("subjects"))):
        if mapping(entry).get("kind") == "ServiceAccount" and not mapping(entry).get("namespace"):
            yield ("subjects", index), "a ServiceAccount without its namespace"


def peer(entry: Mapping[str, Any]) -> Mismatches:
    selectors = [key for key in ("podSelector", "namespaceSelector") if entry.get(key) is not None]
    # A peer is either a range of addresses or a selection of pods.
    if entry.get("ipBlock") is not None and selectors:
        yield ("ipBlock",), f"ipBlock with {selectors[0]}"


def policy_port(entry: Mapping[str, Any]) -> Mismatches:
    port, end = entry.get("port"), entry.get("endPort")
    if end is None:
        return
    # A named port may have another number in each pod.
    if not isinstance(port, int):
        yield (
            ("endPort",),
            f"endPort with port {short(port) if port is not None else 'left out'}; wanted a number",
        )
    elif isinstance(end, int) and end < port:
        yield ("endPort",), f"endPort {end} below port {port}"


def address_range(block: Mapping[str, Any]) -> Mismatches:
    try:
        whole = ipaddress.ip_network(str(block.get("cidr")), strict=False)
        for index, text in enumerate(sequence(block.get("except"))):
            part = ipaddress.ip_network(str(text), strict=False)
            # except only removes addresses from the range.
            if part.version != whole.version or not part.subnet_of(whole) or part == whole:  # type: ignore[arg-type]
                yield ("except", index), f"{part} is not within {whole}"
    except ValueError:
        return


def ingress_path(entry: Mapping[str, Any]) -> Mismatches:
    path, kind = entry.get("path"), entry.get("pathType")
    # The path is compared literally, so it must be absolute and normalised.
    if kind in ("Exact", "Prefix"):
        if not isinstance(path, str) or not path.startswith("/"):
            yield (), f"path {short(path)} with pathType {kind}; wanted a path that begins with /"
        elif any(part in path for part in ("//", "/./", "/../", "%2f", "%2F")) or path.endswith(
            ("/..", "/.")
        ):
            yield ("path",), f"path {short(path)}; wanted without //, /./, /../ and %2f"


def backend(entry: Mapping[str, Any]) -> Mismatches:
    resource = entry.get("resource")
    for key in ("kind", "name") if isinstance(resource, Mapping) else ():
        if not mapping(resource).get(key):
            yield ("resource",), f"{key} is missing"


def ingress(spec: Mapping[str, Any]) -> Mismatches:
    if not spec.get("rules") and not spec.get("defaultBackend"):
        yield (), "neither rules nor defaultBackend"


def webhook_client(config: Mapping[str, Any]) -> Mismatches:
    service = mapping(config.get("service"))
    port = service.get("port")
    if isinstance(port, int) and not 1 <= port <= 65535:
        yield ("service", "port"), f"port {port}; wanted 1 to 65535"


def claim_request(request: Mapping[str, Any]) -> Mismatches:
    # All takes every matching device, so there is nothing to count.
    if request.get("allocationMode") == "All" and request.get("count"):
        yield ("count",), "count with allocationMode All"


def device_claim(device_spec: Mapping[str, Any]) -> Mismatches:
    names = {str(mapping(part).get("name")) for part in sequence(device_spec.get("requests"))}
    for key in ("constraints", "config"):
        for index, part in enumerate(sequence(device_spec.get(key))):
            for number, name in enumerate(sequence(mapping(part).get("requests"))):
                # REQUEST/SUBREQUEST names one of its alternatives (KEP-4816).
                if isinstance(name, str) and name.partition("/")[0] not in names:
                    yield (key, index, "requests", number), f"{name}, and there is no such request"


def definition(manifest: Mapping[str, Any]) -> Mismatches:
    spec = mapping(manifest.get("spec"))
    if not spec:
        return
    name, versions = mapping(manifest.get("metadata")).get("name"), sequence(spec.get("versions"))
    expected = f"{mapping(spec.get('names')).get('plural')}.{spec.get('group')}"
    if name is not None and name != expected and not is_placeholder(name):
        yield (
            ("metadata", "name"),
            f"name {short(name)}; wanted {expected}, of spec.names.plural and spec.group",
        )
    for index, version in enumerate(versions):
        schema = mapping(mapping(mapping(version).get("schema")).get("openAPIV3Schema"))
        path = ("spec", "versions", index, "schema", "openAPIV3Schema")
        if schema and schema.get("type") != "object":
            yield path, f"type {short(schema.get('type'))} of the schema's root; wanted object"
        for below in _without_type(schema):
            yield (*path, *below), "a field without a type"
    # A field of apiextensions.k8s.io/v1beta1; v1 accepts only false.
    if spec.get("preserveUnknownFields") is True:
        text = "preserveUnknownFields; wanted x-kubernetes-preserve-unknown-fields in the schema"
        yield ("spec", "preserveUnknownFields"), text
    # etcd stores the objects of all versions in one of them.
    stored = sum(mapping(version).get("storage") is True for version in versions)
    if stored != 1:
        yield ("spec", "versions"), f"{stored} versions with storage true; wanted one"


def _without_type(schema: Mapping[str, Any]) -> Iterator[Path]:
    """Fields of a structural schema that lack their required type."""
    parts: list[tuple[Path, Any]] = [
        (("properties", name), field_schema)
        for name, field_schema in mapping(schema.get("properties")).items()
    ]
    parts += [
        ((key,), schema[key])
        for key in ("items", "additionalProperties")
        if isinstance(schema.get(key), Mapping)
    ]
    for path, field_schema in parts:
        if not isinstance(field_schema, Mapping):
            continue
        # Both replace the type (kubernetes.io/docs: specifying a structural schema).
        free = ("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields")
        if not field_schema.get("type") and not any(field_schema.get(key) for key in free):
            yield path
        for below in _without_type(field_schema):
            yield (*path, *below)


def claim_template(template: Mapping[str, Any]) -> Mismatches:
    for key in mapping(template.get("metadata")):
        # The controller chooses name and namespace of the claim.
        if key not in ("labels", "annotations"):
            yield (
                ("metadata", key),
                f"{key} in the metadata of a claim template; wanted labels and annotations",
            )


def node(spec: Mapping[str, Any]) -> Mismatches:
    ranges = [str(cidr) for cidr in sequence(spec.get("podCIDRs"))]
    # Dual stack: at most one range for IPv4 and one for IPv6.
    if len({":" in cidr for cidr in ranges}) < len(ranges):
        yield ("podCIDRs",), "two ranges of one IP family"


def quota(spec: Mapping[str, Any]) -> Mismatches:
    yield from _counted(mapping(spec.get("hard")))
    scopes = sequence(spec.get("scopes"))
    # Pods of that class have no requests that could be counted.
    if "BestEffort" in scopes:
        for name in mapping(spec.get("hard")):
            if name not in ("pods", "count/pods"):
                yield ("hard", name), f"{name} with the scope BestEffort; wanted pods"
    # BestEffort: pods without requests and limits; Terminating: pods with activeDeadlineSeconds
    if {"BestEffort", "NotBestEffort"} <= set(map(str, scopes)) or {"Terminating", "NotTerminating"} <= set(
        map(str, scopes)
    ):
        yield ("scopes",), "scopes that exclude each other"


def scope(selector: Mapping[str, Any]) -> Mismatches:
    yield from selector_requirement(selector)
    name, operator = selector.get("scopeName"), selector.get("operator")
    if name in ("BestEffort", "NotBestEffort", "Terminating", "NotTerminating") and operator not in (
        None,
        "Exists",
    ):
        yield ("operator",), f"operator {operator} of scope {name}; wanted Exists"


def endpoint_slice(manifest: Mapping[str, Any]) -> Mismatches:
    # The addresses of the type FQDN are host names.
    if manifest.get("addressType") in ("IPv4", "IPv6"):
        for index, endpoint in enumerate(sequence(manifest.get("endpoints"))):
            for number, address in enumerate(sequence(mapping(endpoint).get("addresses"))):
                if isinstance(address, str) and not FORMATS["ip"].holds(address):
                    path = ("endpoints", index, "addresses", number)
                    yield path, f"found {short(address)}, wanted {FORMATS['ip'].wanted}"


def scheduling(spec: Mapping[str, Any]) -> Mismatches:
    for index, toleration in enumerate(sequence(spec.get("tolerations"))):
        for text in toleration_errors(mapping(toleration)):
            yield ("tolerations", index), text


def toleration_errors(toleration: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions in a toleration.

    >>> list(toleration_errors({"key": "nvidia.com/gpu", "operator": "Exists"}))
    []
    >>> list(toleration_errors({"operator": "Exists", "value": "true"}))
    ['operator Exists with a value; wanted none, or Equal']
    """
    operator, effect = toleration.get("operator") or "Equal", toleration.get("effect")
    if operator == "Exists" and toleration.get("value"):
        yield "operator Exists with a value; wanted none, or Equal"
    if operator != "Exists" and not toleration.get("key"):
        yield f"operator {operator} without a key; wanted a key, or Exists"
    if effect and effect not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
        yield f"effect {effect}; wanted NoSchedule, PreferNoSchedule or NoExecute"
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        yield "tolerationSeconds without effect NoExecute"


_LARGEST = 1 << 20  # bytes of a ConfigMap's or a Secret's data
_SECRET_KEYS = {  # core/v1: SecretType
    "kubernetes.io/dockercfg": (".dockercfg",),
    "kubernetes.io/dockerconfigjson": (".dockerconfigjson",),
    "kubernetes.io/ssh-auth": ("ssh-privatekey",),
    "kubernetes.io/tls": ("tls.crt", "tls.key"),
}


def config_map(manifest: Mapping[str, Any]) -> Mismatches:
    for key in sorted(mapping(manifest.get("data")).keys() & mapping(manifest.get("binaryData")).keys()):
        yield ("data", key), f"{key} in data and in binaryData"
    size = sum(
        len(value.encode()) for value in mapping(manifest.get("data")).values() if isinstance(value, str)
    )
    if size > _LARGEST:
        yield ("data",), f"{size} bytes of data; at most {_LARGEST}"


def secret(manifest: Mapping[str, Any]) -> Mismatches:
    kind = str(manifest.get("type", ""))
    data, texts = mapping(manifest.get("data")), mapping(manifest.get("stringData"))
    for key in _SECRET_KEYS.get(kind, ()):
        if key not in data and key not in texts:
            yield (), f"type {kind} without the key {key}"
    # One of both is enough (k8s.io/api/core/v1, SecretTypeBasicAuth).
    if kind == "kubernetes.io/basic-auth" and not {"username", "password"} & {**data, **texts}.keys():
        yield (), f"type {kind} without the keys username and password"
    if kind == "kubernetes.io/service-account-token" and not mapping(
        mapping(manifest.get("metadata")).get("annotations")
    ).get("kubernetes.io/service-account.name"):
        yield ("type",), f"type {kind} without the annotation kubernetes.io/service-account.name"
    for key in (".dockercfg", ".dockerconfigjson"):
        text = texts.get(key)
        if (
            kind.endswith(key)
            and isinstance(text, str)
            and not is_placeholder(text)
            and not _is_json_object(text)
        ):
            yield ("stringData", key), f"{key} is no object in JSON"


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def priority(manifest: Mapping[str, Any]) -> Mismatches:
    value, name = manifest.get("value"), str(mapping(manifest.get("metadata")).get("name", ""))
    if name in ("system-cluster-critical", "system-node-critical"):
        return
    # Higher values are reserved for system priority classes (HighestUserDefinablePriority).
    if isinstance(value, int) and value > 1_000_000_000:
        yield ("value",), f"value {value}; at most 1000000000"
    if name.startswith("system-"):
        yield ("metadata", "name"), f"{name}: names with system- are Kubernetes' own"


def _counted(hard: Mapping[str, Any]) -> Mismatches:
    for name, value in hard.items():
        number = quantity(value)
        if (name in _COUNTED or name.startswith("count/")) and number is not None and number % 1:
            yield ("hard", name), f"{name}: {value}; wanted a whole number"


_COUNTED = (
    *("pods", "services", "replicationcontrollers", "resourcequotas", "secrets", "configmaps"),
    *("persistentvolumeclaims", "services.nodeports", "services.loadbalancers"),
)


def device_toleration(toleration: Mapping[str, Any]) -> Mismatches:
    if toleration.get("operator") == "Exists" and toleration.get("value"):
        yield ("value",), "operator Exists with a value; wanted none, or Equal"
