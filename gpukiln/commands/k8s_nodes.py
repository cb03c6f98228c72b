"""GPU nodes for Kubernetes, on the image that a channel points at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.kubernetes.nodes.changes import PoolUpdate
    from gpukiln.kubernetes.nodes.group import NodeGroup


@dataclass(frozen=True)
class K8sNodes(ProfileOptions, JsonOptions):
    """Render node pools on the image that a channel points at, and say what changes for a running pool."""

    provider: str = option(
        "who starts the nodes: karpenter, managed (a node group of EKS) or asg (an Auto Scaling group "
        "whose machines join by themselves)"
    )
    cluster: str = option("name of the EKS cluster")
    name: str = option("of the pool or group", "gpu")
    image: str = option("the image that was released: a folder of ami/", "eks-gpu", setting="image")
    channel: str = option("that the image was released to, for example stable", "stable", setting="channel")
    kubernetes: str = option("minor version of the image; default: the one that is built")
    from_channel: str = option(
        "the image that this channel points at now, by its id; needs --cloud, which looks it up in --region "
        "and verifies its signatures"
    )
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
    context: str = option(
        "karpenter: context of the kubeconfig; compares with the pool of that cluster, and only reads"
    )
    output: str = option(
        "a folder for the files; compares with the earlier rendering there; without it the files go to "
        "standard output"
    )
    dry_run: bool = option("with --output: only say what would change, and write nothing", False)

    def run(self) -> None:
        from datetime import UTC, datetime
        from pathlib import Path
        from typing import get_args

        from gpukiln.catalog.regions import check_region
        from gpukiln.kubernetes import folder
        from gpukiln.kubernetes.nodes import group, render
        from gpukiln.typed import load, unknown

        # Here, as `load` below would name the field and not the option.
        if self.provider not in get_args(group.Provider):
            raise unknown("--provider", self.provider, get_args(group.Provider))
        self._check_options()
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
        nodes, trust = self._verified(nodes, self.connect_to(self.cloud, region) if self.cloud else None)
        files = render.files(nodes)
        output = Path(self.output) if self.output else None
        update = self._update(nodes, files)
        rendering = folder.write(output, files, dry_run=self.dry_run)
        document = render.document(nodes, rendering, trust, update)
        lines = [*update.lines()] if update else []
        if self.output:
            dry_run = ["dry run: nothing is written"] if self.dry_run else []
            self.report(document, [*rendering.lines(self.output), *dry_run, *lines])
        elif self.json:
            self.report(document)
        else:
            # Standard output has the files alone, so that kubectl can read them.
            print_files(files)
            for line in lines:
                say(line)
        for note in document.notes:
            say(f"note: {note}")

    def _check_options(self) -> None:
        if self.ami and self.from_channel:
            raise UsageError(
                "--ami and --from-channel exclude each other",
                hint=f"--from-channel {self.from_channel} looks the image up, --ami {self.ami} names it",
            )
        if self.from_channel and not self.cloud:
            raise UsageError(
                f"--from-channel {self.from_channel} without --cloud: there is nowhere to look the image up",
                hint="--cloud aws --region REGION, or --channel for a pool that follows the channel",
            )
        if self.context and self.provider != "karpenter":
            raise UsageError(
                f"--context with --provider {self.provider}: the API server of a cluster has no launch "
                "template to compare with",
                hint="--output FOLDER with the earlier rendering compares with that, and `terraform plan` "
                "with AWS",
            )

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
        channel = self.from_channel or self.channel
        load_channel(channel)
        built = str(load_components()["kubernetes"].version)
        return pointer(self.image, self.kubernetes or built, channel)

    def _verified(self, nodes: NodeGroup, cloud: Cloud | None) -> tuple[NodeGroup, str]:
        """The nodes, with --from-channel on the image's id, and why the image is trusted."""
        from gpukiln.images.pointer import parse_path
        from gpukiln.kubernetes.nodes.image_trust import released_image, require_trusted

        pointer = parse_path(nodes.image)
        if not (self.from_channel and pointer and cloud):
            return nodes, require_trusted(nodes.image, cloud)
        image_id, trust = released_image(pointer, cloud)
        return replace(nodes, image=image_id, pointer=pointer.path), trust

    def _update(self, nodes: NodeGroup, files: Mapping[str, str]) -> PoolUpdate | None:
        """What the rendering changes: for the pool of a cluster, else compared with the folder's files."""
        from pathlib import Path

        from gpukiln.kubernetes.nodes import karpenter_changes, render

        if self.context:
            from gpukiln.kubernetes.cluster import Cluster

            [text] = files.values()
            return karpenter_changes.compare_cluster(nodes, text, Cluster(self.context))
        return render.earlier_update(nodes, files, Path(self.output)) if self.output else None

    def _hours(self) -> Any:
        from gpukiln.kubernetes.nodes import group
        from gpukiln.kubernetes.nodes.hours import parse
        from gpukiln.typed import dump

        if self.time_zone and not self.hours:
            raise UsageError(
                f"--time-zone {self.time_zone} without --hours", hint="--hours 'mon-fri 08:00-18:00'"
            )
        return dump(parse(self.hours, self.time_zone or "UTC")) if self.hours else group.DAYTIME
