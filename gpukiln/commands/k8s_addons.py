"""What a cluster with GPU nodes runs beside the work, as files to be read, kept and installed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import JsonOptions, print_document, results, say, words
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.kubernetes.addons.settings import Settings

NAMES = "plugin, health, monitoring, queue, runners"


@dataclass(frozen=True)
class K8sAddons(JsonOptions):
    """Render device plugin, node health, monitoring, queue and runners of a GPU cluster, and their script."""

    only: str = option(f"these alone, separated by commas: {NAMES}; default: what something is said about")
    output: str = option("a folder for the files and install.sh; without it they go to standard output")
    values: tuple[str, ...] = option(
        "a file of settings (docs/k8s-addons.md); several may be given, options go before them", ()
    )
    cluster: str = option("its name, as metrics tell it")
    region: str = option("of AWS, whose prices count", also="regions", setting="region")
    kubernetes: str = option("minor version of the cluster, for example 1.35")
    provider: str = option("of the nodes: karpenter, managed or asg")
    namespace: str = option("of the device plugin, the exporter and the nodes' health")
    sharing: tuple[str, ...] = option(
        "none, time-slicing:4, mps:4, mig-single or mig-mixed; NAME=HOW for nodes with the label "
        "nvidia.com/device-plugin.config=NAME; may be given several times",
        (),
    )
    flavor: tuple[str, ...] = option(
        "a kind of GPU node: g5.xlarge, t4, LABEL=VALUE or NAME=any of these, with `:mig-1g.10gb` behind "
        "it for MIG devices; may be given several times",
        (),
    )
    team: tuple[str, ...] = option(
        "a namespace and its quota: NAME=GPUS, or NAME=FLAVOR:GPUS,FLAVOR:GPUS; may be given several times",
        (),
    )
    runners: str = option("repository or organisation that GitHub Actions runners register with")
    image: str = option("the runners' image with its digest, as `docker.push` prints it")

    def run(self) -> None:
        from pathlib import Path

        from gpukiln.kubernetes import folder
        from gpukiln.kubernetes.addons import listing, options, render
        from gpukiln.typed import dump

        settings = options.load_settings(
            [Path(file) for file in self.values],
            plain=self.pick("cluster", "region", "kubernetes", "provider", "namespace"),
            teams=self.team,
            flavors=self.flavor,
            shared=self.sharing,
            runners={"url": self.runners, "image": self.image},
        )
        names = render.select_add_ons(words(self.only), settings)
        files = render.render_files(settings, names)
        rendering = folder.write(Path(self.output) if self.output else None, files)
        if self.json:
            found = listing.listing(settings, names, rendering)
            print_document(found.schema, dump(found))
        elif self.output:
            for line in rendering.lines(self.output):
                results().print_text(line)
        else:
            for path, text in files.items():
                print(f"# {path}\n{text}", end="")
        _tell(settings, names, self.output, only=bool(self.only))


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
