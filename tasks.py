"""The commands of gpukiln, for Invoke: `invoke --list`, `invoke --help ami.build`."""

from types import ModuleType

from invoke.collection import Collection

from gpukiln.commands import (
    ami,
    ami_attest,
    ami_bases,
    ami_diff,
    ami_verify,
    cloud,
    cloud_policy,
    docker,
    docker_check,
    docker_push,
    node,
    release,
)


def noun(*modules: ModuleType) -> Collection:
    """The commands of one noun, which several modules hold.

    Args:
        modules: Of gpukiln.commands.
    """
    tasks = [task for module in modules for task in Collection.from_module(module).tasks.values()]
    return Collection(*tasks)


namespace = Collection(
    ami=noun(ami, ami_attest, ami_bases, ami_diff, ami_verify, release),
    cloud=noun(cloud, cloud_policy),
    docker=noun(docker, docker_check, docker_push),
    node=noun(node),
)
