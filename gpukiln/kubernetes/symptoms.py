"""What device plugins, schedulers, kubelets and programs say when a GPU does not work, and what is behind it.

The first pattern that matches counts. The words are those of k8s-device-plugin (cmd/nvidia-device-plugin,
cmd/config-manager, internal/rm, internal/plugin), kube-scheduler (pkg/scheduler/framework/plugins), kubelet
(pkg/kubelet/lifecycle, pkg/kubelet/cm/devicemanager) and containerd, admission (plugin/pkg/admission),
libnvidia-container, CUDA, PyTorch and NCCL.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Reasons of a waiting container that time alone does not mend (kubernetes/kubernetes:pkg/kubelet/images,
# pkg/kubelet/container, pkg/kubelet/kuberuntime).
STUCK_REASONS = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
    "SignatureValidationFailed",
)


class Symptom(NamedTuple):
    """A pattern in what something says.

    Args:
        rule: What the finding is called.
    """

    pattern: str
    rule: str
    cause: str
    fix: str


def symptom_in(text: str, table: tuple[Symptom, ...]) -> tuple[Symptom, str] | None:
    """The first symptom of a text that is known, and the last line that shows it."""
    for symptom in table:
        lines = [line for line in text.splitlines() if re.search(symptom.pattern, line)]
        if lines:
            return symptom, lines[-1]
    return None


DRIVER_TOO_OLD = Symptom(
    r"(?i)CUDA driver version is insufficient|unsatisfied condition: cuda|"
    r"forward compatibility was attempted|The NVIDIA driver on your system is too old",
    "driver-too-old",
    "the image was built with a newer CUDA than the node's driver runs",
    "an image with an older CUDA, or nodes with a newer driver: `invoke docker.check` compares them",
)

PLUGIN = (
    Symptom(
        r"specified config .* does not exist|no configuration files available",
        "device-plugin-config",
        "the plugin's ConfigMap has no configuration of the name that the node's label asks for",
        "set the label nvidia.com/device-plugin.config to a name that the plugin's ConfigMap has, or add one",
    ),
    Symptom(
        r"invalid MIG configuration|must be configured with the same migEnabled value",
        "device-plugin-mig",
        "MIG is on and has no instances, or the GPUs differ, which the strategy `single` refuses",
        "`invoke node.doctor` lists the MIG devices; cut all GPUs alike, or use migStrategy mixed",
    ),
    Symptom(
        r"(?i)could not load NVML|libnvidia-ml\.so\.1|ERROR_LIBRARY_NOT_FOUND|No valid resources detected|"
        r"Incompatible (platform|strategy) detected",
        "device-plugin-no-driver",
        "no driver reaches the plugin's container: nvidia is not the default runtime there, the pod names "
        "no runtimeClassName, or the node has no driver",
        "make nvidia containerd's default runtime or set runtimeClassName: nvidia; `invoke node.doctor` "
        "looks at the node",
    ),
    Symptom(
        r"(?i)(device-plugins/kubelet\.sock|registration\.k8s|could not register device plugin|dial unix).*"
        r"(refused|no such file|deadline|denied|failed)|Could not contact Kubelet",
        "device-plugin-no-kubelet",
        "the plugin does not reach the kubelet's socket: /var/lib/kubelet/device-plugins is not mounted, or "
        "the kubelet has another root folder",
        "mount the folder device-plugins of the kubelet's --root-dir; restart the plugin after the kubelet",
    ),
    Symptom(
        r"(?i)xid",
        "device-plugin-xid",
        "an Xid made the plugin mark a GPU unhealthy, which only its restart undoes",
        "look at the GPU with `invoke node.doctor`; restart the plugin's pod when it is well",
    ),
)

CONTAINER = (
    Symptom(
        r"(?i)CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "gpu-out-of-memory",
        "the model does not fit the GPU's memory; the pod's memory limit has nothing to do with it",
        "a smaller batch, a GPU with more memory or several; `invoke offer.size` computes what it needs",
    ),
    DRIVER_TOO_OLD,
    Symptom(
        r"(?i)Bus error|No space left on device.*shm|unable to (open|allocate|mmap) shared memory|"
        r"NCCL.*(/dev/shm|shared memory)",
        "shm-too-small",
        "the memory that processes share has 64 MiB unless the pod mounts more",
        "mount an emptyDir of medium Memory with a sizeLimit at /dev/shm; `invoke k8s.job --shm SIZE` does",
    ),
    Symptom(
        r"(?i)Failed to initialize NVML: Unknown Error",
        "device-lost",
        "systemd was reloaded on the node and took the device away from the running container",
        "start the pod again; CDI (deviceListStrategy cdi-cri) keeps it from coming back",
    ),
    Symptom(
        r"(?i)nvidia-smi: (command )?not found|lib(cuda|nvidia-ml)\.so\.1: cannot open|"
        r"no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|"
        r"NVIDIA Driver was not detected",
        "gpu-not-in-container",
        "no GPU came into the container: it asked for none, or the runtime did not inject it",
        "ask for nvidia.com/gpu in limits; set no NVIDIA_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES; where "
        "nvidia is not the default runtime, set runtimeClassName: nvidia",
    ),
)

WAITING = (
    Symptom(
        r"(?i)no runtime for|runtime handler",
        "no-runtime",
        "the node's containerd has no runtime of the pod's runtimeClassName",
        "install the NVIDIA container toolkit there; where nvidia is the default leave runtimeClassName out",
    ),
    Symptom(
        r"(?i)unresolvable CDI|CDI device injection failed",
        "no-cdi",
        "the node has no CDI specification of the GPU",
        "`nvidia-ctk cdi generate` writes it; the unit nvidia-cdi-refresh does at each boot",
    ),
    DRIVER_TOO_OLD,
    Symptom(
        r"^(FailedAttachVolume|FailedMount|FailedMapVolume)\b",
        "volume",
        "a volume can't be attached or mounted: another node has it (Multi-Attach), its disk is in another "
        "zone, its driver does not run on the node, or the ConfigMap or Secret of it is not there",
        "`kubectl describe pvc` and the volume's driver say more; the pod starts once the volume is there",
    ),
    Symptom(
        r"^FailedCreatePodSandBox\b",
        "sandbox",
        "the container runtime could not set up the pod: most often its network, for want of an address or "
        "because the network plugin does not run on the node",
        "look at the network plugin's pod on that node; on EKS aws-node, and the subnet's free addresses",
    ),
    Symptom(
        r"^CreateContainerConfigError\b",
        "container-config",
        "a ConfigMap, a Secret or a key that the pod takes its environment from is not there",
        "create it in the pod's namespace, or correct the name",
    ),
    Symptom(
        r"(?i)unauthorized|access denied|denied:|forbidden|no basic auth|authentication required|\b40[13]\b",
        "image-pull-denied",
        "nobody may pull it with what the node or the pod has",
        "imagePullSecrets of the pod; on EKS the node's role needs AmazonEC2ContainerRegistryPullOnly",
    ),
    Symptom(
        r"(?i)no match for platform|exec format error",
        "image-architecture",
        "the image is of another architecture than the node",
        "an image for it, or the selector kubernetes.io/arch",
    ),
    Symptom(
        r"(?i)toomanyrequests|rate limit|\b429\b",
        "image-rate-limit",
        "the registry limits how often it is pulled from",
        "mirror the image into a registry of your own",
    ),
    Symptom(
        r"(?i)manifest unknown|: not found|does not exist|name unknown",
        "image-not-there",
        "no such tag: mistyped, deleted after its end of life as CUDA's images are, or pushed elsewhere",
        "name it by digest; `invoke docker.push` prints ours",
    ),
    Symptom(
        r"ErrImagePull|ImagePullBackOff|InvalidImageName",
        "image-pull",
        "the image can't be pulled",
        "`kubectl describe pod` has the registry's words; can the node reach it?",
    ),
)

# status.reason and status.message of a pod that the kubelet did not take, or ended
# (kubernetes/kubernetes#130145, #97131; pkg/kubelet/lifecycle/predicate.go, pkg/kubelet/eviction)
KUBELET = (
    Symptom(
        r"^UnexpectedAdmissionError\b",
        "kubelet-refused",
        "the node's device plugin could not give what the kubelet asked it for: a GPU went away or became "
        "unhealthy, or the kubelet was restarted and the plugin has not registered again",
        "the pod's controller starts another; one without a controller has to be created again. Look at the "
        "node: `invoke k8s.doctor`, `invoke node.doctor`",
    ),
    Symptom(
        r"^OutOf(?!Memory)[\w./-]+",
        "kubelet-out-of",
        "the node had less left than the scheduler assumed: the pod names its node itself, two schedulers "
        "work there, or the device plugin offers fewer GPUs than before",
        "leave nodeName out, and create the pod again where no controller does",
    ),
    Symptom(
        r"^TopologyAffinityError\b",
        "topology-affinity",
        "the kubelet's topology manager finds no CPUs and GPUs of one NUMA node for it",
        "ask for less, or let the node's topologyManagerPolicy be best-effort",
    ),
    Symptom(
        r"^Evicted\b",
        "evicted",
        "the node ran short of memory or disk, and the pod had more than it had asked for",
        "ask for what it needs; models and caches belong on a volume or the node's NVMe",
    ),
)

# What the scheduler refuses for, beyond what `gpukiln.kubernetes.scheduling` counts; time does not change it.
SCHEDULER = (
    Symptom(
        r"pod (anti-)?affinity|existing pods anti-affinity",
        "pod-affinity",
        "no node has the pods that it wants as neighbours, or each has one that it, or they, refuse",
        "look at podAffinity and podAntiAffinity of it and of the pods that are there",
    ),
    Symptom(
        r"topology spread constraints",
        "topology-spread",
        "on each node that has room it would make the spread more uneven than maxSkew allows",
        "nodes in the other domains (zones), or whenUnsatisfiable: ScheduleAnyway",
    ),
    Symptom(
        r"free ports for the requested pod ports",
        "host-port",
        "on each node that has room another pod has its hostPort, or the port of its hostNetwork",
        "leave hostPort out, or another port",
    ),
    Symptom(
        r'persistentvolumeclaim "[^"]*" (not found|is being deleted|bound to non-existent)|'
        r"unbound immediate PersistentVolumeClaims|find available persistent volumes to bind|"
        r"unbound PersistentVolumeClaim",
        "claim-unbound",
        "a PersistentVolumeClaim of it is not there, or no volume is bound to it",
        "`kubectl describe pvc` says why: no such StorageClass, no driver, nothing left",
    ),
    Symptom(
        # the second since Kubernetes 1.33
        r"volume node affinity conflict|match PersistentVolume's node affinity|no available volume zone",
        "volume-zone",
        "its volume is of one zone or one node, and no node with room is there",
        "GPU nodes in the volume's zone, or a volume in theirs (volumeBindingMode: WaitForFirstConsumer)",
    ),
    Symptom(
        r"exceed max volume count",
        "volume-count",
        "each node that has room has as many volumes as its type can attach",
        "fewer volumes, or another type of node",
    ),
    Symptom(
        r"(?i)cannot allocate all claims|resource ?claim|device class",
        "resource-claim",
        "no node has the devices of its ResourceClaim free: no driver offers them, all are taken, or the "
        "claim, its template or its DeviceClass is not there",
        "`kubectl get resourceslices,resourceclaims,deviceclasses` shows what is offered and taken",
    ),
)

# Why the API server did not take the pods of a controller: events FailedCreate, condition ReplicaFailure.
CREATION = (
    Symptom(
        r"exceeded quota|failed quota",
        "quota-exceeded",
        "a ResourceQuota of the namespace is used up, or asks for requests and limits that the pod does not "
        "state",
        "`kubectl describe quota` shows what is used; ask for less, end other pods, or have it raised",
    ),
    Symptom(
        r"violates PodSecurity",
        "pod-security",
        "the namespace enforces a level of Pod Security that the pod does not keep to",
        "set what the message names, or another level: pod-security.kubernetes.io/enforce on the namespace",
    ),
    Symptom(
        r"failed calling webhook",
        "webhook-fails",
        "an admission webhook does not answer, and nothing is created without it",
        "look at the pods behind the webhook's Service",
    ),
    Symptom(
        r"admission webhook .* denied|ValidatingAdmissionPolicy",
        "webhook-denied",
        "a policy of the cluster does not allow it; the message says why",
        "change what the message names, or ask those who run the policy",
    ),
    Symptom(
        r"(maximum|minimum) \S+ usage per|max limit to request ratio",
        "limit-range",
        "a LimitRange of the namespace does not allow what its containers ask for",
        "`kubectl describe limitrange` shows the limits",
    ),
    Symptom(
        r"(serviceaccount|PriorityClass|RuntimeClass)\b.* not found|no PriorityClass with name",
        "missing-reference",
        "a ServiceAccount, PriorityClass or RuntimeClass that the pod names is not there",
        "create it, or correct the name",
    ),
)
