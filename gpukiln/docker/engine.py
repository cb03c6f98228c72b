"""The interface of container engines, and the functions that run their commands."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gpukiln import programs
from gpukiln.catalog.architectures import MACHINES
from gpukiln.errors import UnavailableError

# a daemon that starts on demand, by its socket, takes some seconds
PROBE_TIMEOUT_S = 20.0
# exists where a loaded driver has a GPU
GPU_DEVICE = Path("/dev/nvidia0")
IMAGE_LABEL = "gpukiln.image"
VERIFY_PREFIX = "gpukiln-verify-"  # names of containers that are verified begin with it


@dataclass(frozen=True)
class Layer:
    """One layer of an image.

    Args:
        created_by: The instruction that made it.
        size: Bytes, unpacked.
    """

    created_by: str
    size: int


@dataclass(frozen=True)
class ImageInfo:
    """An image that an engine has.

    Args:
        id: Its id, sha256:... of its configuration.
        size: Bytes, unpacked.
        layers: The layers with a size, the base's first.
        user: The user of its processes.
        entrypoint: The program that starts its processes.
    """

    id: str
    size: int
    layers: tuple[Layer, ...]
    user: str
    entrypoint: tuple[str, ...]


@dataclass(frozen=True)
class BuildRequest:
    """An image to build.

    Args:
        context: The folder that the engine gets.
        tags: References that the image gets.
        arguments: Values of ARG.
        labels: Labels of the image.
        platform: For example linux/amd64.
        cache_from: Sources of cached layers, in the engine's form.
        cache_to: Destinations of cached layers, in the engine's form.
    """

    context: Path
    dockerfile: Path
    tags: tuple[str, ...]
    arguments: Mapping[str, str]
    labels: Mapping[str, str]
    platform: str
    cache_from: tuple[str, ...] = ()
    cache_to: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """The options that every engine has."""
        # --network=host: proxies and mirrors on loopback can be reached from a RUN.
        return [
            *(f"--tag={tag}" for tag in self.tags),
            *(f"--build-arg={name}={value}" for name, value in self.arguments.items()),
            *(f"--label={name}={value}" for name, value in self.labels.items()),
            *("--file", str(self.dockerfile), "--network=host"),
        ]


@dataclass(frozen=True)
class Engine(ABC):
    """An engine that works on this machine.

    Args:
        version: The version that it reports.
    """

    name: ClassVar[str]
    version: str

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.name} {self.version}"

    @classmethod
    @abstractmethod
    def find(cls) -> Engine | str:
        """The engine, or why it can't be used here."""

    @abstractmethod
    def build_command(self, request: BuildRequest) -> list[str]:
        """The command that builds an image.

        Raises:
            UsageError: The engine does not support the request.
        """

    def build_environment(self) -> dict[str, str]:
        """Variables of that command, in addition to this process's own."""
        return {}

    @abstractmethod
    def remove_unfinished(self, image: str) -> None:
        """Remove containers of interrupted builds of an image.

        Args:
            image: The image's name, which its Dockerfile gives every stage as the label `IMAGE_LABEL`.
        """

    @abstractmethod
    def load_base(self, tar: Path, reference: str) -> None:
        """Make an image of a root file system.

        Args:
            reference: The image's name.
        """

    @abstractmethod
    def inspect(self, reference: str) -> ImageInfo | None:
        """Facts of an image, or None when the engine has none of that name."""

    @abstractmethod
    def remove(self, reference: str) -> None:
        """Remove a reference, and the image when it was its last one."""

    @abstractmethod
    def container(self, reference: str, *, name: str, gpus: bool) -> contextlib.AbstractContextManager[str]:
        """Start a container of an image, and remove it at the end.

        Args:
            reference: The image.
            name: Its name; an orphan of that name is removed first.
            gpus: Whether it gets this machine's GPUs.

        Yields:
            The address of the container for testinfra.
        """


def has_gpu() -> bool:
    """Whether this machine has a GPU with a loaded driver."""
    return GPU_DEVICE.exists()


def native_platform() -> str:
    """This machine's platform, for example linux/amd64."""
    machine = os.uname().machine
    # An unknown machine is named as it is, so that the engine's error names it.
    return MACHINES[machine].platform if machine in MACHINES else machine


def try_command(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail."""
    # A daemon that hangs counts as a failure, with the exit status of timeout(1).
    try:
        return as_text(programs.run(command, limit_s=PROBE_TIMEOUT_S))
    except UnavailableError as error:
        return subprocess.CompletedProcess(command, 124, "", error.message)


def run_command(*command: str) -> str:
    """Run a command of an engine that must succeed.

    Returns:
        Its output.

    Raises:
        UnavailableError: It failed.
    """
    done = as_text(programs.run(command, limit_s=programs.LONG_S))
    if done.returncode:
        raise UnavailableError(
            f"`{' '.join(command[:3])}` exits {done.returncode}: {last_line(done)}",
            details=tuple(done.stderr.strip().splitlines()[-5:-1]),
        )
    return done.stdout


def as_text(done: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[str]:
    """The output of a command as text."""
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a command's error output, or its exit status.

    >>> last_line(subprocess.CompletedProcess([], 125, "", "Error: no such image"))
    'Error: no such image'
    >>> last_line(subprocess.CompletedProcess([], 1, "", ""))
    'exit 1'
    """
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    # Docker and Podman end errors of usage with a reference to --help.
    relevant = [line for line in lines if "--help'" not in line]
    return relevant[-1] if relevant else f"exit {done.returncode}"


def buildah_command(tool: str, request: BuildRequest) -> list[str]:
    """The build command of Buildah and of Podman, which has Buildah as a library.

    Args:
        tool: buildah or podman.
        request: The image to build.
    """
    # --format=docker: HEALTHCHECK and SHELL are no part of the OCI format.
    cache = [f"--cache-from={place}" for place in request.cache_from] + [
        f"--cache-to={place}" for place in request.cache_to
    ]
    return [
        tool,
        "build",
        "--layers",
        "--format=docker",
        f"--platform={request.platform}",
        *request.options(),
        *cache,
        str(request.context),
    ]


def full_id(identity: str) -> str:
    """An image id with its algorithm.

    >>> full_id("0123abcd")
    'sha256:0123abcd'
    >>> full_id("sha256:0123abcd")
    'sha256:0123abcd'
    """
    return identity if identity.startswith("sha256:") else f"sha256:{identity}"


def instruction(created_by: str) -> str:
    """The instruction of a layer, without the shell and comments that engines add.

    >>> instruction("/bin/sh -c #(nop)  USER runner")
    'USER runner'
    >>> instruction("RUN /bin/sh -c apt-get update # buildkit")
    'RUN /bin/sh -c apt-get update'
    """
    text = re.sub(r"^/bin/(?:ba)?sh (?:-o \w+ )?-c (?:#\(nop\)\s*)?", "", created_by)
    text = re.sub(r"^\|\d+ .*?/bin/(?:ba)?sh (?:-o \w+ )?-c ", "RUN ", text)
    return " ".join(re.sub(r"# buildkit$|FROM .*$", "", text).split())
