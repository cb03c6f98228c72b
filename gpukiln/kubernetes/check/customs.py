"""The forms of other people's kinds, as far as GPU clusters use them; JSON Schema, pods by Kubernetes' own.

A kind that is here is judged; one that is not is told as unchecked. Fields are those of the newest release
that was read.
"""

from __future__ import annotations

from typing import Any

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


def _open(*required: str, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": [*required]}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _object(spec: Schema) -> Schema:
    return _form("spec", apiVersion=TEXT, kind=TEXT, metadata=META, spec=spec, status=ANY)


# aws/karpenter-provider-aws:pkg/apis/crds/karpenter.sh_nodepools.yaml at v1.14.1
_TAINT = _form(
    "key",
    "effect",
    key=TEXT,
    value=TEXT,
    timeAdded=TEXT,
    effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
)
_NODE_POOL = _form(
    "template",
    limits={"type": "object"},
    weight=NUMBER,
    replicas=NUMBER,
    disruption=_form(
        consolidationPolicy={"enum": ["WhenEmpty", "WhenEmptyOrUnderutilized", "Balanced"]},
        consolidateAfter=TEXT,
        budgets=_list(
            _form(
                "nodes",
                nodes=TEXT,
                reasons=_list({"enum": ["Underutilized", "Empty", "Drifted"]}),
                schedule=TEXT,
                duration=TEXT,
            )
        ),
    ),
    template=_form(
        "spec",
        metadata=_form(labels=TEXTS, annotations=TEXTS),
        spec=_form(
            "nodeClassRef",
            "requirements",
            requirements=_list(
                _form(
                    "key",
                    "operator",
                    key=TEXT,
                    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt", "Gte", "Lte"]},
                    values=_list(TEXT),
                    minValues=NUMBER,
                )
            ),
            taints=_list(_TAINT),
            startupTaints=_list(_TAINT),
            nodeClassRef=_form("group", "kind", "name", group=TEXT, kind=TEXT, name=TEXT),
            expireAfter=TEXT,
            terminationGracePeriod=TEXT,
        ),
    ),
)
# the same, karpenter.k8s.aws_ec2nodeclasses.yaml
_TERM = {"tags": TEXTS, "id": TEXT}
_NODE_CLASS = _form(
    "amiSelectorTerms",
    "subnetSelectorTerms",
    "securityGroupSelectorTerms",
    amiFamily={
        "enum": ["AL2", "AL2023", "Bottlerocket", "Custom", "Windows2019", "Windows2022", "Windows2025"]
    },
    amiSelectorTerms=_list(_form(alias=TEXT, name=TEXT, owner=TEXT, ssmParameter=TEXT, **_TERM)),
    subnetSelectorTerms=_list(_form(**_TERM)),
    securityGroupSelectorTerms=_list(_form(name=TEXT, **_TERM)),
    capacityReservationSelectorTerms=_list(_form(ownerID=TEXT, instanceMatchCriteria=TEXT, **_TERM)),
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
                volumeSize=TEXT,
                volumeType={"enum": ["standard", "io1", "io2", "gp2", "sc1", "st1", "gp3"]},
            ),
        )
    ),
    context=TEXT,
    detailedMonitoring=FLAG,
    instanceProfile=TEXT,
    role=TEXT,
    instanceStorePolicy={"enum": ["RAID0"]},
    ipPrefixCount=NUMBER,
    kubelet={"type": "object"},
    metadataOptions=_form(
        httpEndpoint={"enum": ["enabled", "disabled"]},
        httpProtocolIPv6={"enum": ["enabled", "disabled"]},
        httpPutResponseHopLimit=NUMBER,
        httpTokens={"enum": ["required", "optional"]},
    ),
    tags=TEXTS,
    userData=TEXT,
)
# kubernetes-sigs/kueue:config/components/crd/bases at v0.19.2
_FLAVOR = _form(
    nodeLabels=TEXTS,
    nodeTaints=_list(_TAINT),
    tolerations=_list({"$ref": "#/$defs/io.k8s.api.core.v1.Toleration"}),
    topologyName=TEXT,
)
_QUOTA = _form("name", name=TEXT, nominalQuota=ANY, borrowingLimit=ANY, lendingLimit=ANY)
_GROUPS = _list(
    _form(
        "coveredResources",
        "flavors",
        coveredResources=_list(TEXT),
        flavors=_list(_form("name", "resources", name=TEXT, resources=_list(_QUOTA))),
    )
)
_CLUSTER_QUEUE = _form(
    resourceGroups=_GROUPS,
    cohort=TEXT,
    cohortName=TEXT,
    queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]},
    namespaceSelector={"type": ["object", "null"]},
    flavorFungibility={"type": "object"},
    preemption={"type": "object"},
    admissionChecks=_list(TEXT),
    admissionChecksStrategy={"type": "object"},
    stopPolicy={"enum": ["None", "Hold", "HoldAndDrain"]},
    fairSharing={"type": "object"},
    admissionScope={"type": "object"},
    concurrentAdmissionPolicy={"type": "object"},
)
_LOCAL_QUEUE = _form(
    clusterQueue=TEXT,
    stopPolicy=TEXT,
    fairSharing={"type": "object"},
    concurrentAdmission=ANY,
)
_COHORT = _form(parent=TEXT, parentName=TEXT, resourceGroups=_GROUPS, fairSharing={"type": "object"})
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
        restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    ),
}


def _kubeflow(replicas: str) -> Schema:
    return _object(_open(replicas, **{replicas: _REPLICAS}))


_QUEUES = ("kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2")
# (apiVersion, kind) -> its form
FORMS: dict[tuple[str, str], Schema] = {
    ("karpenter.sh/v1", "NodePool"): _object(_NODE_POOL),
    ("karpenter.k8s.aws/v1", "EC2NodeClass"): _object(_NODE_CLASS),
    **{(api, "ResourceFlavor"): _object(_FLAVOR) | {"required": []} for api in _QUEUES},
    **{(api, "ClusterQueue"): _object(_CLUSTER_QUEUE) for api in _QUEUES},
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
