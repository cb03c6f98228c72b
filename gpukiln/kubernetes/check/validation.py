"""What the API server validates beyond its OpenAPI document, by definition and field.

A row of `FIELDS` is merged into the JSON Schema of its definition, so that one pass checks both. A field's
name may end in `!` (required and not empty) or `[]` (applies to each item). `@most` and `@some` are fields of
which at most or at least one is set, `@optional` fields that the schema requires and the API server does not,
`@any` fields that the API server does not validate, `@check` functions of `relations.py`.

Sources: the enumerations of Kubernetes' generated OpenAPI (pkg/generated/openapi) and pkg/apis/*/validation
of kubernetes/kubernetes, v1.36; tests/support/k8s_server has the answers of a kube-apiserver to objects with
one mistake.
"""

from __future__ import annotations

from typing import Any

from gpukiln.kubernetes.check import relations as c

Row = dict[str, Any]


def words(text: str) -> Row:
    """One of these words; an empty text is not allowed."""
    return {"words": tuple(text.split())}


def default(text: str) -> Row:
    """One of these words; an empty text means the default."""
    return {"words": ("", *text.split())}


def between(least: int, most: int | None = None) -> Row:
    return {"between": (least, most)}


def form(name: str) -> Row:
    """A format of `FORMATS`, also for an empty text."""
    return {"form": name}


def form_or_empty(name: str) -> Row:
    return {"form": name, "emptiable": True}


def keys(name: str) -> Row:
    """The format of a mapping's keys."""
    return {"keys": name}


def once(*fields: str) -> Row:
    """No two items have the same values in these fields; without fields, the items themselves."""
    return {"once": fields}


ANY: Row = {}
MODE = between(0, 511)  # 0777 in octal
# IsValidUserID and IsValidGroupID (apimachinery, pkg/util/validation)
ID = between(0, 2**31 - 1)
PORT = form("port")
# Most objects are named by an RFC 1123 subdomain; rules_server.py has the kinds with another form.
NAME = form("subdomain")
LABELS: Row = {"keys": "key", "form{}": "value"}
ACCESS = words("ReadOnlyMany ReadWriteMany ReadWriteOnce ReadWriteOncePod")
OPERATIONS = words("* CONNECT CREATE DELETE UPDATE")
PROFILE = words("Localhost RuntimeDefault Unconfined")
SCOPES = words(
    "BestEffort CrossNamespacePodAffinity NotBestEffort NotTerminating PriorityClass Terminating "
    "VolumeAttributesClass"
)
# Stop signals have names here, never numbers (KEP-4960).
SIGNALS = words(
    "SIGABRT SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGFPE SIGHUP SIGILL SIGINT SIGIO SIGIOT SIGKILL SIGPIPE "
    "SIGPOLL SIGPROF SIGPWR SIGQUIT SIGSEGV SIGSTKFLT SIGSTOP SIGSYS SIGTERM SIGTRAP SIGTSTP SIGTTIN SIGTTOU "
    "SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIGRTMIN SIGRTMAX "
    + " ".join(f"SIGRTMIN+{number}" for number in range(1, 16))
    + " "
    + " ".join(f"SIGRTMAX-{number}" for number in range(1, 15))
)


# A probe or hook has exactly one of these; @most and @some together say that.
_HANDLERS = ("exec", "httpGet", "tcpSocket", "grpc", "sleep")
_WEBHOOK: Row = {
    "admissionReviewVersions!": once(),
    "admissionReviewVersions[]": form("label1035"),
    "failurePolicy": words("Fail Ignore"),
    "matchPolicy": words("Equivalent Exact"),
    "name!": form("webhook-name"),
    "sideEffects": words("None NoneOnDryRun"),
    # The API server waits for the webhook within each request.
    "timeoutSeconds": between(1, 30),
    "clientConfig!": ANY,
}
_OPERATED: Row = {
    "apiGroups!": ANY,
    "apiVersions!": ANY,
    # Only apiGroups may be an empty text, which is the core group.
    "apiVersions[]": {"filled": True},
    "operations!": ANY,
    "operations[]": OPERATIONS,
    "resources!": ANY,
    "resources[]": {"filled": True},
    "scope": words("* Cluster Namespaced"),
}
_CONTAINER: Row = {
    "name!": ANY,
    "image!": ANY,
    "imagePullPolicy": default("Always IfNotPresent Never"),
    # Services and probes refer to a port by its name; one number may be there for TCP and for UDP.
    "ports": once("name"),
    "resizePolicy": once("resourceName"),
    "restartPolicy": words("Always Never OnFailure"),
    "terminationMessagePolicy": default("FallbackToLogsOnError File"),
    "volumeDevices": once("name"),
    "@check": (c.probes, c.privileges, c.device_paths, c.image, c.resources),
}
# definition below io.k8s.api -> field -> what it must be
FIELDS: dict[str, Row] = {
    # core: pods
    "core.v1.Pod": {"spec!": ANY, "@check": (c.bare_pod,)},
    "core.v1.PodTemplate": {"template!": ANY},
    "core.v1.PodTemplateSpec": {"spec!": ANY},
    "core.v1.PodSpec": {
        # 0 would end the pod at once.
        "activeDeadlineSeconds": between(1, 2**31 - 1),
        "containers!": ANY,
        "dnsPolicy": default("ClusterFirst ClusterFirstWithHostNet Default None"),
        "hostname": form_or_empty("label"),
        "nodeName": form_or_empty("subdomain"),
        "nodeSelector": LABELS,
        "overhead": {"form{}": "amount"},
        "preemptionPolicy": words("Never PreemptLowerPriority"),
        "priorityClassName": form_or_empty("subdomain"),
        "resourceClaims": once("name"),
        "restartPolicy": default("Always Never OnFailure"),
        "runtimeClassName": NAME,
        "schedulingGates": once("name"),
        "serviceAccountName": form_or_empty("subdomain"),
        "subdomain": form_or_empty("label"),
        # The API server accepts negative values, too.
        "terminationGracePeriodSeconds": ANY,
        "topologySpreadConstraints": once("topologyKey", "whenUnsatisfiable"),
        "@check": (c.network, c.host_ports, c.init_containers, c.claims, c.block_volumes),
    },
    "core.v1.Container": _CONTAINER,
    "core.v1.ContainerPort": {
        "containerPort!": PORT,
        # 0: no port on the node
        "hostPort": between(0, 65535),
        "name": form_or_empty("port-name"),
        "protocol": default("SCTP TCP UDP"),
    },
    "core.v1.ContainerResizePolicy": {
        # Of a running container only these can be changed (KEP-1287).
        "resourceName": words("cpu memory"),
        "restartPolicy": words("NotRequired RestartContainer"),
    },
    "core.v1.EnvVar": {"name!": form("env-name"), "@check": (c.env,)},
    "core.v1.EnvVarSource": {
        "@most": ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"),
        "@some": ("fieldRef", "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "fileKeyRef"),
    },
    "core.v1.EnvFromSource": {
        "prefix": form_or_empty("env-name"),
        "@most": ("configMapRef", "secretRef"),
        "@some": ("configMapRef", "secretRef"),
    },
    "core.v1.ConfigMapEnvSource": {"name!": NAME},
    "core.v1.SecretEnvSource": {"name!": NAME},
    "core.v1.ConfigMapKeySelector": {"name!": NAME, "key!": form("config-key")},
    "core.v1.SecretKeySelector": {"name!": NAME, "key!": form("config-key")},
    "core.v1.ObjectFieldSelector": {"fieldPath!": form("field-path"), "apiVersion": default("v1")},
    "core.v1.ResourceFieldSelector": {
        "resource!": form("resource-field"),
        "divisor": form("divisor"),
        "@check": (c.resource_field,),
    },
    "core.v1.Probe": {
        # SetDefaults_Probe replaces 0 with the default of the field.
        "failureThreshold": between(0),
        "initialDelaySeconds": between(0),
        "periodSeconds": between(0),
        "successThreshold": between(0),
        "timeoutSeconds": between(0),
        "terminationGracePeriodSeconds": between(1),
        "@most": _HANDLERS,
        "@some": _HANDLERS,
    },
    "core.v1.Lifecycle": {"stopSignal": SIGNALS},
    "core.v1.LifecycleHandler": {"@most": _HANDLERS, "@some": _HANDLERS},
    "core.v1.SleepAction": {"seconds": between(0)},
    "core.v1.ExecAction": {"command!": ANY},
    "core.v1.HTTPGetAction": {"port!": PORT, "scheme": default("HTTP HTTPS")},
    # The schema requires a value, the API server accepts an empty header.
    "core.v1.HTTPHeader": {"name!": form("header"), "@optional": ("value",)},
    "core.v1.TCPSocketAction": {"port!": PORT},
    "core.v1.GRPCAction": {"port!": PORT},
    "core.v1.VolumeMount": {
        "name!": ANY,
        "mountPath!": ANY,
        "mountPropagation": words("Bidirectional HostToContainer None"),
        "recursiveReadOnly": words("Disabled Enabled IfPossible"),
        # Relative and without .., so that the path stays within the volume
        "subPath": form("relative"),
        "@most": ("subPath", "subPathExpr"),
        "@check": (c.mount,),
    },
    "core.v1.VolumeDevice": {"name!": ANY, "devicePath!": form("no-steps")},
    "core.v1.ResourceRequirements": {"claims": once("name", "request")},
    "core.v1.ResourceClaim": {"name!": ANY, "request": form_or_empty("label")},
    "core.v1.PodResourceClaim": {
        "name!": form("label"),
        "resourceClaimName": NAME,
        "resourceClaimTemplateName": NAME,
        "@most": ("resourceClaimName", "resourceClaimTemplateName"),
        "@some": ("resourceClaimName", "resourceClaimTemplateName"),
    },
    "core.v1.PodSchedulingGate": {"name!": form("key")},
    "core.v1.PodReadinessGate": {"conditionType!": form("key")},
    "core.v1.PodOS": {"name": words("linux windows")},
    "core.v1.HostAlias": {"ip": form("ip"), "hostnames[]": NAME},
    "core.v1.PodDNSConfig": {
        # resolv.conf(5): MAXNS is 3.
        "nameservers": {"maxItems": 3},
        "nameservers[]": form("ip"),
        # MaxDNSSearchPaths.
        "searches": {"maxItems": 32},
        "searches[]": form("host"),
    },
    "core.v1.PodDNSConfigOption": {"name!": ANY},
    "core.v1.PodSecurityContext": {
        "fsGroup": ID,
        "fsGroupChangePolicy": words("Always OnRootMismatch"),
        "runAsGroup": ID,
        "runAsUser": ID,
        "supplementalGroups[]": ID,
        "seLinuxChangePolicy": words("MountOption Recursive"),
        "supplementalGroupsPolicy": words("Merge Strict"),
        "sysctls": once("name"),
    },
    "core.v1.SecurityContext": {
        "procMount": words("Default Unmasked"),
        "runAsGroup": ID,
        "runAsUser": ID,
    },
    # As HTTPHeader: an empty value is accepted.
    "core.v1.Sysctl": {"name!": form("sysctl"), "@optional": ("value",)},
    # Without a preference the term has no effect (k8s.io/api/core/v1, PreferredSchedulingTerm).
    "core.v1.PreferredSchedulingTerm": {"@optional": ("preference",)},
    "core.v1.SeccompProfile": {"type": PROFILE, "localhostProfile": form("relative"), "@check": (c.profile,)},
    "core.v1.AppArmorProfile": {"type": PROFILE, "@check": (c.profile,)},
    "core.v1.Toleration": {
        "key": form_or_empty("key"),
        # Gt and Lt compare numbers in the values of taints (KEP-5471).
        "operator": default("Equal Exists Gt Lt"),
        "value": form("value"),
    },
    "core.v1.TopologySpreadConstraint": {
        "maxSkew": between(1),
        "minDomains": between(1),
        "nodeAffinityPolicy": words("Honor Ignore"),
        "nodeTaintsPolicy": words("Honor Ignore"),
        "topologyKey!": ANY,
        "whenUnsatisfiable": words("DoNotSchedule ScheduleAnyway"),
        "matchLabelKeys[]": form("key"),
        "@check": (c.spread,),
    },
    "core.v1.NodeSelector": {"nodeSelectorTerms!": ANY},
    "core.v1.NodeSelectorTerm": {"@check": (c.node_term,)},
    "core.v1.NodeSelectorRequirement": {
        "key!": form("key"),
        "operator": words("DoesNotExist Exists Gt In Lt NotIn"),
    },
    "core.v1.PodAffinityTerm": {"namespaces[]": form("label"), "topologyKey!": form("key")},
    # Weights are added up to the score of a node.
    "core.v1.WeightedPodAffinityTerm": {"weight": between(1, 100)},
    # core: volumes
    "core.v1.Volume": {
        "@most": (
            # Only a PersistentVolume has a local disk, and nodeAffinity with the node of that disk.
            *(source for source in c.VOLUMES if source != "local"),
            *("configMap", "downwardAPI", "emptyDir", "ephemeral", "gitRepo", "image"),
            *("persistentVolumeClaim", "projected", "secret"),
        )
    },
    "core.v1.ConfigMapVolumeSource": {"name!": ANY, "defaultMode": MODE},
    "core.v1.SecretVolumeSource": {"secretName!": ANY, "defaultMode": MODE},
    "core.v1.ProjectedVolumeSource": {"defaultMode": MODE, "@check": (c.projected,)},
    "core.v1.DownwardAPIVolumeSource": {"defaultMode": MODE},
    "core.v1.KeyToPath": {"key!": ANY, "path!": form("relative"), "mode": MODE},
    "core.v1.DownwardAPIVolumeFile": {
        "path!": form("relative"),
        "mode": MODE,
        "@most": ("fieldRef", "resourceFieldRef"),
        "@some": ("fieldRef", "resourceFieldRef"),
    },
    "core.v1.VolumeProjection": {
        "@most": ("secret", "downwardAPI", "configMap", "serviceAccountToken", "clusterTrustBundle"),
    },
    "core.v1.ConfigMapProjection": {"name!": ANY, "items": once("path")},
    "core.v1.SecretProjection": {"name!": ANY, "items": once("path")},
    "core.v1.DownwardAPIProjection": {"items": once("path")},
    # Tokens live for at least 10 minutes.
    "core.v1.ServiceAccountTokenProjection": {
        "expirationSeconds": between(600, 2**32),
        "path!": form("relative"),
    },
    "core.v1.EmptyDirVolumeSource": {"sizeLimit": form("amount")},
    "core.v1.EphemeralVolumeSource": {"volumeClaimTemplate!": ANY},
    "core.v1.PersistentVolumeClaimTemplate": {"spec!": ANY, "@check": (c.claim_template,)},
    "core.v1.PersistentVolumeClaimVolumeSource": {"claimName!": ANY},
    "core.v1.HostPathVolumeSource": {
        "path!": form("no-steps"),
        # The kubelet checks the type before it mounts; with an empty one it checks nothing.
        "type": default("BlockDevice CharDevice Directory DirectoryOrCreate File FileOrCreate Socket"),
    },
    "core.v1.NFSVolumeSource": {"path!": form("absolute"), "server!": ANY},
    "core.v1.LocalVolumeSource": {"path!": form("no-steps")},
    "core.v1.CSIVolumeSource": {"driver!": form("driver")},
    "core.v1.CSIPersistentVolumeSource": {"driver!": form("driver"), "volumeHandle!": ANY},
    "core.v1.ImageVolumeSource": {"reference!": ANY, "pullPolicy": default("Always IfNotPresent Never")},
    "core.v1.AWSElasticBlockStoreVolumeSource": {"volumeID!": ANY},
    "core.v1.CephFSVolumeSource": {"monitors!": ANY},
    "core.v1.ISCSIVolumeSource": {"iqn!": form("iqn"), "targetPortal!": ANY},
    "core.v1.GitRepoVolumeSource": {"repository!": ANY, "directory": form("relative")},
    "core.v1.AzureDiskVolumeSource": {
        "cachingMode": words("None ReadOnly ReadWrite"),
        "kind": words("Dedicated Managed Shared"),
    },
    "core.v1.PersistentVolumeClaim": {"spec!": ANY},
    "core.v1.PersistentVolumeClaimSpec": {
        "accessModes!": ANY,
        "accessModes[]": ACCESS,
        "storageClassName": form_or_empty("subdomain"),
        "volumeAttributesClassName": form_or_empty("subdomain"),
        "volumeMode": words("Block Filesystem"),
        "@check": (c.claim,),
    },
    "core.v1.VolumeResourceRequirements": {
        "requests": {"form{}": "positive"},
        "limits": {"form{}": "quantity"},
    },
    "core.v1.PersistentVolume": {"spec!": ANY},
    "core.v1.PersistentVolumeSpec": {
        "accessModes!": ANY,
        "accessModes[]": ACCESS,
        "capacity!": {"form{}": "positive"},
        "persistentVolumeReclaimPolicy": default("Delete Recycle Retain"),
        "storageClassName": form_or_empty("subdomain"),
        "volumeMode": words("Block Filesystem"),
        "@most": c.VOLUMES,
        "@check": (c.volume,),
    },
    "core.v1.VolumeNodeAffinity": {"required!": ANY},
    **{
        f"core.v1.{name}": {"name": {"filled": True}, "@optional": ("kind", "name")}
        for name in ("TypedLocalObjectReference", "TypedObjectReference")
    },
    # core: the rest
    "core.v1.ConfigMap": {
        "data": keys("config-key"),
        "binaryData": keys("config-key"),
        "@check": (c.config_map,),
    },
    "core.v1.Secret": {"data": keys("config-key"), "stringData": keys("config-key"), "@check": (c.secret,)},
    "core.v1.NamespaceSpec": {"finalizers[]": form("qualified")},
    "core.v1.Service": {"spec!": ANY},
    "core.v1.ServiceSpec": {
        # None: a headless Service, whose DNS name has the addresses of its pods
        "clusterIP": {"form": "ip", "emptiable": True, "also": ("None",)},
        "clusterIPs[]": {"form": "ip", "also": ("None",)},
        "externalIPs[]": form("ip"),
        "externalName": form_or_empty("external-name"),
        "externalTrafficPolicy": default("Cluster Local"),
        "healthCheckNodePort": between(0, 65535),
        "internalTrafficPolicy": words("Cluster Local"),
        "ipFamilies": once(),
        "ipFamilies[]": words("IPv4 IPv6"),
        "ipFamilyPolicy": words("PreferDualStack RequireDualStack SingleStack"),
        "loadBalancerClass": form("key"),
        "loadBalancerSourceRanges[]": form("cidr"),
        "ports": once("name"),
        "selector": LABELS,
        "sessionAffinity": default("ClientIP None"),
        "trafficDistribution": words("PreferClose PreferSameZone PreferSameNode"),
        "type": default("ClusterIP ExternalName LoadBalancer NodePort"),
        "@check": (c.service, c.external_traffic, c.service_ports),
    },
    "core.v1.ServicePort": {
        "appProtocol": form("key"),
        "name": form_or_empty("label"),
        # 0: the API server chooses a port
        "nodePort": between(0, 65535),
        "port!": PORT,
        "protocol": default("SCTP TCP UDP"),
        # Empty and 0 mean the value of port (SetDefaults_Service).
        "targetPort": {"form": "port", "emptiable": True, "also": (0,)},
    },
    # At most a day.
    "core.v1.ClientIPConfig": {"timeoutSeconds": between(1, 86400)},
    "core.v1.EndpointAddress": {"ip!": form("ip")},
    "core.v1.EndpointPort": {
        "name": form_or_empty("label"),
        "port!": PORT,
        "protocol": default("SCTP TCP UDP"),
    },
    "core.v1.EndpointSubset": {"@some": ("addresses", "notReadyAddresses")},
    "core.v1.NodeSpec": {
        "podCIDR": form_or_empty("cidr"),
        # Key and effect identify a taint (k8s.io/api/core/v1, Taint.MatchTaint).
        "taints": once("key", "effect"),
        "@check": (c.node,),
    },
    "core.v1.Taint": {
        "key!": form("key"),
        "value": form("value"),
        "effect": words("NoExecute NoSchedule PreferNoSchedule"),
    },
    "core.v1.ReplicationController": {"spec!": ANY},
    "core.v1.ReplicationControllerSpec": {
        "minReadySeconds": between(0),
        "replicas": between(0),
        "selector": LABELS,
        "template!": ANY,
    },
    "core.v1.ResourceQuotaSpec": {
        "hard": {"keys": "resource", "form{}": "amount"},
        "scopes[]": SCOPES,
        "@check": (c.quota,),
    },
    "core.v1.ScopedResourceSelectorRequirement": {
        "scopeName": SCOPES,
        "operator": words("DoesNotExist Exists In NotIn"),
        "@check": (c.scope,),
    },
    "core.v1.LimitRangeSpec": {"limits": once("type"), "@optional": ("limits",)},
    "core.v1.LimitRangeItem": {
        "type": {"words": ("Container", "Pod", "PersistentVolumeClaim"), "qualified": True},
        "maxLimitRequestRatio": {"keys": "resource", "form{}": "ratio"},
        **{
            key: {"keys": "resource", "form{}": "quantity"}
            for key in ("min", "max", "default", "defaultRequest")
        },
        "@check": (c.limits,),
    },
    # API group apps: Deployments, StatefulSets, DaemonSets, ReplicaSets
    "apps.v1.Deployment": {"spec!": ANY},
    "apps.v1.DeploymentSpec": {
        "minReadySeconds": between(0),
        "progressDeadlineSeconds": between(0),
        "replicas": between(0),
        "revisionHistoryLimit": between(0),
        "@check": (c.deployment,),
    },
    "apps.v1.DeploymentStrategy": {"type": default("Recreate RollingUpdate")},
    "apps.v1.RollingUpdateDeployment": {"maxSurge": form("share"), "maxUnavailable": form("share100")},
    "apps.v1.StatefulSet": {"spec!": ANY},
    "apps.v1.StatefulSetSpec": {
        "minReadySeconds": between(0),
        "podManagementPolicy": default("OrderedReady Parallel"),
        "replicas": between(0),
        "serviceName": form_or_empty("label"),
        "@check": (c.stateful,),
    },
    "apps.v1.StatefulSetUpdateStrategy": {"type": default("OnDelete RollingUpdate")},
    "apps.v1.RollingUpdateStatefulSetStrategy": {"partition": between(0), "maxUnavailable": form("share100")},
    "apps.v1.StatefulSetOrdinals": {"start": between(0)},
    "apps.v1.StatefulSetPersistentVolumeClaimRetentionPolicy": {
        "whenDeleted": default("Delete Retain"),
        "whenScaled": default("Delete Retain"),
    },
    "apps.v1.DaemonSet": {"spec!": ANY},
    "apps.v1.DaemonSetSpec": {
        "minReadySeconds": between(0),
        "revisionHistoryLimit": between(0),
        "@check": (c.daemon_set,),
    },
    "apps.v1.DaemonSetUpdateStrategy": {"type": default("OnDelete RollingUpdate")},
    "apps.v1.RollingUpdateDaemonSet": {"maxSurge": form("share100"), "maxUnavailable": form("share100")},
    "apps.v1.ReplicaSet": {"spec!": ANY},
    "apps.v1.ReplicaSetSpec": {
        "minReadySeconds": between(0),
        "replicas": between(0),
        "@check": (c.kept_pods,),
    },
    # API group batch: Jobs and CronJobs
    "batch.v1.Job": {"spec!": ANY},
    "batch.v1.JobSpec": {
        "completionMode": words("Indexed NonIndexed"),
        # The controller with this name manages the Job instead of Kubernetes' own (KEP-4368).
        "managedBy": form("domain-path"),
        "podReplacementPolicy": words("Failed TerminatingOrFailed"),
        "@check": (c.indexes, c.job_selector, c.failure_policy, c.success_policy),
    },
    # maxPodFailurePolicyRules; for the exit codes of a rule maxPodFailurePolicyOnExitCodesValues.
    "batch.v1.PodFailurePolicy": {"rules": {"maxItems": 20}, "@optional": ("rules",)},
    "batch.v1.PodFailurePolicyRule": {
        "action": words("Count FailIndex FailJob Ignore"),
        "@most": ("onExitCodes", "onPodConditions"),
        "@some": ("onExitCodes", "onPodConditions"),
    },
    "batch.v1.PodFailurePolicyOnExitCodesRequirement": {
        "operator": words("In NotIn"),
        "values!": {"maxItems": 255},
        "@check": (c.exit_codes,),
    },
    "batch.v1.PodFailurePolicyOnPodConditionsPattern": {
        "status": default("False True Unknown"),
        "type!": form("key"),
    },
    "batch.v1.SuccessPolicy": {"rules!": ANY},
    "batch.v1.SuccessPolicyRule": {
        "succeededCount": between(0),
        "succeededIndexes": form("indexes"),
        "@some": ("succeededCount", "succeededIndexes"),
    },
    "batch.v1.CronJob": {"spec!": ANY},
    "batch.v1.CronJobSpec": {
        "concurrencyPolicy": default("Allow Forbid Replace"),
        "failedJobsHistoryLimit": between(0),
        "startingDeadlineSeconds": between(0),
        "successfulJobsHistoryLimit": between(0),
        "jobTemplate!": ANY,
    },
    "batch.v1.JobTemplateSpec": {"spec!": ANY, "@check": (c.job_template,)},
    # API group autoscaling: HorizontalPodAutoscalers
    "autoscaling.v2.HorizontalPodAutoscalerSpec": {
        "maxReplicas": between(1),
        "minReplicas": between(0),
        "@check": (c.scaler,),
    },
    "autoscaling.v1.HorizontalPodAutoscalerSpec": {
        "maxReplicas": between(1),
        "minReplicas": between(0),
        "targetCPUUtilizationPercentage": between(1),
        "@check": (c.scaler,),
    },
    **{
        f"autoscaling.{version}.CrossVersionObjectReference": {
            "kind!": form("segment"),
            "name!": form("segment"),
            "@check": (c.scale_target,),
        }
        for version in ("v1", "v2")
    },
    "autoscaling.v2.HPAScalingRules": {
        "policies": {"filled": True},
        # KEP-4951
        "tolerance": form("amount"),
        "selectPolicy": words("Disabled Max Min"),
        # At most an hour; the period of a policy at most half an hour.
        "stabilizationWindowSeconds": between(0, 3600),
    },
    "autoscaling.v2.HPAScalingPolicy": {
        "periodSeconds": between(1, 1800),
        "type": words("Percent Pods"),
        "value": between(1),
    },
    "autoscaling.v2.MetricSpec": {
        "type": words("ContainerResource External Object Pods Resource"),
        "@check": (c.metric,),
    },
    "autoscaling.v2.MetricIdentifier": {"name!": form("segment"), "@any": ("selector",)},
    "autoscaling.v2.MetricTarget": {
        "type": words("AverageValue Utilization Value"),
        "averageUtilization": between(1),
        "averageValue": form("positive"),
        "value": form("positive"),
    },
    "autoscaling.v2.ResourceMetricSource": {
        "name!": ANY,
        "@check": (c.target("averageUtilization", "averageValue"),),
    },
    "autoscaling.v2.ContainerResourceMetricSource": {
        "container!": form("label"),
        "name!": form("resource"),
        "@check": (c.target("averageUtilization", "averageValue"),),
    },
    "autoscaling.v2.PodsMetricSource": {"@check": (c.target("averageValue"),)},
    # The API server accepts a value together with averageValue only here.
    "autoscaling.v2.ObjectMetricSource": {"@check": (c.target("value", "averageValue", most=2),)},
    "autoscaling.v2.ExternalMetricSource": {"@check": (c.target("value", "averageValue"),)},
    # policy, networking
    "policy.v1.PodDisruptionBudgetSpec": {
        "maxUnavailable": form("share100"),
        "minAvailable": form("share100"),
        "unhealthyPodEvictionPolicy": words("AlwaysAllow IfHealthyBudget"),
        "@most": ("minAvailable", "maxUnavailable"),
    },
    # ValidateNetworkPolicySpec accepts at most two entries.
    "networking.v1.NetworkPolicySpec": {
        "policyTypes[]": words("Egress Ingress"),
        "policyTypes": {"maxItems": 2},
    },
    "networking.v1.NetworkPolicyPeer": {
        "@some": ("podSelector", "namespaceSelector", "ipBlock"),
        "@check": (c.peer,),
    },
    "networking.v1.NetworkPolicyPort": {
        "endPort": between(1, 65535),
        "port": PORT,
        "protocol": words("SCTP TCP UDP"),
        "@check": (c.policy_port,),
    },
    "networking.v1.IPBlock": {"cidr!": form("cidr"), "except[]": form("cidr"), "@check": (c.address_range,)},
    "networking.v1.Ingress": {"spec!": ANY},
    "networking.v1.IngressSpec": {"ingressClassName": NAME, "@check": (c.ingress,)},
    "networking.v1.IngressBackend": {
        "@most": ("resource", "service"),
        "@some": ("resource", "service"),
        "@check": (c.backend,),
    },
    "networking.v1.IngressServiceBackend": {"name!": form("label"), "port!": ANY},
    "networking.v1.ServiceBackendPort": {
        "name": form_or_empty("port-name"),
        "number": between(0, 65535),
        "@most": ("name", "number"),
        "@some": ("name", "number"),
    },
    "networking.v1.HTTPIngressRuleValue": {"paths!": ANY},
    "networking.v1.HTTPIngressPath": {
        "pathType": words("Exact ImplementationSpecific Prefix"),
        "@check": (c.ingress_path,),
    },
    "networking.v1.IngressRule": {"host": form_or_empty("host-name")},
    "networking.v1.IngressTLS": {"hosts[]": form("host"), "secretName": form_or_empty("subdomain")},
    "networking.v1.IngressClass": {"spec!": ANY},
    "networking.v1.IngressClassSpec": {"controller!": form("domain-path")},
    "networking.v1.IngressClassParametersReference": {
        "apiGroup": NAME,
        "name!": form("segment"),
        "scope": words("Cluster Namespace"),
    },
    # API group rbac: roles and bindings
    "rbac.v1.Role": {"@check": (c.role,)},
    "rbac.v1.PolicyRule": {"verbs!": ANY, "@check": (c.policy_rule,)},
    "rbac.v1.AggregationRule": {"clusterRoleSelectors!": ANY},
    "rbac.v1.RoleRef": {"apiGroup": default("rbac.authorization.k8s.io"), "name!": form("segment")},
    "rbac.v1.Subject": {"kind": words("Group ServiceAccount User"), "name!": ANY, "@check": (c.subject,)},
    "rbac.v1.RoleBinding": {"@check": (c.role_of("Role", "ClusterRole"),)},
    "rbac.v1.ClusterRoleBinding": {"@check": (c.cluster_binding,)},
    # scheduling, storage, node, resource, coordination, discovery
    "scheduling.v1.PriorityClass": {
        "preemptionPolicy": words("Never PreemptLowerPriority"),
        "@check": (c.priority,),
    },
    "storage.v1.StorageClass": {
        "allowedTopologies": once(),
        "parameters": keys("filled"),
        "provisioner!": form("key"),
        "reclaimPolicy": default("Delete Retain"),
        "volumeBindingMode": words("Immediate WaitForFirstConsumer"),
    },
    "core.v1.TopologySelectorTerm": {"matchLabelExpressions!": once("key")},
    "core.v1.TopologySelectorLabelRequirement": {"key!": form("key"), "values!": once()},
    "storage.v1.CSIDriver": {"@optional": ("spec",)},
    "storage.v1.CSIDriverSpec": {
        "fsGroupPolicy": words("File None ReadWriteOnceWithFSType"),
        "tokenRequests": once("audience"),
        "volumeLifecycleModes[]": words("Ephemeral Persistent"),
    },
    "storage.v1.TokenRequest": {"expirationSeconds": between(600, 2**32), "@optional": ("audience",)},
    # The handler is the name of a runtime in the configuration of containerd or CRI-O.
    "node.v1.RuntimeClass": {"handler!": form("label")},
    "node.v1.Overhead": {"podFixed": {"keys": "resource", "form{}": "amount"}},
    "node.v1.Scheduling": {"nodeSelector": LABELS, "tolerations": once(), "@check": (c.scheduling,)},
    "resource.v1.DeviceClass": {"@optional": ("spec",)},
    "resource.v1.ResourceClaim": {"@optional": ("spec",)},
    "resource.v1.ResourceClaimTemplate": {"@optional": ("spec",)},
    "resource.v1.ResourceClaimTemplateSpec": {"@optional": ("spec",)},
    "resource.v1.DeviceSelector": {"cel!": ANY},
    "resource.v1.DeviceClaim": {"requests": once("name"), "@check": (c.device_claim,)},
    "resource.v1.DeviceRequest": {
        "name!": form("label"),
        "@most": ("exactly", "firstAvailable"),
        "@some": ("exactly", "firstAvailable"),
    },
    "resource.v1.ExactDeviceRequest": {
        "allocationMode": default("All ExactCount"),
        "count": between(0),
        "deviceClassName!": NAME,
        "@check": (c.claim_request,),
    },
    "resource.v1.DeviceSubRequest": {
        "name!": form("label"),
        "allocationMode": default("All ExactCount"),
        "count": between(0),
        "deviceClassName!": NAME,
        "@check": (c.claim_request,),
    },
    "resource.v1.DeviceConstraint": {
        "matchAttribute": form("attribute"),
        "requests": once(),
        "requests[]": form("request"),
        "@some": ("matchAttribute", "distinctAttribute"),
    },
    "resource.v1.DeviceClaimConfiguration": {
        "opaque!": ANY,
        "requests": once(),
        "requests[]": form("request"),
    },
    "resource.v1.OpaqueDeviceConfiguration": {"driver!": form("driver")},
    # The schema has no check of operator and value together.
    "resource.v1.DeviceToleration": {
        "@check": (c.device_toleration,),
        "operator": default("Equal Exists"),
        "effect": default("NoExecute NoSchedule None"),
    },
    "coordination.v1.LeaseSpec": {"leaseDurationSeconds": between(1), "leaseTransitions": between(0)},
    "discovery.v1.EndpointSlice": {
        "addressType": words("FQDN IPv4 IPv6"),
        "ports": once("name"),
        "@check": (c.endpoint_slice,),
    },
    "discovery.v1.Endpoint": {"addresses!": ANY, "nodeName": NAME},
    "discovery.v1.EndpointPort": {
        "name": form_or_empty("label"),
        "protocol": words("SCTP TCP UDP"),
    },
    # API group admissionregistration: webhooks and policies
    "admissionregistration.v1.ValidatingWebhook": _WEBHOOK,
    "admissionregistration.v1.MutatingWebhook": {**_WEBHOOK, "reinvocationPolicy": words("IfNeeded Never")},
    "admissionregistration.v1.ValidatingWebhookConfiguration": {"webhooks": once("name")},
    "admissionregistration.v1.MutatingWebhookConfiguration": {"webhooks": once("name")},
    "admissionregistration.v1.WebhookClientConfig": {
        "url": form("https"),
        "@most": ("url", "service"),
        "@some": ("url", "service"),
        "@check": (c.webhook_client,),
    },
    "admissionregistration.v1.ServiceReference": {
        "name!": ANY,
        "namespace!": ANY,
        "path": form_or_empty("absolute"),
    },
    "admissionregistration.v1.RuleWithOperations": _OPERATED,
    "admissionregistration.v1.NamedRuleWithOperations": _OPERATED,
    "admissionregistration.v1.MatchResources": {
        "matchPolicy": words("Equivalent Exact"),
        "resourceRules": {"filled": True},
    },
    "admissionregistration.v1.ValidatingAdmissionPolicy": {"spec!": ANY},
    "admissionregistration.v1.ValidatingAdmissionPolicySpec": {
        "failurePolicy": words("Fail Ignore"),
        "matchConstraints!": ANY,
        "@some": ("validations", "auditAnnotations"),
    },
    "admissionregistration.v1.Validation": {
        "expression!": ANY,
        "reason": words("Forbidden Invalid RequestEntityTooLarge Unauthorized"),
    },
    "admissionregistration.v1.Variable": {"name!": form("identifier"), "expression!": ANY},
    "admissionregistration.v1.ValidatingAdmissionPolicyBindingSpec": {
        "policyName!": NAME,
        "validationActions!": once(),
        "validationActions[]": words("Audit Deny Warn"),
    },
    # apiextensions, meta
    "CustomResourceDefinition": {"@check": (c.definition,)},
    "CustomResourceDefinitionSpec": {"group!": NAME, "scope": words("Cluster Namespaced"), "versions!": ANY},
    "CustomResourceDefinitionNames": {
        "categories[]": form("label1035"),
        "kind!": form("kind"),
        "listKind": {"form": "kind", "emptiable": True},
        "plural!": form("label1035"),
        "shortNames[]": form("label1035"),
        "singular": form_or_empty("label1035"),
    },
    "CustomResourceDefinitionVersion": {
        "name!": form("label1035"),
        "schema!": ANY,
        "@optional": ("served",),
    },
    "CustomResourceValidation": {"openAPIV3Schema!": ANY},
    "CustomResourceColumnDefinition": {
        "jsonPath!": form("json-path"),
        "name!": ANY,
        "type": words("boolean date integer number string"),
    },
    "LabelSelector": {"matchLabels": LABELS},
    "LabelSelectorRequirement": {
        "key!": form("key"),
        "operator": words("DoesNotExist Exists In NotIn"),
        "values[]": form("value"),
        "@check": (c.selector_requirement,),
    },
    "JSONSchemaProps": {"type": default("array boolean integer number object string")},
    # A finalizer without a domain is accepted only for three built-in ones.
    "ObjectMeta": {"finalizers[]": form("qualified")},
    # The garbage collector compares the uid: a later object of the same name is not the owner.
    "OwnerReference": {"apiVersion!": ANY, "kind!": ANY, "name!": ANY, "uid!": ANY},
}
