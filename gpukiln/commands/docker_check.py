"""Container images: whether one runs on a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import PlaceOptions, print_document, words
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.docker.check import ContainerCheck, Node


@dataclass(frozen=True)
class DockerCheck(PlaceOptions):
    """Say whether an image's CUDA runs on a node's driver and compiles for its GPUs, and by which rule."""

    image: str = option(
        "a folder of docker/, with the CUDA version of components.yaml; with --cuda any name", "runner-gpu"
    )
    cuda: str = option("CUDA version, when it is another one than components.yaml's")
    driver: str = option("the node's driver, for example 535.309.01")
    ami: str = option("an AMI that gpukiln has made; its tags, or its record here, name the driver")
    build: str = option("an AMI's build: build id or `last`")
    gpu: str = option("GPUs of the node, for example a10g,t4; default: those the AMI was built for")
    instance_types: str = option("the node's EC2 instance types, instead of --gpu")
    region: str = option("AWS region of --ami", "us-west-2", also="regions", setting="region")

    def run(self) -> None:
        from dataclasses import replace

        from gpukiln.catalog.components import load_components
        from gpukiln.catalog.containers import load_container
        from gpukiln.docker.check import Node, check_container, gpus_of
        from gpukiln.errors import UsageError

        if sum(map(bool, (self.driver, self.ami, self.build))) != 1:
            raise UsageError(
                "one of --driver, --ami and --build is wanted", hint="--driver 535.309.01, for example"
            )
        if self.gpu and self.instance_types:
            raise UsageError("--gpu and --instance-types are both given", hint="leave one of them out")
        if not self.cuda:
            load_container(self.image)
        version = self.cuda or load_components()["cuda"].version or ""
        if self.driver and "." not in self.driver:
            raise UsageError(
                f"--driver {self.driver!r} is no version", hint="wanted: all of it, such as 535.309.01"
            )
        node = Node(f"driver {self.driver}", self.driver) if self.driver else self._node()
        if named := words(self.gpu) or gpus_of(words(self.instance_types)):
            node = replace(node, gpus=tuple(named))
        checked = check_container(self.image, version, node)
        if self.json:
            print_document("docker.check/1", dump(checked))
        else:
            _show(checked)
        checked.require_works()

    def _node(self) -> Node:
        """What this machine's records know need not be asked for in the cloud."""
        from gpukiln.docker.check import node_of_ami, node_of_record
        from gpukiln.images.builds import Builds
        from gpukiln.state import state_home

        builds = Builds(state_home())
        if self.build:
            return node_of_record(builds.find(self.build).read())
        for folder in builds.all():
            record = folder.read()
            if record.bake and record.bake.image_id == self.ami:
                return node_of_record(record)
        return node_of_ami(self.where(), self.ami)


def _show(checked: ContainerCheck) -> None:
    from gpukiln.catalog.gpus import gpu

    names = ", ".join(gpu(key).name for key in checked.node.gpus)
    print(f"image  {checked.image}, CUDA {checked.cuda}")
    print(f"node   {checked.node.name}, GPUs: {names or 'not known (--gpu or --instance-types names them)'}")
    print(f"runs   {checked.support.way}: {checked.support.message}")
    if checked.support.limits:
        print(f"       {checked.support.limits}")
    print(f"       ({checked.support.source})")
    for finding in checked.findings:
        print(f"wrong  {finding.message} ({finding.source})")
