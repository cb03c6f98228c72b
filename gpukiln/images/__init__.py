"""Machine images: the plan of an image, its bake, the record of a build, the channels that publish it.

`plan.ImagePlan` is what would be built from what, `builds.Record` everything that is known of a build,
`subject.Subject` an image that is to be verified. `plan.py` makes the plan by the rules of `fit.py`, with the
base that `bases.py` finds and the digest of `digest.py`; `bake.py` makes the image by `packer.py`, and reuses
`stages.py` (snapshots of earlier bakes) and `modules.py` (compiled kernel modules, kept in
`module_store.py`). `builds.py` has the records, `orphans.py` removes what killed builds left, `cost.py` and
`timings.py` say what a build costs and how long it took. `channels.py` reads ami/channels.yaml, `keys.py` the
keys that a channel trusts, and `pointer.py` the SSM parameter that is a channel.
"""
