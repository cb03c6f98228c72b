"""Docker, with or without BuildKit, and Podman, which has the same commands."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gpukiln.docker.engine import (
    BuildRequest,
    Engine,
    ImageInfo,
    Layer,
    buildah_command,
    full_id,
    instruction,
    last_line,
    native_platform,
    run_command,
    try_command,
)
from gpukiln.errors import UsageError
from gpukiln.parsing import parse_json


class DockerLike(Engine):
    """What Docker and Podman have in common."""

    def remove_unfinished(self, image: str) -> None:
        """See `Engine.remove_unfinished`: the engine itself removes containers of a build (--force-rm)."""

    def load_base(self, tar: Path, reference: str) -> None:
        """See `Engine.load_base`."""
        run_command(self.name, "import", str(tar), reference)

    def inspect(self, reference: str) -> ImageInfo | None:
        """See `Engine.inspect`."""
        done = try_command(self.name, "image", "inspect", reference)
        if done.returncode:
            return None
        document = parse_json(done.stdout)[0]
        config = document.get("Config") or {}
        # Layers without a size are instructions such as ENV and USER.
        layers = [Layer(instruction(by), size) for by, size in self.history(reference) if size]
        return ImageInfo(
            id=full_id(document["Id"]),
            size=int(document["Size"]),
            layers=tuple(reversed(layers)),
            user=config.get("User") or "root",
            entrypoint=tuple(config.get("Entrypoint") or ()),
        )

    def history(self, reference: str) -> list[tuple[str, int]]:
        """The instruction and the size in bytes of each layer, the newest first."""
        form = ("--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}")
        rows = [
            line.partition("\t") for line in run_command(self.name, "history", *form, reference).splitlines()
        ]
        return [(by, int(size)) for size, _, by in rows]

    def remove(self, reference: str) -> None:
        """See `Engine.remove`."""
        run_command(self.name, "image", "rm", reference)

    @contextlib.contextmanager
    def container(self, reference: str, *, name: str, gpus: bool) -> Iterator[str]:
        """See `Engine.container`. The image's own entrypoint starts it, and so is process 1."""
        # Host network: the suite's checks reach the mirror and the exporter as on the node.
        options = ["--detach", f"--name={name}", "--network=host", *self.run_options]
        options += self.gpu_options if gpus else ()
        try_command(self.name, *self.remove_command, name)
        container = run_command(self.name, "run", *options, reference, "sleep", "infinity").strip()
        try:
            yield f"{self.name}://{container}"
        finally:
            run_command(self.name, *self.remove_command, container)

    gpu_options: ClassVar[tuple[str, ...]]
    remove_command: ClassVar[tuple[str, ...]] = ("rm", "--force")

    @property
    def run_options(self) -> tuple[str, ...]:
        """Options of every container."""
        return ()


@dataclass(frozen=True)
class Docker(DockerLike):
    """Docker.

    Args:
        version: Of the engine.
        buildkit: Whether it builds with BuildKit: by the plug-in buildx, or by itself before release 23.
        buildx: Whether the plug-in is there.
    """

    name: ClassVar[str] = "docker"
    gpu_options: ClassVar[tuple[str, ...]] = ("--gpus=all",)
    buildkit: bool = False
    buildx: bool = False

    @property
    def title(self) -> str:
        """For people."""
        return f"docker {self.version} {'with' if self.buildkit else 'without'} BuildKit"

    @classmethod
    def find(cls) -> Engine | str:
        """See `Engine.find`."""
        if not shutil.which("docker"):
            return "docker is not on PATH"
        # Asks the daemon: a client without one can't build.
        done = try_command("docker", "version", "--format", "{{.Server.Version}} {{.Client.Version}}")
        if done.returncode:
            return f"docker does not answer: {last_line(done)}"
        version, client = done.stdout.split()
        buildx = try_command("docker", "buildx", "version").returncode == 0
        # Since 23.0 the command line needs the plug-in buildx for BuildKit (Docker Engine release notes).
        built_in = int(client.partition(".")[0]) < 23
        # Docker's own switch is respected.
        off = os.environ.get("DOCKER_BUILDKIT") == "0"
        return cls(version, buildkit=(buildx or built_in) and not off, buildx=buildx and not off)

    def build_command(self, request: BuildRequest) -> list[str]:
        """See `Engine.build_command`."""
        # The legacy builder supports neither --cache-to nor other platforms.
        if not self.buildkit:
            if request.cache_to:
                raise UsageError(
                    "docker without BuildKit can't export layers (--cache-to)",
                    hint="install docker-buildx",
                )
            if request.platform != native_platform():
                raise UsageError(
                    f"docker without BuildKit builds for {native_platform()} only",
                    hint="install docker-buildx",
                )
        cache = [f"--cache-from={place}" for place in request.cache_from]
        if self.buildx:
            cache += [f"--cache-to={place}" for place in request.cache_to]
            tool = [
                "docker",
                "buildx",
                "build",
                # buildx keeps the result in its cache unless --load has it loaded into the engine
                "--load",
                "--progress=plain",
                f"--platform={request.platform}",
            ]
        elif self.buildkit:
            if request.cache_to:
                raise UsageError(
                    "this docker has BuildKit without buildx, which --cache-to needs",
                    hint="install docker-buildx",
                )
            tool = ["docker", "build", "--progress=plain", f"--platform={request.platform}"]
        else:
            # --force-rm: without it a failed RUN leaves its container.
            tool = ["docker", "build", "--force-rm"]
        return [*tool, *request.options(), *cache, str(request.context)]

    def build_environment(self) -> dict[str, str]:
        """See `Engine.build_environment`."""
        return {"DOCKER_BUILDKIT": "1" if self.buildkit else "0"}


@dataclass(frozen=True)
class Podman(DockerLike):
    """Podman."""

    name: ClassVar[str] = "podman"
    gpu_options: ClassVar[tuple[str, ...]] = ("--device=nvidia.com/gpu=all",)
    # Podman would wait 10 s for the process to end, which Docker does not.
    remove_command: ClassVar[tuple[str, ...]] = ("rm", "--force", "--time=0")

    @property
    def run_options(self) -> tuple[str, ...]:
        """This process's limits as options."""
        # Podman's default limits are higher than a host may grant, and then no container starts;
        # --ulimit=host leads to the same defaults where containers.conf has none (Podman 4.3).
        _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
        _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
        # Podman lowers its limit of processes to the kernel's largest process id, and can't raise it again.
        ids = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="utf-8"))
        limits = {
            "nofile": files,
            "nproc": ids if processes == resource.RLIM_INFINITY else min(processes, ids),
        }
        return tuple(
            f"--ulimit={name}={limit}:{limit}"
            for name, limit in limits.items()
            if limit != resource.RLIM_INFINITY
        )

    @classmethod
    def find(cls) -> Engine | str:
        """See `Engine.find`."""
        if not shutil.which("podman"):
            return "podman is not on PATH"
        done = try_command("podman", "info", "--format", "{{.Version.Version}}")
        return (
            cls(done.stdout.strip()) if done.returncode == 0 else f"podman does not work: {last_line(done)}"
        )

    def history(self, reference: str) -> list[tuple[str, int]]:
        """See `DockerLike.history`."""
        # Podman's templates have only rounded sizes ("12 MB"), JSON has bytes.
        rows = parse_json(run_command("podman", "history", "--format=json", reference))
        return [(row["CreatedBy"], int(row["size"])) for row in rows]

    def build_command(self, request: BuildRequest) -> list[str]:
        """See `Engine.build_command`."""
        return buildah_command("podman", request)
