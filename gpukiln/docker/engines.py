"""Finds a container engine that works here: Docker, Podman or Buildah."""

from gpukiln.docker.buildah import Buildah
from gpukiln.docker.docker_like import Docker, Podman
from gpukiln.docker.engine import Engine
from gpukiln.errors import UnavailableError
from gpukiln.typed import unknown

ENGINES: dict[str, type[Engine]] = {kind.name: kind for kind in (Docker, Podman, Buildah)}


def find_engine(wanted: str = "") -> Engine:
    """The engine to build with: Docker, then Podman, then Buildah.

    Args:
        wanted: One of them; empty takes the first that works.

    Raises:
        UsageError: There is no engine of that name.
        UnavailableError: None works; the details say why not.
    """
    if wanted and wanted not in ENGINES:
        raise unknown("engine", wanted, ENGINES)
    reasons = []
    for kind in [ENGINES[wanted]] if wanted else ENGINES.values():
        found = kind.find()
        if isinstance(found, Engine):
            return found
        reasons.append(found)
    raise UnavailableError(
        "no container engine works here" if not wanted else f"{wanted} does not work here",
        hint="apt-get install buildah needs no daemon; or start Docker",
        details=tuple(reasons),
    )
