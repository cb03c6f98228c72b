"""The GPU nodes that were requested: the input of every renderer of this package."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import date
from ipaddress import ip_address
from typing import Literal, get_args

from gpukiln.catalog.bases import Base, base, load_bases
from gpukiln.catalog.gpu_names import ec2_label, product
from gpukiln.catalog.images import MAX_GIB, ImageDefinition, image_names, load_image
from gpukiln.catalog.instance_types import InstanceType, instance_type
from gpukiln.errors import IncompatibleError, UsageError
from gpukiln.images.pointer import Pointer
from gpukiln.kubernetes.check.formats import is_label
from gpukiln.kubernetes.machines import ARCHES, GPU, GPU_PRESENT, INSTANCE_TYPE, PRODUCT, launchable_types
from gpukiln.kubernetes.nodes.hours import Hours
from gpukiln.offers.request import parse_request
from gpukiln.offers.select import no_match_error, select
from gpukiln.typed import strict, unknown

Provider = Literal["karpenter", "managed", "asg"]
Capacity = Literal["on-demand", "spot", "reserved", "capacity-block"]

ACCELERATOR = "k8s.amazonaws.com/accelerator"  # the label by which cluster-autoscaler recognises a GPU node
LEAST_VOLUME_GIB = 20  # size of the base images' snapshots
# Of EKS's CreateNodegroup (its API reference), and of name prefixes, to which Terraform adds 26 characters
# (hashicorp/terraform-provider-aws:internal/service/eks/node_group.go; a launch template's name has 128).
MOST_TYPES, LONGEST_PREFIX, LONGEST_TEMPLATE_PREFIX = 20, 63 - 26, 128 - 26
LONGEST_EKS_LABEL = 63
LONGEST_TAG_KEY = 128  # of Auto Scaling; cluster-autoscaler reads labels from tags
LABEL_TAG = "k8s.io/cluster-autoscaler/node-template/label/"
KARPENTER_DOMAINS = ("karpenter.sh", "karpenter.k8s.aws")
# Of the domains kubernetes.io and k8s.io a kubelet accepts only labels below these, and those that it sets
# itself (kubernetes/kubernetes:staging/src/k8s.io/kubelet/pkg/apis/well_known_labels.go).
KUBELET_DOMAINS = ("kubelet.kubernetes.io", "node.kubernetes.io")
TAINT = (GPU, "true", "NoSchedule")
DAYTIME = Hours(tuple(range(7)), 6 * 60, 22 * 60)


@strict
class NodeGroup:
    """A group of GPU nodes with one image.

    Args:
        cluster: Name of the EKS cluster.
        image: SSM parameter of a channel, or the id of an AMI.
        pointer: SSM parameter of the channel that pointed at `image`, where `image` is an id that was
            resolved.
        base: Base image, a key of ami/bases.yaml.
        types: Instance types in order of preference, all of one architecture.
        minimum: Nodes that always run (managed, asg); maximum: GPUs of a Karpenter pool, nodes of other
            groups.
        keep: Nodes that wait for work during `hours`.
        hours: Hours during which nodes are neither replaced nor consolidated.
        reservation: Id of a capacity reservation, cr-...
        dns_ip: Address of the cluster's DNS service; only Ubuntu's bootstrap.sh needs it.
        local_storage: Whether local NVMe disks become one RAID 0.
    """

    provider: Provider
    cluster: str
    name: str
    image: str
    base: str
    types: tuple[str, ...]
    capacity: tuple[Capacity, ...] = ("on-demand",)
    reservation: str = ""
    zones: tuple[str, ...] = ()
    minimum: int = 0
    maximum: int = 4
    keep: int = 0
    hours: Hours = DAYTIME
    volume_gib: int = 100
    local_storage: bool = True
    role: str = ""
    dns_ip: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    pointer: str = ""

    @property
    def follows_channel(self) -> bool:
        return not self.image.startswith("ami-")

    @property
    def definition(self) -> ImageDefinition | None:
        """The definition of the channel's image; None for an AMI id of no channel."""
        path = self.image if self.follows_channel else self.pointer
        return load_image(path.split("/")[2]) if path else None

    @property
    def base_image(self) -> Base:
        return base(self.base)

    @property
    def nodeadm(self) -> bool:
        return self.base_image.has_nodeadm

    @property
    def arch(self) -> str:
        return ARCHES[instance_type(self.types[0]).arch]

    @property
    def has_local_storage(self) -> bool:
        return self.local_storage and any(instance_type(name).local_nvme_gb for name in self.types)

    @property
    def is_spot(self) -> bool:
        return "spot" in self.capacity

    def by_gpu(self) -> dict[str, tuple[str, ...]]:
        """EC2's name of a GPU -> instance types with it, in the order of the types."""
        by_name: dict[str, tuple[str, ...]] = {}
        for name in self.types:
            gpu = ec2_label(instance_type(name).gpu)
            by_name[gpu] = (*by_name.get(gpu, ()), name)
        return by_name

    def node_labels(self, types: Sequence[str]) -> dict[str, str]:
        """Labels that nodes of these types have from the start.

        Feature discovery sets the product only after the node has started. An autoscaler that starts a node
        for a pod with a selector on the product needs it before. Types with different products get none.
        """
        products = {product(instance_type(name).gpu) for name in types}
        known = {PRODUCT: next(iter(products))} if len(products) == 1 and "" not in products else {}
        return {GPU_PRESENT: "true", **known, **self.labels}


def parse_labels(texts: Sequence[str]) -> dict[str, str]:
    """The labels of nodes as they are typed.

    >>> parse_labels(["team=vision", "rack="])
    {'team': 'vision', 'rack': ''}
    >>> parse_labels([])
    {}

    Raises:
        UsageError: A text has another form.
    """
    labels = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--label {text!r}", hint="wanted: KEY=VALUE, for example team=vision")
        labels[key] = value
    return labels


def types_of(
    *, named: Sequence[str], gpu: str, cpu: int, memory: str, arch: str, region: str, today: date
) -> tuple[str, ...]:
    """Instance types: those that are named, or those that satisfy a request for GPUs.

    For a request, only the types with the fewest sufficient GPUs are used: on larger ones GPUs would stay
    unused. The cheapest GPU comes first, and for each GPU the smallest machine.

    Raises:
        UsageError: Both or neither is given, or a type is unknown.
        IncompatibleError: A type can't be a GPU node, or no type satisfies the request.
    """
    if bool(named) == bool(gpu):
        raise UsageError(
            "--gpu and --instance-type exclude each other"
            if gpu
            else "neither --gpu nor --instance-type is given",
            hint="either --gpu T4:1 with --cpu and --memory, or --instance-type g4dn.xlarge,g5.xlarge",
        )
    if named:
        types = tuple(dict.fromkeys(named))
        for name in types:
            _require_launchable(name)
    else:
        request = parse_request(gpu, cpu=cpu, memory=memory, arch=arch or "x86_64")
        answer = select(request, [region], today)
        able = [offer.instance_type for offer in answer.offers if offer.instance_type in launchable_types()]
        if not able:
            raise no_match_error(request, answer, [region])
        fewest = min(instance_type(name).gpus for name in able)
        left = [name for name in able if instance_type(name).gpus == fewest]
        order = [instance_type(name).gpu for name in left]
        types = tuple(sorted(left, key=lambda name: (order.index(instance_type(name).gpu), _size(name))))
    arches = {instance_type(name).arch for name in types}
    if len(arches) > 1:
        raise IncompatibleError(
            f"{' and '.join(sorted(arches))} among {', '.join(types)}: an image has one architecture",
            hint="render two pools, each with its own image",
        )
    return types


def _size(name: str) -> tuple[int, int, str]:
    return instance_type(name).vcpu, instance_type(name).memory_mib, name


def _require_launchable(name: str) -> None:
    machine: InstanceType = instance_type(name)
    if name in launchable_types():
        return
    if machine.status == "retired":
        why = "is retired"
    elif machine.gpu_fraction != 1:
        why = "has a part of a GPU, which needs NVIDIA's GRID driver and a NodeOverlay"
    else:
        why = "has no GPU that NVIDIA's device plugin serves"
    raise IncompatibleError(
        f"{name} {why}", hint=f"instead: {', '.join(machine.alternatives) or 'see `invoke offer.list`'}"
    )


def pointer(image: str, kubernetes: str, channel: str) -> str:
    """The SSM parameter of a channel.

    Raises:
        UsageError: gpukiln has no such image, or the Kubernetes version has another form.
    """
    if image not in image_names():
        raise unknown("image", image, image_names())
    if not re.fullmatch(r"1\.\d{2}", kubernetes):
        raise UsageError(f"--kubernetes {kubernetes!r}", hint="wanted: a minor version such as 1.34")
    return Pointer(image, kubernetes, channel).path


def check(group: NodeGroup) -> NodeGroup:
    """Check the group and return it.

    Raises:
        UsageError: An option is wrong, or options exclude each other.
        IncompatibleError: The instance types do not support it.
    """
    for name, text, form, example in (
        ("--cluster", group.cluster, r"[A-Za-z0-9][\w-]{0,99}", "main"),
        ("--name", group.name, r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "gpu"),
        ("--ami", group.image, r"ami-[0-9a-f]{8,17}|/gpukiln/.+", "ami-0123456789abcdef0"),
        # RoleName of IAM's CreateRole
        ("--role", group.role, r"[\w+=,.@/-]{1,64}", "eks-gpu-node"),
        ("--reservation", group.reservation, r"(cr-[0-9a-f]{8,17})?", "cr-0123456789abcdef0"),
    ):
        if not re.fullmatch(form, text, re.ASCII):
            raise UsageError(f"{name} {text!r}" if text else f"no {name}", hint=f"wanted: {name} {example}")
    if group.dns_ip:
        try:
            ip_address(group.dns_ip)
        except ValueError:
            raise UsageError(f"--dns-ip {group.dns_ip!r} is no address", hint="wanted: 10.100.0.10") from None
    if not group.base_image.has_kubernetes:
        with_kubernetes = [name for name, known in load_bases().items() if known.has_kubernetes]
        raise UsageError(
            f"--base {group.base} has no kubelet: its machines can't join a cluster",
            hint=f"--base {' or '.join(with_kubernetes)}",
        )
    if group.provider == "karpenter" and not group.nodeadm and not group.dns_ip:
        raise UsageError(
            f"--dns-ip is missing: bootstrap.sh of {group.base} needs the address of the cluster's DNS",
            hint="`kubectl -n kube-system get service kube-dns` shows it, the tenth of the service network",
        )
    # An AMI has one architecture, and EC2 launches it on no other.
    if group.definition and ARCHES[group.definition.architecture] != group.arch:
        raise IncompatibleError(
            f"{group.definition.name} is an image for {group.definition.architecture}, "
            f"{', '.join(group.types)} {'are' if len(group.types) > 1 else 'is'} {group.arch}",
            hint="choose other types, or --image or --ami for that architecture",
        )
    for zone in group.zones:
        if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d[a-z]|[a-z0-9-]+-az\d", zone):
            raise UsageError(f"--zones {zone!r} is no zone", hint="wanted: for example us-west-2a,us-west-2b")
    _check_labels(group)
    if group.provider != "karpenter":
        _check_terraform(group)
    _check_sizes(group)
    _check_capacity(group)
    return group


def _check_labels(group: NodeGroup) -> None:
    for key, value in group.labels.items():
        if not is_label(key, value):
            raise UsageError(f"--label {key}={value} is no label of Kubernetes", hint="wanted: team=vision")
        # Pods and add-ons select by these.
        if key in (GPU_PRESENT, PRODUCT, ACCELERATOR):
            raise UsageError(f"--label {key} is set by gpukiln")
        if why := _why_reserved(key):
            raise UsageError(
                f"--label {key}: {why}", hint="use a domain of your own, such as example.com/team"
            )
        if group.provider == "managed" and not 0 < len(value) <= LONGEST_EKS_LABEL >= len(key):
            raise UsageError(
                f"--label {key}={value}: EKS takes keys and values of 1 to {LONGEST_EKS_LABEL} characters",
                hint="use a shorter key, or another value",
            )
        if group.provider != "karpenter" and len(LABEL_TAG + key) > LONGEST_TAG_KEY:
            raise UsageError(
                f"--label {key}: the autoscaler's tag {LABEL_TAG}{key} is longer than {LONGEST_TAG_KEY} "
                "characters, the limit of Auto Scaling",
                hint="use a shorter key",
            )


def _why_reserved(key: str) -> str:
    """Why nodes can't get this label; empty if they can. The rule for Karpenter's domains is in its CRD."""
    domain = key.rpartition("/")[0]
    if domain.endswith(KARPENTER_DOMAINS):
        return "Karpenter sets the labels of its own domains, and the API server rejects a NodePool with them"
    inside = _is_below(domain, ("kubernetes.io", "k8s.io"))
    allowed = _is_below(domain, KUBELET_DOMAINS)
    if key == INSTANCE_TYPE or (inside and not allowed):
        return "the domain belongs to Kubernetes: a kubelet does not start with this label"
    return ""


def _is_below(domain: str, others: Sequence[str]) -> bool:
    return any(domain == other or domain.endswith(f".{other}") for other in others)


def _check_terraform(group: NodeGroup) -> None:
    """Refuse what EKS or Terraform's AWS provider does not accept."""
    if group.provider == "managed" and len(group.types) > MOST_TYPES:
        raise UsageError(
            f"{len(group.types)} instance types: a managed node group has at most {MOST_TYPES}",
            hint="name fewer by --instance-type, or fewer models by --gpu",
        )
    if group.provider == "managed" and len(f"{group.name}-") > LONGEST_PREFIX:
        raise UsageError(
            f"--name {group.name!r} is too long: Terraform adds 26 characters, and EKS allows 63",
            hint=f"at most {LONGEST_PREFIX - 1} characters",
        )
    if len(f"{group.cluster}-{group.name}-") > LONGEST_TEMPLATE_PREFIX:
        raise UsageError(
            f"--name {group.name!r} is too long with --cluster {group.cluster!r}: Terraform adds 26 "
            "characters to both, and the name of a launch template may have 128",
            hint=f"both together at most {LONGEST_TEMPLATE_PREFIX - 2} characters",
        )


def _check_sizes(group: NodeGroup) -> None:
    # Karpenter limits GPUs and not nodes: its most nodes are those GPUs on the first type.
    most = (
        group.maximum
        if group.provider != "karpenter"
        else group.maximum // instance_type(group.types[0]).gpus
    )
    least = group.definition.volume_size_gib if group.definition else LEAST_VOLUME_GIB
    if group.volume_gib < least:
        raise UsageError(f"--volume {group.volume_gib} GiB: the image needs {least} GiB", hint="--volume 100")
    if group.volume_gib > MAX_GIB:
        raise UsageError(
            f"--volume {group.volume_gib} GiB: a gp3 root volume has at most {MAX_GIB} GiB",
            hint="--volume 100; use a PersistentVolumeClaim for data",
        )
    if group.maximum < 1 or group.minimum > group.maximum:
        raise UsageError(
            f"--min {group.minimum}, --max {group.maximum}", hint="wanted: --min 0 or more, --max 1 or more"
        )
    if group.provider == "karpenter" and group.minimum:
        raise UsageError(
            "--min is for node groups: Karpenter starts nodes only for pods",
            hint="--keep N keeps nodes running during the working hours",
        )
    if group.provider == "karpenter" and not most:
        raise UsageError(
            f"--max {group.maximum} GPUs: one {group.types[0]} has {instance_type(group.types[0]).gpus}",
            hint="with karpenter --max counts GPUs",
        )
    if group.keep > most:
        raise UsageError(f"--keep {group.keep}: the group has at most {most} nodes", hint="raise --max")
    if group.keep and group.keep < group.minimum:
        raise UsageError(f"--keep {group.keep} is less than --min {group.minimum}, which always runs")


def _check_capacity(group: NodeGroup) -> None:
    for choice in group.capacity:
        if choice not in get_args(Capacity):
            raise unknown("--capacity", choice, get_args(Capacity))
    held = {"reserved", "capacity-block"} & set(group.capacity)
    if held and not group.reservation:
        raise UsageError(
            f"--capacity {','.join(group.capacity)} without --reservation",
            hint="--reservation cr-...; `aws ec2 describe-capacity-reservations` lists them",
        )
    if group.reservation and not held:
        raise UsageError(
            f"--reservation {group.reservation} with --capacity {','.join(group.capacity)}",
            hint="--capacity reserved, or capacity-block",
        )
    if "capacity-block" in group.capacity:
        if len(group.capacity) > 1:
            raise UsageError(
                f"--capacity {','.join(group.capacity)}: a capacity block can't be combined with other "
                "capacity",
                hint="render a pool of its own for it",
            )
        if len(group.types) > 1:
            raise UsageError(
                f"a capacity block has one instance type, and {', '.join(group.types)} are given",
                hint="--instance-type with one type",
            )
        if not instance_type(group.types[0]).capacity_blocks:
            raise IncompatibleError(
                f"EC2 sells no capacity blocks of {group.types[0]}",
                hint="`invoke offer.list` shows the types with capacity blocks; for other reservations use "
                "--capacity reserved",
            )
    if group.provider != "karpenter" and len(set(group.capacity)) > 1:
        raise UsageError(
            f"--capacity {','.join(group.capacity)}: a node group has one capacity type and no fallback",
            hint="render two groups, or use --provider karpenter",
        )
