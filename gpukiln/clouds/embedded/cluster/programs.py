"""Finds the programs of a cluster: in a folder, or downloaded by the checksum of components.yaml."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpukiln.catalog.architectures import MACHINES
from gpukiln.catalog.components import load_server_archive
from gpukiln.errors import UnavailableError, UsageError

VARIABLE = "KUBEBUILDER_ASSETS"  # setup-envtest of controller-runtime sets it
SERVER = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
ETCD = "etcd"
# Plug-ins of the container network interface that containerd runs for each pod.
CNI = ("bridge", "host-local", "loopback")
CNI_FOLDERS = ("/opt/cni/bin", "/usr/lib/cni")  # upstream's, and Debian's containernetworking-plugins
# NVIDIA's; a machine whose image has them uses its own.
TOOLKIT = ("nvidia-container-runtime", "nvidia-ctk", "nvidia-cdi-hook")
PLUGIN, STAND_IN = "nvidia-device-plugin", "gpukiln-device-plugin"
CHUNK = 1 << 20
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Programs:
    """The programs of a cluster.

    Args:
        paths: By name; those of NVIDIA's toolkit and the device plugin only where they were found.
    """

    paths: dict[str, Path]

    def __getitem__(self, name: str) -> Path:
        return self.paths[name]

    def has(self, *names: str) -> bool:
        """Whether all of them were found."""
        return all(name in self.paths for name in names)


def find_programs(folder: str, cache: Path, say: Callable[[str], None]) -> Programs:
    """Find all programs, and download those of Kubernetes where no folder is given.

    Args:
        folder: Has them; empty: that of $KUBEBUILDER_ASSETS.
        cache: Keeps what was downloaded.

    Raises:
        UsageError: The folder does not exist.
        UnavailableError: A program is missing, or can't be downloaded.
    """
    named = folder or os.environ.get(VARIABLE, "")
    if named:
        assets = Path(named).expanduser().absolute()
        if not assets.is_dir():
            raise UsageError(
                f"{assets}: no such folder", hint=f"--assets, or ${VARIABLE}, names one with {SERVER[0]}"
            )
    else:
        assets = download(cache, say)
    places = [str(assets), str(assets / "cni"), *CNI_FOLDERS]
    paths = {name: _program(name, places) for name in (*SERVER, ETCD, *CNI, *TOOLKIT, PLUGIN)}
    paths[ETCD] = paths[ETCD] or _program(ETCD, os.environ.get("PATH", "").split(os.pathsep))
    missing = [name for name in (*SERVER, ETCD, *CNI) if paths[name] is None]
    if missing:
        raise UnavailableError(
            f"{assets} has no {', '.join(missing)}",
            hint="etcd is in Debian's package etcd-server, bridge, host-local and loopback in "
            "containernetworking-plugins; Kubernetes' programs are downloaded where neither --assets nor "
            f"${VARIABLE} is set",
        )
    return Programs({name: path for name, path in paths.items() if path})


def download(cache: Path, say: Callable[[str], None]) -> Path:
    """Kubernetes' programs of the version in components.yaml; downloaded once.

    Raises:
        UnavailableError: The file can't be fetched, or has another checksum; nothing is kept then.
    """
    archive = load_server_archive()
    target = cache / f"kubernetes-{archive.version}"
    if all((target / name).is_file() for name in SERVER):
        return target
    machine = MACHINES[os.uname().machine].name
    url = archive.url.format(version=archive.version, arch=archive.arch[machine])
    say(f"download {url}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as partial:
        file, unpacked = Path(partial) / "server.tar.gz", Path(partial) / "programs"
        _fetch(url, file, archive.sha512[machine])
        _unpack(file, unpacked)
        shutil.rmtree(target, ignore_errors=True)  # of a version of which a program was removed
        unpacked.rename(target)
    return target


def _fetch(url: str, target: Path, sha512: str) -> None:
    digest = hashlib.sha512()
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer, target.open("wb") as file:  # noqa: S310 - of components.yaml
            while chunk := answer.read(CHUNK):
                digest.update(chunk)
                file.write(chunk)
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"{url} can't be fetched: {error}",
            hint=f"--assets FOLDER, or ${VARIABLE}, names a folder with {', '.join(SERVER)}",
        ) from error
    if digest.hexdigest() != sha512:
        raise UnavailableError(
            f"{url} has the checksum {digest.hexdigest()}, wanted {sha512}",
            hint="check version and checksum of kubernetes_server in components.yaml",
        )


def _unpack(archive: Path, target: Path) -> None:
    target.mkdir()
    with tarfile.open(archive) as members:
        for name in SERVER:
            source = members.extractfile(f"kubernetes/server/bin/{name}")
            if source is None:
                raise UnavailableError(f"{archive.name} has no {name}")
            with (target / name).open("wb") as file:
                shutil.copyfileobj(source, file)
            (target / name).chmod(0o755)


def _program(name: str, folders: Iterable[str]) -> Path | None:
    path = shutil.which(name, path=os.pathsep.join(folders))
    return Path(path).resolve() if path else None
