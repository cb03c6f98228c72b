"""The commands of gpukiln: `invoke --list`, `invoke ami.build -h`."""

from types import ModuleType

from invoke import main
from invoke.collection import Collection

from gpukiln.commands import (
    ami,
    ami_attest,
    ami_bases,
    ami_diff,
    ami_export,
    ami_verify,
    cloud,
    cloud_gpus,
    cloud_policy,
    docker,
    docker_check,
    docker_push,
    gpu,
    k8s_addons,
    k8s_check,
    k8s_cluster,
    k8s_job,
    k8s_nodes,
    node,
    node_passthrough,
    offer,
    release,
    workspace,
    workspace_look,
)
from gpukiln.commands.program import Program


def noun(*modules: ModuleType) -> Collection:
    """The commands of one noun, which several modules hold.

    Args:
        modules: Of gpukiln.commands.
    """
    tasks = [task for module in modules for task in Collection.from_module(module).tasks.values()]
    return Collection(*tasks)


namespace = Collection(
    ami=noun(ami, ami_attest, ami_bases, ami_diff, ami_export, ami_verify, release),
    cloud=noun(cloud, cloud_gpus, cloud_policy),
    docker=noun(docker, docker_check, docker_push),
    gpu=noun(gpu),
    k8s=noun(k8s_addons, k8s_check, k8s_cluster, k8s_job, k8s_nodes),
    node=noun(node, node_passthrough),
    offer=noun(offer),
    workspace=noun(workspace, workspace_look),
)
program = Program(namespace)

if main.program.argv:  # Invoke's own program has found this file: what was typed is ours to read
    program.run(main.program.argv)
if __name__ == "__main__":
    program.run()
