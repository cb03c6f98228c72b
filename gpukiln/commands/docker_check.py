"""Container images: whether one runs on a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.cli.command import DEFAULT_REGION, REGION_DEFAULT, PlaceOptions, words
from gpukiln.errors import UsageError
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.docker.check import Node


@dataclass(frozen=True)
class DockerCheck(PlaceOptions):
    """Report whether an image's CUDA runs on a driver and compiles for its GPUs, and by which rule."""

    image: str = option(
        "a folder of docker/, with the CUDA version of components.yaml; with --cuda any name", "runner-gpu"
    )
    cuda: str = option("CUDA version, when it is another one than components.yaml's")
    driver: str = option("the node's driver, for example 535.309.01")
    ami: str = option("an AMI that gpukiln has made; its tags, or its record here, name the driver")
    build: str = option("an AMI's build: build id or `last`")
    gpu: str = option("GPUs of the node, for example a10g,t4; default: those the AMI was built for")
    instance_types: str = option("the node's EC2 instance types, instead of --gpu")
    region: str = option(f"AWS region of --ami; {REGION_DEFAULT}", also="regions", setting="region")

    def run(self) -> None:
        from dataclasses import replace

        from gpukiln.catalog.components import load_components
        from gpukiln.catalog.containers import load_container
        from gpukiln.docker.check import check_container, gpus_of
        from gpukiln.docker.view import check_lines

        if sum(map(bool, (self.driver, self.ami, self.build))) != 1:
            raise UsageError(
                "one of --driver, --ami and --build is required", hint="--driver 535.309.01, for example"
            )
        if self.gpu and self.instance_types:
            raise UsageError("--gpu and --instance-types are both given", hint="leave one of them out")
        # Any name is accepted with --cuda; alone it must be a folder of docker/, else this raises.
        if not self.cuda:
            load_container(self.image)
        version = self.cuda or load_components()["cuda"].version or ""
        node = self._node()
        if gpus := words(self.gpu) or gpus_of(words(self.instance_types)):
            node = replace(node, gpus=tuple(gpus))
        check = check_container(self.image, version, node)
        self.report(check, check_lines(check), schema="docker.check/1")
        # After the report, in which the rule is named that exit 3 is about.
        check.require_works()

    def _node(self) -> Node:
        """The node that was named; the cloud is asked only where this machine has no record."""
        from gpukiln.docker.check import Node, node_of_ami, node_of_record
        from gpukiln.images.builds import Builds

        if self.driver:
            # A branch alone does not decide: CUDA and GPUs ask for a release of it, an L40S for 535.104.05.
            if "." not in self.driver:
                raise UsageError(
                    f"--driver {self.driver!r} is no version", hint="wanted: all of it, such as 535.309.01"
                )
            return Node(f"driver {self.driver}", self.driver)
        # The record first: it needs no account, and tags of an AMI can have been changed since.
        build = Builds().find(self.build) if self.build else Builds().of_image(self.ami)
        if build:
            return node_of_record(build.read())
        return node_of_ami(self.connect_to(self.cloud, self.region or DEFAULT_REGION), self.ami)
