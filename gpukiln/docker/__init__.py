"""Container images: plan, build, verify, push.

`plan.ContainerPlan` is what would be built from what, `builds.ContainerRecord` everything that is known of a
build, `engine.Engine` a container engine of this machine. `plan.py` makes the plan, `context.py` fetches and
lays out the files, `build.py` builds with the engine that `engines.py` finds (`docker_like.py` for Docker and
Podman, `buildah.py`), `verify.py` runs the host suite in a container, `push.py` pushes by `skopeo.py` to the
registry of `repository.py`. `check.py` checks an image against a node, `view.py` prints tables.
"""
