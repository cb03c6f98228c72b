"""Known messages of device plugins, schedulers, kubelets and programs about GPUs, with cause and fix.

The first matching pattern of a table applies. The texts are those of k8s-device-plugin
(cmd/nvidia-device-plugin, cmd/config-manager, internal/rm, internal/plugin), kube-scheduler
(pkg/scheduler/framework/plugins), kubelet (pkg/kubelet/lifecycle, pkg/kubelet/cm/devicemanager) and
containerd, admission (plugin/pkg/admission), libnvidia-container, CUDA, PyTorch and NCCL.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# Reasons of a waiting container that waiting does not fix (kubernetes/kubernetes:pkg/kubelet/images,
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
    """A message pattern with its cause.

    Args:
        pattern: Regular expression for one line.
        rule: Id of the finding.
    """

    pattern: str
    rule: str
    cause: str
    fix: str


def symptom_in(text: str, table: tuple[Symptom, ...]) -> tuple[Symptom, str] | None:
    """The first symptom of the table that occurs in a text, and the last line that matches it.

    >>> symptom_in("RuntimeError: CUDA out of memory.", CONTAINER)[0].rule
    'gpu-out-of-memory'
    >>> symptom_in("epoch 1 done", CONTAINER) is None
    True
    """
    for symptom in table:
        lines = [line for line in text.splitlines() if re.search(symptom.pattern, line)]
        if lines:
            return symptom, lines[-1]
    return None


# In two tables: the program fails with it, or the runtime already rejects the container.
DRIVER_TOO_OLD = Symptom(
    r"(?i)CUDA driver version is insufficient|unsatisfied condition: cuda|"
    r"forward compatibility was attempted|The NVIDIA driver on your system is too old",
    "driver-too-old",
    "the image was built with a newer CUDA than the node's driver runs",
    "use an image with an older CUDA or nodes with a newer driver: `invoke docker.check` compares them",
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
        "MIG is on without instances, or the GPUs are divided differently, which the strategy `single` "
        "refuses",
        "`invoke node.doctor` lists the MIG devices; divide all GPUs in the same way, or use migStrategy "
        "mixed",
    ),
    Symptom(
        r"(?i)could not load NVML|libnvidia-ml\.so\.1|ERROR_LIBRARY_NOT_FOUND|No valid resources detected|"
        r"Incompatible (platform|strategy) detected",
        "device-plugin-no-driver",
        "the plugin's container has no driver: nvidia is neither the default runtime nor the pod's "
        "runtimeClassName, or the node has no driver",
        "make nvidia containerd's default runtime or set runtimeClassName: nvidia; `invoke node.doctor` "
        "examines the node",
    ),
    Symptom(
        r"(?i)(device-plugins/kubelet\.sock|registration\.k8s|could not register device plugin|dial unix).*"
        r"(refused|no such file|deadline|denied|failed)|Could not contact Kubelet",
        "device-plugin-no-kubelet",
        "the plugin can't connect to the kubelet's socket: /var/lib/kubelet/device-plugins is not mounted, "
        "or "
        "the kubelet has another --root-dir",
        "mount the folder device-plugins of the kubelet's --root-dir; restart the plugin after the kubelet",
    ),
    Symptom(
        r"(?i)xid",
        "device-plugin-xid",
        "because of an Xid the plugin marked a GPU unhealthy; only a restart of the plugin clears that",
        "examine the GPU with `invoke node.doctor`; restart the plugin's pod when the GPU works again",
    ),
)

CONTAINER = (
    Symptom(
        r"(?i)CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        "gpu-out-of-memory",
        "the model does not fit into the GPU's memory; the pod's memory limit does not matter here",
        "use a smaller batch, a GPU with more memory or several GPUs; `invoke offer.size` computes the "
        "memory",
    ),
    DRIVER_TOO_OLD,
    Symptom(
        r"(?i)Bus error|No space left on device.*shm|unable to (open|allocate|mmap) shared memory|"
        r"NCCL.*(/dev/shm|shared memory)",
        "shm-too-small",
        "shared memory (/dev/shm) has 64 MiB unless the pod mounts more",
        "mount an emptyDir of medium Memory with a sizeLimit at /dev/shm; `invoke k8s.job --shm SIZE` does "
        "so",
    ),
    Symptom(
        r"(?i)Failed to initialize NVML: Unknown Error",
        "device-lost",
        "systemd was reloaded on the node, which removed the container's access to the device",
        "start the pod again; CDI (deviceListStrategy cdi-cri) prevents this error",
    ),
    Symptom(
        r"(?i)nvidia-smi: (command )?not found|lib(cuda|nvidia-ml)\.so\.1: cannot open|"
        r"no CUDA-capable device|No CUDA GPUs are available|Found no NVIDIA driver|"
        r"NVIDIA Driver was not detected",
        "gpu-not-in-container",
        "the container has no GPU: it requested none, or the runtime did not inject it",
        "request nvidia.com/gpu in limits; set neither NVIDIA_VISIBLE_DEVICES nor CUDA_VISIBLE_DEVICES; if "
        "nvidia is not the default runtime, set runtimeClassName: nvidia",
    ),
)

WAITING = (
    Symptom(
        r"(?i)no runtime for|runtime handler",
        "no-runtime",
        "containerd on the node does not have the runtime of the pod's runtimeClassName",
        "install the NVIDIA container toolkit there; if nvidia is the default runtime, remove "
        "runtimeClassName",
    ),
    Symptom(
        r"(?i)unresolvable CDI|CDI device injection failed",
        "no-cdi",
        "the node has no CDI specification of the GPU",
        "`nvidia-ctk cdi generate` writes it; the unit nvidia-cdi-refresh does so at each boot",
    ),
    DRIVER_TOO_OLD,
    Symptom(
        # Before the patterns of images: these messages have words such as `not found`, too.
        r"^(FailedAttachVolume|FailedMount|FailedMapVolume)\b",
        "volume",
        "a volume can't be attached or mounted: another node uses it (Multi-Attach), its disk is in another "
        "zone, its driver does not run on the node, or its ConfigMap or Secret does not exist",
        "look at `kubectl describe pvc` and at the volume's driver; the pod starts once the volume is "
        "mounted",
    ),
    Symptom(
        r"^FailedCreatePodSandBox\b",
        "sandbox",
        "the container runtime could not set up the pod, most often its network: no free address, or the "
        "network plugin does not run on the node",
        "look at the network plugin's pod on that node; on EKS aws-node, and the subnet's free addresses",
    ),
    Symptom(
        r"^CreateContainerConfigError\b",
        "container-config",
        "a ConfigMap, a Secret or a key of the pod's environment does not exist",
        "create it in the pod's namespace, or correct the name",
    ),
    Symptom(
        r"(?i)unauthorized|access denied|denied:|forbidden|no basic auth|authentication required|\b40[13]\b",
        "image-pull-denied",
        "the credentials of the node or the pod do not allow to pull the image",
        "set imagePullSecrets; on EKS give the node's role AmazonEC2ContainerRegistryPullOnly",
    ),
    Symptom(
        r"(?i)no match for platform|exec format error",
        "image-architecture",
        "the image is built for another architecture than the node's",
        "use an image for that architecture, or select nodes by kubernetes.io/arch",
    ),
    Symptom(
        r"(?i)toomanyrequests|rate limit|\b429\b",
        "image-rate-limit",
        "the registry limits the number of pulls",
        "mirror the image into a registry of your own",
    ),
    Symptom(
        r"(?i)manifest unknown|: not found|does not exist|name unknown",
        "image-not-there",
        "the tag does not exist: mistyped, pushed elsewhere, or deleted after its end of life as tags of "
        "nvidia/cuda are",
        "name the image by its digest; `invoke docker.push` prints it for images of gpukiln",
    ),
    Symptom(
        # Last: the kubelet puts the registry's message, which the patterns above know, behind this reason.
        r"ErrImagePull|ImagePullBackOff|InvalidImageName",
        "image-pull",
        "the image can't be pulled",
        "`kubectl describe pod` shows the registry's message; check that the node can reach it",
    ),
)

# status.reason and status.message of a pod that the kubelet rejected or ended
# (kubernetes/kubernetes#130145, #97131; pkg/kubelet/lifecycle/predicate.go, pkg/kubelet/eviction)
KUBELET = (
    Symptom(
        r"^UnexpectedAdmissionError\b",
        "kubelet-refused",
        "the device plugin could not allocate what the kubelet requested: a GPU disappeared or became "
        "unhealthy, or the kubelet was restarted and the plugin has not registered again",
        "the pod's controller starts another pod; create a pod without a controller again. Examine the node: "
        "`invoke k8s.doctor`, `invoke node.doctor`",
    ),
    Symptom(
        # OutOfcpu, OutOfnvidia.com/gpu: the kubelet appends the name of the resource.
        r"^OutOf(?!Memory)[\w./-]+",
        "kubelet-out-of",
        "the node had fewer resources left than the scheduler assumed: the pod sets nodeName, two schedulers "
        "use the node, or the device plugin offers fewer GPUs than before",
        "remove nodeName, and create the pod again if it has no controller",
    ),
    Symptom(
        r"^TopologyAffinityError\b",
        "topology-affinity",
        "the kubelet's topology manager finds no free CPUs and GPUs on one NUMA node",
        "request less, or set the node's topologyManagerPolicy to best-effort",
    ),
    Symptom(
        r"^Evicted\b",
        "evicted",
        "the node ran short of memory or disk, and the pod used more than it requested",
        "request what the pod needs; store models and caches on a volume or the node's NVMe",
    ),
)

# Reasons of the scheduler that `gpukiln.kubernetes.scheduling` does not evaluate and waiting does not remove.
SCHEDULER = (
    Symptom(
        r"pod (anti-)?affinity|existing pods anti-affinity",
        "pod-affinity",
        "no node runs the pods that its affinity requires, or each runs one that an anti-affinity excludes",
        "compare podAffinity and podAntiAffinity of the pod and of the running pods",
    ),
    Symptom(
        r"topology spread constraints",
        "topology-spread",
        "on each node with free resources the pod would exceed maxSkew",
        "add nodes in the other domains (zones), or set whenUnsatisfiable: ScheduleAnyway",
    ),
    Symptom(
        r"free ports for the requested pod ports",
        "host-port",
        "on each node with free resources another pod uses its hostPort, or the port of its hostNetwork",
        "remove hostPort, or use another port",
    ),
    Symptom(
        r'persistentvolumeclaim "[^"]*" (not found|is being deleted|bound to non-existent)|'
        r"unbound immediate PersistentVolumeClaims|find available persistent volumes to bind|"
        r"unbound PersistentVolumeClaim",
        "claim-unbound",
        "a PersistentVolumeClaim of the pod does not exist, or is not bound to a volume",
        "`kubectl describe pvc` shows why: unknown StorageClass, no driver, no capacity",
    ),
    Symptom(
        # the second text since Kubernetes 1.33
        r"volume node affinity conflict|match PersistentVolume's node affinity|no available volume zone",
        "volume-zone",
        "its volume belongs to one zone or node, where no node has free resources",
        "add GPU nodes in the volume's zone, or a volume in theirs (volumeBindingMode: WaitForFirstConsumer)",
    ),
    Symptom(
        r"exceed max volume count",
        "volume-count",
        "each node with free resources has as many volumes as its type can attach",
        "use fewer volumes, or another instance type",
    ),
    Symptom(
        r"(?i)cannot allocate all claims|resource ?claim|device class",
        "resource-claim",
        "no node has free devices for its ResourceClaim: no driver offers them, all are in use, or the "
        "claim, its template or its DeviceClass does not exist",
        "`kubectl get resourceslices,resourceclaims,deviceclasses` shows which devices exist and which are "
        "in use",
    ),
)

# Why the API server rejected the pods of a controller: events FailedCreate, condition ReplicaFailure.
CREATION = (
    Symptom(
        r"exceeded quota|failed quota",
        "quota-exceeded",
        "a ResourceQuota of the namespace is used up, or requires requests and limits that the pod does not "
        "have",
        "`kubectl describe quota` shows the usage; request less, end other pods, or raise the quota",
    ),
    Symptom(
        r"violates PodSecurity",
        "pod-security",
        "the pod does not meet the Pod Security level that the namespace enforces",
        "set what the message names, or change the level: pod-security.kubernetes.io/enforce on the "
        "namespace",
    ),
    Symptom(
        r"failed calling webhook",
        "webhook-fails",
        "an admission webhook does not answer, and the API server creates nothing without it",
        "look at the pods behind the webhook's Service",
    ),
    Symptom(
        r"admission webhook .* denied|ValidatingAdmissionPolicy",
        "webhook-denied",
        "a policy of the cluster does not allow the pod; the message has the reason",
        "change what the message names, or ask the owner of the policy",
    ),
    Symptom(
        r"(maximum|minimum) \S+ usage per|max limit to request ratio",
        "limit-range",
        "a LimitRange of the namespace does not allow the requests or limits of the containers",
        "`kubectl describe limitrange` shows the limits",
    ),
    Symptom(
        r"(serviceaccount|PriorityClass|RuntimeClass)\b.* not found|no PriorityClass with name",
        "missing-reference",
        "a ServiceAccount, PriorityClass or RuntimeClass that the pod names does not exist",
        "create it, or correct the name",
    ),
)
