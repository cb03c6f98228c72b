"""skopeo: reads images in an engine's storage and in registries, and copies between them."""

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gpukiln import programs
from gpukiln.errors import UnavailableError, UsageError
from gpukiln.parsing import parse_json

# skopeo's names of the engines' storages (containers-transports(5))
TRANSPORTS = {"docker": "docker-daemon:", "podman": "containers-storage:", "buildah": "containers-storage:"}
ABSENT = ("manifest unknown", "name unknown")
"""A registry's errors for a missing tag or repository (distribution-spec, Error Codes)."""


@dataclass(frozen=True)
class Manifest:
    """An image in a registry.

    Args:
        digest: The manifest's digest, which `repository@digest` names.
        config: The configuration's digest. The configuration has the digests of the uncompressed layers, so
            it is the same for the same image, however a tool compressed it.
    """

    digest: str
    config: str


class Skopeo:
    """skopeo for one repository.

    Args:
        repository: host[:port]/path.
        authfile: File with the login, or None for that of `skopeo login` or `docker login`.
        plain_http: Whether the registry has no TLS.
        log: Gets every call with its output.

    Raises:
        UnavailableError: skopeo is not installed.
    """

    def __init__(self, repository: str, *, authfile: Path | None, plain_http: bool, log: Path) -> None:
        if not shutil.which("skopeo"):
            hint = "apt-get install skopeo, or call through scripts/run, which does it"
            raise UnavailableError("skopeo, which copies images to registries, is not installed", hint=hint)
        self.repository, self._log = repository, log
        self._auth = ["--authfile", str(authfile)] if authfile else []
        self._http = plain_http

    def local(self, reference: str, engine: str) -> tuple[str, str]:
        """Find an image in an engine's storage.

        Args:
            reference: As the engine knows it, for example localhost/gpukiln/runner-gpu:1.
            engine: docker, podman or buildah.

        Returns:
            Its address in skopeo's form, and the digest of its configuration.

        Raises:
            UnavailableError: It is not there, or the engine does not answer.
        """
        if engine not in TRANSPORTS:
            raise UsageError(f"unknown engine {engine!r}; valid: {', '.join(TRANSPORTS)}")
        source = f"{TRANSPORTS[engine]}{reference}"
        daemon = [f"--daemon-host={host}"] if (host := _docker_host(source)) else []
        # --raw: the digest is of the exact bytes, which skopeo would reformat.
        done = self._run("inspect", "--config", "--raw", *daemon, source)
        if done.returncode:
            hint = "build it again, or start the engine; the log has skopeo's output"
            raise self._error(f"can't read the image {reference} in {engine}'s storage", done, hint)
        return source, _digest(done.stdout)

    def remote(self, tag: str) -> Manifest | None:
        """Look a tag up in the registry.

        Returns:
            The image, or None when there is no such tag.

        Raises:
            UnavailableError: The registry does not answer, or refuses.
            UsageError: The tag names several images.
        """
        options = [*self._auth, *(["--tls-verify=false"] if self._http else [])]
        done = self._run("inspect", "--raw", *options, f"docker://{self.repository}:{tag}")
        if done.returncode:
            if any(word in done.stderr.decode() for word in ABSENT):
                return None
            raise self._error(f"can't read {self.repository}:{tag}", done)
        # A list of images has no configuration of its own (image-spec, image index).
        config = parse_json(done.stdout).get("config")
        if config is None:
            raise UsageError(f"{self.repository}:{tag} names a list of images; wanted: a tag of one image")
        return Manifest(_digest(done.stdout), config["digest"])

    def copy(self, source: str, tag: str) -> Manifest:
        """Push an image, or give one that is in the repository a further tag.

        Args:
            source: The address from `local`, or the digest of a manifest in the repository.

        Returns:
            The image that the registry then has under that tag.

        Raises:
            UnavailableError: The registry or the engine refuses.
        """
        options = [*self._auth, *(["--dest-tls-verify=false"] if self._http else [])]
        if host := _docker_host(source):
            options.append(f"--src-daemon-host={host}")
        if source.startswith("sha256:"):
            source = f"docker://{self.repository}@{source}"
            options += ["--preserve-digests", *(["--src-tls-verify=false"] if self._http else [])]
        done = self._run("copy", *options, source, f"docker://{self.repository}:{tag}")
        if done.returncode:
            raise self._error(f"can't push {self.repository}:{tag}", done)
        # Read back, for the digest under which the registry has it.
        if (manifest := self.remote(tag)) is None:
            raise UnavailableError(f"{self.repository}:{tag} was pushed, and the registry does not have it")
        return manifest

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        done = programs.run(["skopeo", *arguments], limit_s=programs.LONG_S)
        with self._log.open("ab") as log:
            log.write(f"$ skopeo {' '.join(arguments)}\n".encode())
            log.write(done.stderr if arguments[0] == "inspect" else done.stdout + done.stderr)
        return done

    def _error(
        self, message: str, done: subprocess.CompletedProcess[bytes], hint: str = ""
    ) -> UnavailableError:
        output = done.stderr.decode(errors="replace").strip().splitlines()
        if not hint and any("unauthorized" in line or "denied" in line for line in output):
            hint = f"log in: skopeo login {self.repository.partition('/')[0]}; on ECR, look at the IAM policy"
        return UnavailableError(f"{message} (log: {self._log})", hint=hint, details=tuple(output[-3:]))


def _docker_host(source: str) -> str | None:
    """The daemon's address, for skopeo itself does not read DOCKER_HOST."""
    return os.environ.get("DOCKER_HOST") if source.startswith(TRANSPORTS["docker"]) else None


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
