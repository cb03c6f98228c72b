"""GPU nodes for Kubernetes, on the image that a channel points at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpukiln.commands.cli import JsonOptions, ProfileOptions, print_document, results, say, words
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
        "with --gpu: of AWS, whose prices order the machines; with --cloud: where the image is",
        "us-west-2",
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

        from gpukiln.catalog.components import load_components
        from gpukiln.catalog.regions import check_region
        from gpukiln.clouds.select import make_cloud
        from gpukiln.errors import UsageError
        from gpukiln.images.channels import load_channel
        from gpukiln.kubernetes import folder
        from gpukiln.kubernetes.nodes import group, render
        from gpukiln.kubernetes.nodes.hours import parse
        from gpukiln.kubernetes.nodes.image_trust import require_trusted
        from gpukiln.typed import dump, load, unknown

        if self.provider not in get_args(group.Provider):
            raise unknown("--provider", self.provider, get_args(group.Provider))
        check_region(self.region)
        if self.time_zone and not self.hours:
            raise UsageError(
                f"--time-zone {self.time_zone} without --hours", hint="--hours 'mon-fri 08:00-18:00'"
            )
        if self.ami and not self.ami.startswith("ami-"):
            raise UsageError(
                f"--ami {self.ami!r} is no image id", hint="wanted: ami-..., or --channel instead"
            )
        image = self.ami
        if not image:
            load_channel(self.channel)
            built = str(load_components()["kubernetes"].version)
            image = group.pointer(self.image, self.kubernetes or built, self.channel)
        wanted = {
            **self.pick("provider", "cluster", "name", "base", "reservation", "keep", "role", "dns_ip"),
            "image": image,
            "types": group.types_of(
                **self.pick("gpu", "cpu", "memory", "arch", "region"),
                named=words(self.instance_type),
                today=datetime.now(UTC).date(),
            ),
            "capacity": words(self.capacity),
            "zones": words(self.zones),
            "minimum": self.min,
            "maximum": self.max,
            "hours": dump(parse(self.hours, self.time_zone or "UTC") if self.hours else group.DAYTIME),
            "volume_gib": self.volume,
            "local_storage": not self.no_local_storage,
            "labels": _labels(self.label),
        }
        made = group.check(load(group.NodeGroup, wanted, where="options"))
        where = make_cloud(self.cloud, self.region, profile=self.profile or None) if self.cloud else None
        trust = require_trusted(made.image, where)
        texts = render.files(made)
        rendering = folder.write(Path(self.output) if self.output else None, texts)
        document = render.document(made, rendering, trust)
        if self.json:
            print_document(document.schema, dump(document))
        elif self.output:
            for line in rendering.lines(self.output):
                results().print_text(line)
        else:
            for path, text in texts.items():
                print(f"# {path}\n{text}" if len(texts) > 1 else text, end="")
        for note in document.notes:
            say(f"note: {note}")


def _labels(texts: Any) -> dict[str, str]:
    from gpukiln.errors import UsageError

    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--label {text!r}", hint="wanted: KEY=VALUE, for example team=vision")
        found[key] = value
    return found
