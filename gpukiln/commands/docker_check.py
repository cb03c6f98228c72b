"""Container images: whether one runs on a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import command, print_document, words
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.docker.check import ContainerCheck, Node


@command(
    help={
        "image": "a folder of docker/, with the CUDA version of components.yaml; with --cuda any name",
        "cuda": "CUDA version, when it is another one than components.yaml's",
        "driver": "the node's driver, for example 535.309.01",
        "ami": "an AMI that gpukiln has made; its tags, or its record here, name the driver",
        "build": "an AMI's build: build id or `last`",
        "gpu": "GPUs of the node, for example a10g,t4; default: those the AMI was built for",
        "instance_types": "the node's EC2 instance types, instead of --gpu",
        "cloud": "where --ami is: embedded (this machine, the default) or aws (your account)",
        "region": "the region of --ami",
        "profile": "AWS profile (aws only)",
        "json": "print one JSON document to standard output",
    }
)
def check(
    _: Any,
    image: str = "runner-gpu",
    cuda: str = "",
    driver: str = "",
    ami: str = "",
    build: str = "",
    gpu: str = "",
    instance_types: str = "",
    cloud: str = "embedded",
    region: str = "us-west-2",
    profile: str = "",
    json: bool = False,
) -> None:
    """Say whether an image's CUDA runs on a node's driver and compiles for its GPUs, and by which rule."""
    from dataclasses import replace

    from gpukiln.catalog.components import load_components
    from gpukiln.catalog.containers import load_container
    from gpukiln.docker.check import Node, check_container, gpus_of
    from gpukiln.errors import UsageError

    if sum(map(bool, (driver, ami, build))) != 1:
        raise UsageError(
            "one of --driver, --ami and --build is wanted", hint="--driver 535.309.01, for example"
        )
    if gpu and instance_types:
        raise UsageError("--gpu and --instance-types are both given", hint="leave one of them out")
    if not cuda:
        load_container(image)
    version = cuda or load_components()["cuda"].version or ""
    if driver and "." not in driver:
        raise UsageError(f"--driver {driver!r} is no version", hint="wanted: all of it, such as 535.309.01")
    node = Node(f"driver {driver}", driver) if driver else _node(ami, build, cloud, region, profile)
    if named := words(gpu) or gpus_of(words(instance_types)):
        node = replace(node, gpus=tuple(named))
    checked = check_container(image, version, node)
    if json:
        print_document("docker.check/1", dump(checked))
    else:
        _show(checked)
    checked.require_works()


def _node(ami: str, build: str, cloud: str, region: str, profile: str) -> Node:
    """What this machine's records know need not be asked for in the cloud."""
    from gpukiln.clouds.select import make_cloud
    from gpukiln.docker.check import node_of_ami, node_of_record
    from gpukiln.images.builds import Builds
    from gpukiln.state import state_home

    builds = Builds(state_home())
    if build:
        return node_of_record(builds.find(build).read())
    for folder in builds.all():
        record = folder.read()
        if record.bake and record.bake.image_id == ami:
            return node_of_record(record)
    return node_of_ami(make_cloud(cloud, region, profile=profile or None), ami)


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
