"""Add-ons of a cluster with GPU nodes, render as files that are reviewed, kept and installed."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import JsonOptions, print_files, say, words
from gpukiln.options import option

# Of gpukiln/kubernetes/addons/render.py, which is slow to import for a help text; a test compares them.
NAMES = "plugin, health, monitoring, queue, runners"


@dataclass(frozen=True)
class K8sAddons(JsonOptions):
    """Render device plugin, node health, monitoring, queue and runners of a GPU cluster, and their script."""

    only: str = option(
        f"these alone, separated by commas: {NAMES}; default: those that the options and files name"
    )
    output: str = option("a folder for the files and install.sh; without it they go to standard output")
    values: tuple[str, ...] = option(
        "a file of settings (docs/k8s-addons.md); several may be given; options take precedence over them", ()
    )
    cluster: str = option("its name, the label `cluster` of metrics")
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

        settings = options.load_settings(
            [Path(file) for file in self.values],
            plain=self.pick("cluster", "region", "kubernetes", "provider", "namespace"),
            teams=self.team,
            flavors=self.flavor,
            shared=self.sharing,
            runners={"url": self.runners, "image": self.image},
        )
        # After the settings, which decide which add-ons a cluster gets without --only.
        names = render.select_add_ons(words(self.only), settings)
        files = render.render_files(settings, names)
        rendering = folder.write(Path(self.output) if self.output else None, files)
        # Manifests alone on standard output, so that they can be piped; what to do next goes to standard
        # error.
        if self.output or self.json:
            self.report(listing.listing(settings, names, rendering), rendering.lines(self.output))
        else:
            print_files(files)
        for line in render.next_steps(settings, names, self.output, only=bool(self.only)):
            say(line)
