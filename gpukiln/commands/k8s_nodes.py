"""GPU nodes for Kubernetes, on the image that a channel points at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpukiln.cli.command import (
    DEFAULT_REGION,
    REGION_DEFAULT,
    JsonOptions,
    ProfileOptions,
    print_files,
    say,
    words,
)
from gpukiln.errors import UsageError
from gpukiln.options import option


@dataclass(frozen=True)
class K8sNodes(ProfileOptions, JsonOptions):
    """Render node pools on the image that a channel points at, for Karpenter, EKS or Auto Scaling."""

    provider: str = option(
        "who starts the nodes: karpenter, managed (a node group of EKS) or asg (an Auto Scaling group "
        "whose machines join by themselves)"
    )
    cluster: str = option("name of the EKS cluster")
    name: str = option("of the pool or group", "gpu")
    image: str = option("the image that was released: a folder of ami/", "eks-gpu", setting="image")
    channel: str = option("that the image was released to, for example stable", "stable", setting="channel")
    kubernetes: str = option("minor version of the image; default: the one that is built")
    ami: str = option("one image instead of a channel's")
    cloud: str = option(
        "aws or embedded: look up the image in --region and verify its signatures; a channel that trusts "
        "keys needs it"
    )
    base: str = option(
        "what the image was built on, see `invoke ami.bases`; one with a kubelet", "eks-al2023"
    )
    gpu: str = option("machines by a request, as in offer.list: T4:1, A10G,L4:1, H100:8")
    cpu: int = option("with --gpu: vCPU of a machine, at least", 0)
    memory: str = option("with --gpu: memory of a machine, at least, for example 32GiB")
    arch: str = option("with --gpu: x86_64 or arm64")
    region: str = option(
        "with --gpu: of AWS, whose prices order the machines; with --cloud: where the image is; "
        + REGION_DEFAULT,
        also="regions",
        setting="region",
    )
    instance_type: str = option("these types instead, separated by commas, the first choice first")
    capacity: str = option(
        "on-demand, spot, reserved or capacity-block; of karpenter several, with commas between", "on-demand"
    )
    reservation: str = option("of capacity: cr-..., with --capacity reserved or capacity-block")
    zones: str = option("availability zones, separated by commas; default: all that the subnets are in")
    min: int = option("nodes that stay (managed, asg)", 0)
    max: int = option("karpenter: GPUs of a pool; managed, asg: nodes", 4)
    hours: str = option(
        "working hours: `mon-fri 08:00-18:00`; in them no node is replaced or packed with others"
    )
    time_zone: str = option("of --hours, for example Europe/Berlin")
    keep: int = option("nodes that wait for work in the working hours", 0)
    volume: int = option("root volume in GiB", 100)
    no_local_storage: bool = option(
        "leave local NVMe alone, instead of one RAID 0 that pods' folders are on", False
    )
    role: str = option("karpenter: IAM role of the nodes", "eks-gpu-node")
    dns_ip: str = option(
        "karpenter on Ubuntu: address of the cluster's DNS, the tenth of its service network"
    )
    label: tuple[str, ...] = option("KEY=VALUE of the nodes; several times", ())
    output: str = option("a folder for the files; without it they go to standard output")

    def run(self) -> None:
        from datetime import UTC, datetime
        from pathlib import Path
        from typing import get_args

        from gpukiln.catalog.regions import check_region
        from gpukiln.kubernetes import folder
        from gpukiln.kubernetes.nodes import group, render
        from gpukiln.kubernetes.nodes.image_trust import require_trusted
        from gpukiln.typed import load, unknown

        # Here, as `load` below would name the field and not the option.
        if self.provider not in get_args(group.Provider):
            raise unknown("--provider", self.provider, get_args(group.Provider))
        region = check_region(self.region or DEFAULT_REGION)
        fields = {
            **self.pick("provider", "cluster", "name", "base", "reservation", "keep", "role", "dns_ip"),
            "image": self._image(),
            "types": group.types_of(
                **self.pick("gpu", "cpu", "memory", "arch"),
                region=region,
                named=words(self.instance_type),
                today=datetime.now(UTC).date(),
            ),
            "capacity": words(self.capacity),
            "zones": words(self.zones),
            "minimum": self.min,
            "maximum": self.max,
            "hours": self._hours(),
            "volume_gib": self.volume,
            "local_storage": not self.no_local_storage,
            "labels": group.parse_labels(self.label),
        }
        nodes = group.check(load(group.NodeGroup, fields, where="options"))
        # Before files are rendered: none is written for a pointer whose signatures do not hold.
        trust = require_trusted(nodes.image, self.connect_to(self.cloud, region) if self.cloud else None)
        files = render.files(nodes)
        rendering = folder.write(Path(self.output) if self.output else None, files)
        document = render.document(nodes, rendering, trust)
        if self.output or self.json:
            self.report(document, rendering.lines(self.output))
        else:
            print_files(files)
        for note in document.notes:
            say(f"note: {note}")

    def _image(self) -> str:
        """The image's id, or the parameter of the channel that points at it."""
        from gpukiln.catalog.components import load_components
        from gpukiln.images.channels import load_channel
        from gpukiln.kubernetes.nodes.group import pointer

        if self.ami:
            if not self.ami.startswith("ami-"):
                raise UsageError(
                    f"--ami {self.ami!r} is no image id", hint="wanted: ami-..., or --channel instead"
                )
            return self.ami
        # Refuses a name that no channel has; the parameter itself is looked up by the nodes.
        load_channel(self.channel)
        built = str(load_components()["kubernetes"].version)
        return pointer(self.image, self.kubernetes or built, self.channel)

    def _hours(self) -> Any:
        from gpukiln.kubernetes.nodes import group
        from gpukiln.kubernetes.nodes.hours import parse
        from gpukiln.typed import dump

        if self.time_zone and not self.hours:
            raise UsageError(
                f"--time-zone {self.time_zone} without --hours", hint="--hours 'mon-fri 08:00-18:00'"
            )
        return dump(parse(self.hours, self.time_zone or "UTC")) if self.hours else group.DAYTIME
