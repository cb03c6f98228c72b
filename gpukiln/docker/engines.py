"""Finds a container engine that works on this machine: Docker, Podman or Buildah."""

from gpukiln.docker.buildah import Buildah
from gpukiln.docker.docker_like import Docker, Podman
from gpukiln.docker.engine import Engine
from gpukiln.errors import UnavailableError
from gpukiln.typed import unknown

# In the order of preference: Docker has BuildKit's cache, Podman no daemon, Buildah no GPUs.
ENGINES: dict[str, type[Engine]] = {kind.name: kind for kind in (Docker, Podman, Buildah)}


def find_engine(name: str = "") -> Engine:
    """The engine to build with: Docker, then Podman, then Buildah.

    Args:
        name: One of them; empty: the first that works.

    Raises:
        UsageError: There is no engine of that name.
        UnavailableError: None works; the details have the reasons.
    """
    if name and name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    reasons = []
    # A named engine that does not work is an error: another one would have other images.
    for kind in [ENGINES[name]] if name else ENGINES.values():
        engine = kind.find()
        if isinstance(engine, Engine):
            return engine
        reasons.append(engine)
    raise UnavailableError(
        "no container engine works on this machine" if not name else f"{name} does not work here",
        hint="install buildah, which needs no daemon (apt-get install buildah); or start Docker",
        details=tuple(reasons),
    )
