"""JSON Schemas of other projects' kinds that GPU clusters use; pods in them refer to Kubernetes' schemas.

They are used if no CustomResourceDefinition is given. A kind that is missing here is reported as unchecked.
Fields and values are those of the named release.
"""

from __future__ import annotations

from typing import Any

from gpukiln.kubernetes.check import custom_relations as r

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
ANY: Schema = {}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
POD: Schema = {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
META: Schema = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}


def _form(*required: str, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": [*required], "additionalProperties": False}


# For kinds with long CRDs, of which only the fields that rules read are listed: others are accepted.
def _open(*required: str, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": [*required]}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _object(spec: Schema) -> Schema:
    return _form("spec", apiVersion=TEXT, kind=TEXT, metadata=META, spec=spec, status=ANY)


def _words(*texts: str) -> Schema:
    return {"type": "string", "words": texts}


def _of(form: str) -> Schema:
    return {"type": "string", "form": form}


def _like(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def _between(least: int, most: int) -> Schema:
    return {"type": "integer", "between": (least, most)}


def _some_of(of: Schema) -> Schema:
    return {**_list(of), "minItems": 1}


# aws/karpenter-provider-aws:pkg/apis/crds/karpenter.sh_nodepools.yaml at v1.14.1
_TAINT = _form(
    "key",
    "effect",
    key=_of("key"),
    value=_of("key"),
    timeAdded=_of("time"),
    effect=_words("NoSchedule", "PreferNoSchedule", "NoExecute"),
)
_NODE_POOL = _form(
    "template",
    limits={"type": "object", "values": "quantity"},
    weight=_between(1, 100),
    replicas={"type": "integer", "minimum": 0},
    disruption=_form(
        consolidationPolicy={"enum": ["WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"]},
        consolidateAfter=_of("duration-or-never"),
        budgets=_list(
            _form(
                nodes=_of("budget"),
                reasons=_list({"enum": ["Underutilized", "Empty", "Drifted"]}),
                schedule=_like(
                    # The pattern of the CRD as it is, which accepts more than cron does
                    r"^@(annually|yearly|monthly|weekly|daily|midnight|hourly)|.+\s.+\s.+\s.+\s.+$"
                ),
                duration=_of("budget-duration"),
            )
            | {"check": (r.budget,)}
        ),
    ),
    template=_form(
        "spec",
        metadata=_form(labels=TEXTS | {"check": (r.pool_labels,), "values": "value"}, annotations=TEXTS),
        spec=_form(
            "nodeClassRef",
            "requirements",
            requirements=_list(
                _form(
                    "key",
                    "operator",
                    key=_of("key"),
                    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte"]},
                    values=_list(TEXT),
                    minValues=_between(1, 50),
                )
                | {"check": (r.requirement,)}
            ),
            taints=_list(_TAINT),
            startupTaints=_list(_TAINT),
            nodeClassRef=_form(
                "group", "kind", "name", group=_like("^[^/]*$"), kind=_like("."), name=_like(".")
            ),
            expireAfter=_of("duration-or-never"),
            terminationGracePeriod=_of("duration"),
        ),
    ),
) | {"check": (r.node_pool,)}
# the same, karpenter.k8s.aws_ec2nodeclasses.yaml
_TERM = {"tags": TEXTS, "id": TEXT}
_NODE_CLASS = _form(
    "amiSelectorTerms",
    "subnetSelectorTerms",
    "securityGroupSelectorTerms",
    amiFamily={
        "enum": ["AL2", "AL2023", "Bottlerocket", "Custom", "Windows2019", "Windows2022", "Windows2025"]
    },
    amiSelectorTerms=_some_of(
        _form(alias=_of("ami-alias"), name=TEXT, owner=TEXT, ssmParameter=TEXT, **_TERM)
    ),
    subnetSelectorTerms=_list(_form(**_TERM | {"id": _like("subnet-[0-9a-z]+")})),
    securityGroupSelectorTerms=_list(_form(name=TEXT, **_TERM | {"id": _like("sg-[0-9a-z]+")})),
    capacityReservationSelectorTerms=_list(
        _form(
            ownerID=_like("^[0-9]{12}$"),
            instanceMatchCriteria=TEXT,
            **_TERM | {"id": _like("^cr-[0-9a-z]+$")},
        )
    ),
    associatePublicIPAddress=FLAG,
    blockDeviceMappings=_list(
        _form(
            deviceName=TEXT,
            rootVolume=FLAG,
            ebs=_form(
                deleteOnTermination=FLAG,
                encrypted=FLAG,
                iops=NUMBER,
                kmsKeyID=TEXT,
                snapshotID=TEXT,
                throughput=NUMBER,
                volumeInitializationRate=NUMBER,
                volumeSize=_of("volume-size"),
                volumeType={"enum": ["standard", "io1", "io2", "gp2", "sc1", "st1", "gp3"]},
            )
            | {"check": (r.volume,)},
        )
    ),
    context=TEXT,
    detailedMonitoring=FLAG,
    instanceProfile=TEXT,
    role=TEXT,
    instanceStorePolicy={"enum": ["RAID0"]},
    ipPrefixCount=NUMBER,
    # Its fields are not checked.
    kubelet={"type": "object"},
    metadataOptions=_form(
        httpEndpoint={"enum": ["enabled", "disabled"]},
        httpProtocolIPv6={"enum": ["enabled", "disabled"]},
        httpPutResponseHopLimit=_between(1, 64),
        httpTokens={"enum": ["required", "optional"]},
    ),
    tags=TEXTS,
    userData=TEXT,
) | {"check": (r.ami_terms, r.selector_terms)}
# kubernetes-sigs/kueue:config/components/crd/bases at v0.19.2
_FLAVOR = _form(
    nodeLabels=TEXTS,
    nodeTaints=_list(
        _form(
            "key",
            "effect",
            key=TEXT,
            value=TEXT,
            timeAdded=_of("time"),
            effect=_words("NoSchedule", "PreferNoSchedule", "NoExecute"),
        )
    ),
    tolerations=_list(
        _form(
            key=TEXT,
            operator=_words("", "Equal", "Exists"),
            value=TEXT,
            effect=_words("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
            tolerationSeconds=NUMBER,
        )
    ),
    topologyName=TEXT,
)
_AMOUNT: Schema = {"type": ["integer", "string"], "form": "amount"}
_QUOTA = _form(
    "name", "nominalQuota", name=TEXT, nominalQuota=_AMOUNT, borrowingLimit=_AMOUNT, lendingLimit=_AMOUNT
)
_GROUPS = _list(
    _form(
        "coveredResources",
        "flavors",
        coveredResources=_some_of(TEXT),
        flavors=_some_of(_form("name", "resources", name=_of("subdomain"), resources=_some_of(_QUOTA))),
    )
    | {"check": (r.covered,)}
)
_STOP = {"enum": ["None", "Hold", "HoldAndDrain"]}
_CLUSTER_QUEUE: dict[str, Schema] = dict(  # noqa: C408 - as the forms above
    resourceGroups=_GROUPS,
    queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]},
    # null selects no namespace, an empty selector all of them.
    namespaceSelector={"type": ["object", "null"]},
    flavorFungibility={"type": "object"},
    preemption=_form(
        reclaimWithinCohort=_words("Never", "LowerPriority", "Any"),
        withinClusterQueue=_words("Never", "LowerPriority", "LowerOrNewerEqualPriority"),
        borrowWithinCohort={"type": "object"},
    ),
    admissionChecksStrategy={"type": "object"},
    stopPolicy=_STOP,
    fairSharing={"type": "object"},
    admissionScope={"type": "object"},
)
# v1beta2 renamed the cohort and dropped the plain list of admission checks.
_CLUSTER_QUEUES: dict[str, Schema] = {
    "kueue.x-k8s.io/v1beta1": _form(**_CLUSTER_QUEUE, cohort=_of("subdomain"), admissionChecks=_list(TEXT))
    | {"check": (r.cohort_limits("cohort"),)},
    "kueue.x-k8s.io/v1beta2": _form(
        **_CLUSTER_QUEUE, cohortName=_of("subdomain"), concurrentAdmissionPolicy={"type": "object"}
    )
    | {"check": (r.cohort_limits("cohortName"),)},
}
_LOCAL_QUEUE = _form(clusterQueue=_of("subdomain"), stopPolicy=_STOP, fairSharing={"type": "object"})
_COHORT = _form(parentName=_of("subdomain"), resourceGroups=_GROUPS, fairSharing={"type": "object"})
# ray-project/kuberay:ray-operator/config/crd/bases at v1.7.0
_RAY = _open(
    "headGroupSpec",
    headGroupSpec=_open("template", template=POD, rayStartParams=TEXTS),
    workerGroupSpecs=_list(
        _open("groupName", "template", groupName=TEXT, template=POD, rayStartParams=TEXTS, replicas=NUMBER)
    ),
)
# kubeflow/trainer:manifests/base/crds, release-1.9
_REPLICAS: Schema = {
    "type": "object",
    "additionalProperties": _form(
        "template",
        replicas=NUMBER,
        template=POD,
        # ExitCode restarts only after exit codes from 128 on, which are those of signals.
        restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    ),
}


def _kubeflow(replicas: str) -> Schema:
    return _object(_open(replicas, **{replicas: _REPLICAS}))


_QUEUES = ("kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2")
# (apiVersion, kind) -> its form
SCHEMAS: dict[tuple[str, str], Schema] = {
    ("karpenter.sh/v1", "NodePool"): _object(_NODE_POOL),
    # CRDs that do not require spec have an empty list.
    ("karpenter.k8s.aws/v1", "EC2NodeClass"): _object(_NODE_CLASS) | {"required": []},
    **{(api, "ResourceFlavor"): _object(_FLAVOR) | {"required": []} for api in _QUEUES},
    **{(api, "ClusterQueue"): _object(_CLUSTER_QUEUES[api]) | {"required": []} for api in _QUEUES},
    **{(api, "LocalQueue"): _object(_LOCAL_QUEUE) | {"required": []} for api in _QUEUES},
    **{(api, "Cohort"): _object(_COHORT) | {"required": []} for api in _QUEUES},
    **{
        (api, "WorkloadPriorityClass"): _form(
            "value", apiVersion=TEXT, kind=TEXT, metadata=META, value=NUMBER, description=TEXT
        )
        for api in _QUEUES
    },
    ("ray.io/v1", "RayCluster"): _object(_RAY),
    ("ray.io/v1", "RayJob"): _object(_open(rayClusterSpec=_RAY, submitterPodTemplate=POD, entrypoint=TEXT)),
    ("ray.io/v1", "RayService"): _object(_open("rayClusterConfig", rayClusterConfig=_RAY)),
    ("kubeflow.org/v1", "PyTorchJob"): _kubeflow("pytorchReplicaSpecs"),
    ("kubeflow.org/v1", "TFJob"): _kubeflow("tfReplicaSpecs"),
    ("kubeflow.org/v1", "XGBoostJob"): _kubeflow("xgbReplicaSpecs"),
    ("kubeflow.org/v1", "PaddleJob"): _kubeflow("paddleReplicaSpecs"),
    ("kubeflow.org/v1", "JAXJob"): _kubeflow("jaxReplicaSpecs"),
    ("kubeflow.org/v1", "MPIJob"): _kubeflow("mpiReplicaSpecs"),
    ("kubeflow.org/v2beta1", "MPIJob"): _kubeflow("mpiReplicaSpecs"),
    # kubernetes-sigs/jobset:config/components/crd/bases at v0.12.0
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _object(
        _open(
            replicatedJobs=_list(
                _open(
                    "name",
                    "template",
                    name=TEXT,
                    replicas=NUMBER,
                    template={"$ref": "#/$defs/io.k8s.api.batch.v1.JobTemplateSpec"},
                )
            )
        )
    ),
    # actions/actions-runner-controller:charts/gha-runner-scale-set-controller/crds at 0.14.2
    ("actions.github.com/v1alpha1", "AutoscalingRunnerSet"): _object(
        _open(template=POD, maxRunners=NUMBER, minRunners=NUMBER)
    ),
}

# Group -> the release from which its schemas were taken.
SCHEMA_RELEASES = {
    "karpenter.sh": "Karpenter v1.14.1",
    "karpenter.k8s.aws": "Karpenter v1.14.1",
    "kueue.x-k8s.io": "Kueue v0.19.2",
    "ray.io": "KubeRay v1.7.0",
    "kubeflow.org": "Kubeflow Trainer 1.9",
    "jobset.x-k8s.io": "JobSet v0.12.0",
    "actions.github.com": "Actions Runner Controller 0.14.2",
}
