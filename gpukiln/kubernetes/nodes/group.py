"""What somebody wants of GPU nodes: the one input of every renderer of this package."""

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
from gpukiln.kubernetes.machines import ARCHES, GPU, INSTANCE_TYPE, PRESENT, PRODUCT, sold
from gpukiln.kubernetes.nodes.hours import Hours
from gpukiln.offers.request import parse
from gpukiln.offers.select import nothing, select
from gpukiln.typed import strict, unknown

Provider = Literal["karpenter", "managed", "asg"]
Capacity = Literal["on-demand", "spot", "reserved", "capacity-block"]

ACCELERATOR = "k8s.amazonaws.com/accelerator"  # what cluster-autoscaler knows a GPU node by
LEAST_VOLUME_GIB = 20  # of the node images that are built on
# Of EKS's CreateNodegroup (its API reference), and of name prefixes, to which Terraform adds 26 characters
# (hashicorp/terraform-provider-aws:internal/service/eks/node_group.go; a launch template's name has 128).
MOST_TYPES, LONGEST_PREFIX, LONGEST_TEMPLATE_PREFIX = 20, 63 - 26, 128 - 26
LONGEST_EKS_LABEL = 63
LONGEST_TAG_KEY = 128  # of Auto Scaling; cluster-autoscaler reads labels from tags
LABEL_TAG = "k8s.io/cluster-autoscaler/node-template/label/"
KARPENTER_DOMAINS = ("karpenter.sh", "karpenter.k8s.aws")
# Below kubernetes.io and k8s.io a kubelet takes labels of these domains, and those that it sets itself
# (kubernetes/kubernetes:staging/src/k8s.io/kubelet/pkg/apis/well_known_labels.go).
KUBELET_DOMAINS = ("kubelet.kubernetes.io", "node.kubernetes.io")
TAINT = (GPU, "true", "NoSchedule")
DAYTIME = Hours(tuple(range(7)), 6 * 60, 22 * 60)


@strict
class NodeGroup:
    """GPU nodes of one kind of image.

    Args:
        cluster: Name of the EKS cluster.
        image: A pointer's parameter, or an AMI's id.
        base: What the image was built on, in ami/bases.yaml.
        types: The first choice first, all of one architecture.
        minimum: Nodes that stay, of managed and asg; maximum: GPUs of a Karpenter pool, nodes of the others.
        keep: Nodes that wait for work in `hours`.
        hours: In which nodes are neither replaced nor packed together.
        reservation: Of capacity, cr-...
        dns_ip: The cluster's DNS service; only Ubuntu's bootstrap.sh asks for it.
        local_storage: Whether local NVMe becomes one RAID 0.
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

    @property
    def of_channel(self) -> bool:
        return not self.image.startswith("ami-")

    @property
    def definition(self) -> ImageDefinition | None:
        """What is known of the image of a channel."""
        return load_image(self.image.split("/")[2]) if self.of_channel else None

    @property
    def about_base(self) -> Base:
        return base(self.base)

    @property
    def nodeadm(self) -> bool:
        return self.about_base.has_nodeadm

    @property
    def arch(self) -> str:
        return ARCHES[instance_type(self.types[0]).arch]

    @property
    def has_local_storage(self) -> bool:
        return self.local_storage and any(instance_type(one).local_nvme_gb for one in self.types)

    @property
    def is_spot(self) -> bool:
        return "spot" in self.capacity

    def by_gpu(self) -> dict[str, tuple[str, ...]]:
        """Types by what EC2 calls their GPU, in the order of the types."""
        found: dict[str, tuple[str, ...]] = {}
        for one in self.types:
            gpu = ec2_label(instance_type(one).gpu)
            found[gpu] = (*found.get(gpu, ()), one)
        return found

    def node_labels(self, types: Sequence[str]) -> dict[str, str]:
        """What nodes of some types bear from their first moment.

        The product is feature discovery's, which knows it later: who starts nodes for a pod that selects by
        it has to know before that they will have it. Types of different products have none.
        """
        products = {product(instance_type(one).gpu) for one in types}
        known = {PRODUCT: next(iter(products))} if len(products) == 1 and "" not in products else {}
        return {PRESENT: "true", **known, **self.labels}


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
    """Instance types of some nodes: those named, or those that satisfy an offer's request.

    Of a request, types with the fewest GPUs that do are taken: others would wait for pods that nobody has.
    The GPU that can be had cheapest is first, and of each GPU the smallest machine.

    Raises:
        UsageError: Both or neither; or an unknown type.
        IncompatibleError: One can't be a GPU node, or nothing satisfies the request.
    """
    if bool(named) == bool(gpu):
        raise UsageError(
            "--gpu and --instance-type both say which machines" if gpu else "which machines?",
            hint="either --gpu T4:1 with --cpu and --memory, or --instance-type g4dn.xlarge,g5.xlarge",
        )
    if named:
        found = tuple(dict.fromkeys(named))
        for name in found:
            _require_sold(name)
    else:
        request = parse(gpu, cpu=cpu, memory=memory, arch=arch or "x86_64")
        answer = select(request, [region], today)
        able = [one.instance_type for one in answer.offers if one.instance_type in sold()]
        if not able:
            raise nothing(request, answer, [region])
        fewest = min(instance_type(one).gpus for one in able)
        left = [one for one in able if instance_type(one).gpus == fewest]
        order = [instance_type(one).gpu for one in left]
        found = tuple(sorted(left, key=lambda one: (order.index(instance_type(one).gpu), _size(one))))
    arches = {instance_type(one).arch for one in found}
    if len(arches) > 1:
        raise IncompatibleError(
            f"{' and '.join(sorted(arches))} among {', '.join(found)}: one image is for one architecture",
            hint="two pools, each with its own image",
        )
    return found


def _size(name: str) -> tuple[int, int, str]:
    return instance_type(name).vcpu, instance_type(name).memory_mib, name


def _require_sold(name: str) -> None:
    machine: InstanceType = instance_type(name)
    if name in sold():
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
    """The parameter that a channel is.

    Raises:
        UsageError: Nobody builds such an image, or that is no version of Kubernetes.
    """
    if image not in image_names():
        raise unknown("image", image, image_names())
    if not re.fullmatch(r"1\.\d{2}", kubernetes):
        raise UsageError(f"--kubernetes {kubernetes!r}", hint="wanted: a minor version such as 1.34")
    return Pointer(image, kubernetes, channel).path


def check(group: NodeGroup) -> NodeGroup:
    """The same group, where it can work.

    Raises:
        UsageError: What was asked for does not fit together.
        IncompatibleError: Its machines can't have it.
    """
    for name, text, form, example in (
        ("--cluster", group.cluster, r"[A-Za-z0-9][\w-]{0,99}", "main"),
        ("--name", group.name, r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", "gpu"),
        ("--ami", group.image, r"ami-[0-9a-f]{8,17}|/gpukiln/.+", "ami-0123456789abcdef0"),
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
    if not group.about_base.has_kubernetes:
        raise UsageError(
            f"{group.base} has no kubelet: a machine of it joins no cluster",
            hint=f"--base {' or '.join(name for name, one in load_bases().items() if one.has_kubernetes)}",
        )
    if group.provider == "karpenter" and not group.nodeadm and not group.dns_ip:
        raise UsageError(
            f"no --dns-ip: bootstrap.sh of {group.base} wants the address of the cluster's DNS",
            hint="`kubectl -n kube-system get service kube-dns` shows it, the tenth of the service network",
        )
    if group.definition and ARCHES[group.definition.architecture] != group.arch:
        raise IncompatibleError(
            f"{group.definition.name} is an image for {group.definition.architecture}, "
            f"{', '.join(group.types)} {'are' if len(group.types) > 1 else 'is'} {group.arch}",
            hint="other types, or --image or --ami of one for that architecture",
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
        if key in (PRESENT, PRODUCT, ACCELERATOR):
            raise UsageError(f"--label {key} is set here already, by what the machines are")
        if why := _reserved(key):
            raise UsageError(f"--label {key}: {why}", hint="a domain of your own, such as example.com/team")
        if group.provider == "managed" and not 0 < len(value) <= LONGEST_EKS_LABEL >= len(key):
            raise UsageError(
                f"--label {key}={value}: EKS takes keys and values of 1 to {LONGEST_EKS_LABEL} characters",
                hint="a shorter key, or another value",
            )
        if group.provider != "karpenter" and len(LABEL_TAG + key) > LONGEST_TAG_KEY:
            raise UsageError(
                f"--label {key}: the autoscaler's tag {LABEL_TAG}{key} is longer than {LONGEST_TAG_KEY} "
                "characters, the most that a tag of Auto Scaling may have",
                hint="a shorter key",
            )


def _reserved(key: str) -> str:
    """Why a label of nodes can't be set here; empty where it can. Of Karpenter's domains its CRD says so."""
    domain = key.rpartition("/")[0]
    if domain.endswith(KARPENTER_DOMAINS):
        return "Karpenter sets the labels of its domains, and refuses a NodePool that does"
    inside = _is_below(domain, ("kubernetes.io", "k8s.io"))
    allowed = _is_below(domain, KUBELET_DOMAINS)
    if key == INSTANCE_TYPE or (inside and not allowed):
        return "it is one of Kubernetes' own: a kubelet sets it itself, or does not start with it"
    return ""


def _is_below(domain: str, others: Sequence[str]) -> bool:
    return any(domain == one or domain.endswith(f".{one}") for one in others)


def _check_terraform(group: NodeGroup) -> None:
    """What EKS and the provider of Terraform refuse."""
    if group.provider == "managed" and len(group.types) > MOST_TYPES:
        raise UsageError(
            f"{len(group.types)} instance types: a managed node group has at most {MOST_TYPES}",
            hint="--instance-type with those that are wanted, or --gpu with fewer models",
        )
    if group.provider == "managed" and len(f"{group.name}-") > LONGEST_PREFIX:
        raise UsageError(
            f"--name {group.name!r} is too long: Terraform adds 26 characters, and EKS takes 63",
            hint=f"at most {LONGEST_PREFIX - 1} characters",
        )
    if len(f"{group.cluster}-{group.name}-") > LONGEST_TEMPLATE_PREFIX:
        raise UsageError(
            f"--name {group.name!r} is too long with --cluster {group.cluster!r}: Terraform adds 26 "
            "characters to both, and a launch template's name has 128",
            hint=f"both together at most {LONGEST_TEMPLATE_PREFIX - 2} characters",
        )


def _check_sizes(group: NodeGroup) -> None:
    most = (
        group.maximum
        if group.provider != "karpenter"
        else group.maximum // instance_type(group.types[0]).gpus
    )
    least = group.definition.volume_size_gib if group.definition else LEAST_VOLUME_GIB
    if group.volume_gib < least:
        raise UsageError(f"--volume {group.volume_gib} GiB: the image alone has {least}", hint="--volume 100")
    if group.volume_gib > MAX_GIB:
        raise UsageError(
            f"--volume {group.volume_gib} GiB: a gp3 volume that boots has at most {MAX_GIB} GiB",
            hint="--volume 100; data of pods goes to claims of their own",
        )
    if group.maximum < 1 or group.minimum > group.maximum:
        raise UsageError(
            f"--min {group.minimum}, --max {group.maximum}", hint="wanted: --min 0 or more, --max 1 or more"
        )
    if group.provider == "karpenter" and group.minimum:
        raise UsageError(
            "--min is of node groups: Karpenter starts nodes for pods, and none without",
            hint="--keep N has nodes wait for work in the working hours",
        )
    if group.provider == "karpenter" and not most:
        raise UsageError(
            f"--max {group.maximum} GPUs: one {group.types[0]} has {instance_type(group.types[0]).gpus}",
            hint="with karpenter --max counts GPUs",
        )
    if group.keep > most:
        raise UsageError(f"--keep {group.keep} of at most {most} nodes", hint="a larger --max")
    if group.keep and group.keep < group.minimum:
        raise UsageError(f"--keep {group.keep} is less than --min {group.minimum}, which stays always")


def _check_capacity(group: NodeGroup) -> None:
    for one in group.capacity:
        if one not in get_args(Capacity):
            raise unknown("--capacity", one, get_args(Capacity))
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
                f"--capacity {','.join(group.capacity)}: a capacity block is bought, and stands alone",
                hint="a pool of its own for it",
            )
        if len(group.types) > 1:
            raise UsageError(
                f"a capacity block is of one type, not of {', '.join(group.types)}", hint="--instance-type"
            )
        if not instance_type(group.types[0]).capacity_blocks:
            raise IncompatibleError(
                f"EC2 sells no capacity blocks of {group.types[0]}",
                hint="`invoke offer.list` shows which have them; for other reservations --capacity reserved",
            )
    if group.provider != "karpenter" and len(set(group.capacity)) > 1:
        raise UsageError(
            f"--capacity {','.join(group.capacity)}: a node group has one, and falls back to no other",
            hint="two groups, or --provider karpenter, which does",
        )
