"""GPU nodes for Kubernetes, on the image that a channel points at."""

from __future__ import annotations

from typing import Any

from gpukiln.commands.cli import command, print_document, results, say, words


@command(
    help={
        "provider": "who starts the nodes: karpenter, managed (a node group of EKS) or asg (an Auto Scaling "
        "group whose machines join by themselves)",
        "cluster": "name of the EKS cluster",
        "name": "of the pool or group",
        "image": "the image that was released: a folder of ami/",
        "channel": "that the image was released to, for example stable",
        "kubernetes": "minor version of the image; default: the one that is built",
        "ami": "one image instead of a channel's",
        "cloud": "aws or embedded: look up the image in --region and verify its signatures; a channel that "
        "trusts keys needs it",
        "profile": "AWS profile (with --cloud aws)",
        "base": "what the image was built on, see `invoke ami.bases`; one with a kubelet",
        "gpu": "machines by a request, as in offer.list: T4:1, A10G,L4:1, H100:8",
        "cpu": "with --gpu: vCPU of a machine, at least",
        "memory": "with --gpu: memory of a machine, at least, for example 32GiB",
        "arch": "with --gpu: x86_64 or arm64",
        "region": "with --gpu: of AWS, whose prices order the machines; with --cloud: where the image is",
        "instance_type": "these types instead, separated by commas, the first choice first",
        "capacity": "on-demand, spot, reserved or capacity-block; of karpenter several, with commas between",
        "reservation": "of capacity: cr-..., with --capacity reserved or capacity-block",
        "zones": "availability zones, separated by commas; default: all that the subnets are in",
        "min": "nodes that stay (managed, asg)",
        "max": "karpenter: GPUs of a pool; managed, asg: nodes",
        "hours": "working hours: `mon-fri 08:00-18:00`; in them no node is replaced or packed with others",
        "time_zone": "of --hours, for example Europe/Berlin",
        "keep": "nodes that wait for work in the working hours",
        "volume": "root volume in GiB",
        "no_local_storage": "leave local NVMe alone, instead of one RAID 0 that pods' folders are on",
        "role": "karpenter: IAM role of the nodes",
        "dns_ip": "karpenter on Ubuntu: address of the cluster's DNS, the tenth of its service network",
        "label": "KEY=VALUE of the nodes; several times",
        "output": "a folder for the files; without it they go to standard output",
        "json": "print one JSON document to standard output",
    },
    iterable=["label"],
)
def nodes(
    _: Any,
    provider: str = "",
    cluster: str = "",
    name: str = "gpu",
    image: str = "eks-gpu",
    channel: str = "stable",
    kubernetes: str = "",
    ami: str = "",
    cloud: str = "",
    profile: str = "",
    base: str = "eks-al2023",
    gpu: str = "",
    cpu: int = 0,
    memory: str = "",
    arch: str = "",
    region: str = "us-west-2",
    instance_type: str = "",
    capacity: str = "on-demand",
    reservation: str = "",
    zones: str = "",
    min: int = 0,
    max: int = 4,
    hours: str = "",
    time_zone: str = "",
    keep: int = 0,
    volume: int = 100,
    no_local_storage: bool = False,
    role: str = "eks-gpu-node",
    dns_ip: str = "",
    label: Any = None,
    output: str = "",
    json: bool = False,
) -> None:
    """Render node pools on the image that a channel points at, for Karpenter, EKS or Auto Scaling."""
    from datetime import UTC, datetime
    from pathlib import Path
    from typing import get_args

    from gpukiln.catalog.components import load_components
    from gpukiln.catalog.regions import check_region
    from gpukiln.clouds.select import make_cloud
    from gpukiln.errors import UsageError
    from gpukiln.images.channels import load_channel
    from gpukiln.kubernetes import folder
    from gpukiln.kubernetes.nodes import group, rendered
    from gpukiln.kubernetes.nodes.hours import parse
    from gpukiln.kubernetes.nodes.trusted import require_trusted
    from gpukiln.typed import dump, load, unknown

    if provider not in get_args(group.Provider):
        raise unknown("--provider", provider, get_args(group.Provider))
    check_region(region)
    if time_zone and not hours:
        raise UsageError(f"--time-zone {time_zone} without --hours", hint="--hours 'mon-fri 08:00-18:00'")
    if ami and not ami.startswith("ami-"):
        raise UsageError(f"--ami {ami!r} is no image id", hint="wanted: ami-..., or --channel instead")
    if not ami:
        load_channel(channel)
        built = str(load_components()["kubernetes"].version)
        ami = group.pointer(image, kubernetes or built, channel)
    wanted = {
        "provider": provider,
        "cluster": cluster,
        "name": name,
        "image": ami,
        "base": base,
        "types": group.types_of(
            named=words(instance_type),
            gpu=gpu,
            cpu=cpu,
            memory=memory,
            arch=arch,
            region=region,
            today=datetime.now(UTC).date(),
        ),
        "capacity": words(capacity),
        "reservation": reservation,
        "zones": words(zones),
        "minimum": min,
        "maximum": max,
        "keep": keep,
        "hours": dump(parse(hours, time_zone or "UTC") if hours else group.DAYTIME),
        "volume_gib": volume,
        "local_storage": not no_local_storage,
        "role": role,
        "dns_ip": dns_ip,
        "labels": _labels(label or ()),
    }
    made = group.check(load(group.NodeGroup, wanted, where="options"))
    where = make_cloud(cloud, region, profile=profile or None) if cloud else None
    trust = require_trusted(made.image, where)
    texts = rendered.files(made)
    rendering = folder.write(Path(output) if output else None, texts)
    document = rendered.document(made, rendering, trust)
    if json:
        print_document(document.schema, dump(document))
    elif output:
        for line in rendering.lines(output):
            results().tell(line)
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
