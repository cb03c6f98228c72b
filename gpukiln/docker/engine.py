"""What a container engine does for gpukiln, and how one is asked."""

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

PROBE_TIMEOUT_S = 20.0
GPU_DEVICE = Path("/dev/nvidia0")
IMAGE_LABEL = "gpukiln.image"
VERIFY_PREFIX = "gpukiln-verify-"  # how names of containers begin that are judged


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
        layers: From the base on; only those with a size.
        user: Who its processes run as.
        entrypoint: What its processes are started by.
    """

    id: str
    size: int
    layers: tuple[Layer, ...]
    user: str
    entrypoint: tuple[str, ...]


@dataclass(frozen=True)
class BuildRequest:
    """What is built.

    Args:
        context: The folder that is sent.
        tags: References that the image gets.
        arguments: Values of ARG.
        labels: Labels of the image.
        platform: For example linux/amd64.
        cache_from: Where layers may be taken from, as the engine names it.
        cache_to: Where layers are kept, as the engine names it.
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
        """The options that every engine has. A build reaches what the machine reaches."""
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
        version: What it says of itself.
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

        Args:
            request: What is built.

        Raises:
            UsageError: The engine can't do what is asked.
        """

    def build_environment(self) -> dict[str, str]:
        """Variables of that command, beside this process's own."""
        return {}

    @abstractmethod
    def remove_unfinished(self, image: str) -> None:
        """Remove what builds of an image have left that were cut off.

        Args:
            image: The image's name, which its Dockerfile gives every stage as the label `IMAGE_LABEL`.
        """

    @abstractmethod
    def load_base(self, tar: Path, reference: str) -> None:
        """Make an image of a root file system.

        Args:
            reference: What the image is called.
        """

    @abstractmethod
    def inspect(self, reference: str) -> ImageInfo | None:
        """What an image is, or None when the engine has none of that name."""

    @abstractmethod
    def remove(self, reference: str) -> None:
        """Forget a reference, and the image when it was its last."""

    @abstractmethod
    def container(self, reference: str, *, name: str, gpus: bool) -> contextlib.AbstractContextManager[str]:
        """Start a container of an image; it is gone at the end.

        Args:
            reference: The image.
            name: Its name; one of that name that a killed process has left is removed.
            gpus: Whether it gets this machine's GPUs.

        Yields:
            How testinfra reaches it.
        """


def has_gpu() -> bool:
    """Whether this machine has a GPU that its driver drives."""
    return GPU_DEVICE.exists()


def native_platform() -> str:
    """This machine's platform, for example linux/amd64."""
    machine = os.uname().machine
    return MACHINES[machine].platform if machine in MACHINES else machine


def try_command(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that may fail."""
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
    """What a command said, as text."""
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a command said of what went wrong, or its exit status."""
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    telling = [line for line in lines if "--help'" not in line]
    return telling[-1] if telling else f"exit {done.returncode}"


def buildah_command(tool: str, request: BuildRequest) -> list[str]:
    """The command of Buildah and of Podman, which is Buildah inside.

    Args:
        tool: buildah or podman.
        request: What is built.
    """
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
    """An id of an image, with its algorithm before it."""
    return identity if identity.startswith("sha256:") else f"sha256:{identity}"


def instruction(created_by: str) -> str:
    """An instruction without what the engines put around it."""
    text = re.sub(r"^/bin/(?:ba)?sh (?:-o \w+ )?-c (?:#\(nop\)\s*)?", "", created_by)
    text = re.sub(r"^\|\d+ .*?/bin/(?:ba)?sh (?:-o \w+ )?-c ", "RUN ", text)
    return " ".join(re.sub(r"# buildkit$|FROM .*$", "", text).split())
