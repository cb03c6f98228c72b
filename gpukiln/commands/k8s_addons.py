"""What a cluster with GPU nodes runs beside the work, as files to be read, kept and installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, results, say, words

if TYPE_CHECKING:
    from gpukiln.kubernetes.addons.settings import Settings

NAMES = "plugin, health, monitoring, queue, runners"


@command(
    help={
        "only": f"these alone, separated by commas: {NAMES}; default: what something is said about",
        "output": "a folder for the files and install.sh; without it they go to standard output",
        "values": "a file of settings (docs/k8s-addons.md); several may be given, options go before them",
        "cluster": "its name, as metrics tell it",
        "region": "of AWS, whose prices count",
        "kubernetes": "minor version of the cluster, for example 1.35",
        "provider": "of the nodes: karpenter, managed or asg",
        "namespace": "of the device plugin, the exporter and the nodes' health",
        "sharing": "none, time-slicing:4, mps:4, mig-single or mig-mixed; NAME=HOW for nodes with the label "
        "nvidia.com/device-plugin.config=NAME; may be given several times",
        "flavor": "a kind of GPU node: g5.xlarge, t4, LABEL=VALUE or NAME=any of these, with `:mig-1g.10gb` "
        "behind it for MIG devices; may be given several times",
        "team": "a namespace and its quota: NAME=GPUS, or NAME=FLAVOR:GPUS,FLAVOR:GPUS; may be given several "
        "times",
        "runners": "repository or organisation that GitHub Actions runners register with",
        "image": "the runners' image with its digest, as `docker.push` prints it",
        "json": "print one JSON document to standard output",
    },
    iterable=["values", "sharing", "flavor", "team"],
)
def addons(
    _: Any,
    only: str = "",
    output: str = "",
    values: Any = None,
    cluster: str = "",
    region: str = "",
    kubernetes: str = "",
    provider: str = "",
    namespace: str = "",
    sharing: Any = None,
    flavor: Any = None,
    team: Any = None,
    runners: str = "",
    image: str = "",
    json: bool = False,
) -> None:
    """Render device plugin, node health, monitoring, queue and runners of a GPU cluster, and their script."""
    from pathlib import Path

    from gpukiln.kubernetes import folder
    from gpukiln.kubernetes.addons import listing, options, rendered
    from gpukiln.typed import dump

    settings = options.settings(
        [Path(file) for file in values or ()],
        plain={
            "cluster": cluster,
            "region": region,
            "kubernetes": kubernetes,
            "provider": provider,
            "namespace": namespace,
        },
        teams=team or (),
        flavors=flavor or (),
        shared=sharing or (),
        runners={"url": runners, "image": image},
    )
    names = rendered.chosen(words(only), settings)
    files = rendered.rendered(settings, names)
    rendering = folder.write(Path(output) if output else None, files)
    if json:
        found = listing.listing(settings, names, rendering)
        print_document(found.schema, dump(found))
    elif output:
        for line in rendering.lines(output):
            results().tell(line)
    else:
        for path, text in files.items():
            print(f"# {path}\n{text}", end="")
    _tell(settings, names, output, only=bool(only))


def _tell(settings: Settings, names: tuple[str, ...], output: str, *, only: bool) -> None:
    from gpukiln.kubernetes.addons import plugin
    from gpukiln.kubernetes.addons.monitoring import records

    if "plugin" in names:
        say("the nodes need in their user data, as k8s.nodes renders it, or pods reach others' GPUs:")
        for line in plugin.ISOLATION:
            say(f"  {line}")
    if "monitoring" in names and not records.prices(settings):
        say(
            f"no prices of GPU machines in {settings.region} are known, so nothing is told in money: "
            f"invoke offer.refresh --cloud aws --region {settings.region}"
        )
    if not (only or settings.teams or settings.runners):
        say("no queue and no runners: --team and --runners have them rendered")
    if output:
        say(f"next: bash {output.rstrip('/')}/install.sh")
