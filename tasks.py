"""The commands of gpukiln, for Invoke: `invoke --list`, `invoke --help ami.build`."""

from invoke.collection import Collection

from gpukiln.commands import ami, cloud, node

namespace = Collection(
    ami=Collection.from_module(ami),
    cloud=Collection.from_module(cloud),
    node=Collection.from_module(node),
)
