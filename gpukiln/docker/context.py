"""Fetches and checks the files of a container image, and lays them out as its Dockerfile expects them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import Requirement

from gpukiln import programs
from gpukiln.catalog.architectures import ARCHITECTURES
from gpukiln.catalog.components import Component
from gpukiln.catalog.load import ROOT
from gpukiln.docker.plan import HOOKS, LOCKS, PROGRAMS, ContainerPart, ContainerPlan
from gpukiln.errors import UnavailableError
from gpukiln.files import atomic_path, name_full_disk_error, write_atomic

# Every file of a context has the same time, so that the same content makes the same layer.
EPOCH = 315532800  # 1980-01-01, the first that a zip file can state
WHEELS = {  # platform tags of wheels that run on the bases (glibc 2.35 and older), PEP 600 and PEP 513
    "x86_64": (
        "manylinux_2_35",
        "manylinux_2_28",
        "manylinux_2_17",
        "manylinux2014",
        "manylinux_2_12",
        "manylinux2010",
        "manylinux1",
    ),
    "arm64": ("manylinux_2_35", "manylinux_2_28", "manylinux_2_17", "manylinux2014"),
}
VERSION = 1  # of the layout of redistributables: a part of the cache's key
# Paths in NVIDIA's wheels: nvidia/cuda_nvrtc/lib/libnvrtc.so.12
NVIDIA_FILE = re.compile(r"nvidia/\w+/((?:bin|include|lib|nvvm)/.+)")
# Both spellings, and both places: PEP 639 moved licences to .dist-info/licenses.
LICENCE = re.compile(r"([\w.-]+)-[\d.]+\.dist-info/(?:licenses/)?(Licen[sc]e.*)", re.IGNORECASE)
FETCH_TIMEOUT_S = 60.0


def make_context(
    plan: ContainerPlan,
    folder: Path,
    *,
    cache: Path,
    component_of: Callable[[ContainerPart], Component],
    log: Path,
    say: Callable[[str], None],
    root: Path = ROOT,
) -> None:
    """Fill the build context of a container engine.

    Args:
        plan: The plan of the image.
        folder: An empty folder.
        cache: The folder of fetched files, on the same file system.
        component_of: Returns the component of a part, for its repository's key.
        log: The file for pip's output.

    Raises:
        UnavailableError: A file could not be fetched, or has another checksum.
    """
    source = root / "docker" / plan.image
    # All folders exist, though some stay empty: COPY of a missing one fails the build.
    for name in ("cuda", "cuda-apt", "actions-runner", "python/wheels", "hooks", "bin"):
        (folder / name).mkdir(parents=True)
    (folder / "apt-packages").write_text("".join(f"{package}\n" for package in plan.packages))
    for hook in HOOKS:
        _copy_script(root / hook, folder / "hooks" / PurePosixPath(hook).name)
    for program, name in PROGRAMS.items():
        _copy_script(root / program, folder / "bin" / name)
    say("fetching Python packages")
    lines = requirements_for((source / LOCKS["python"]).read_text(), plan.base.python, plan.architecture)
    wheels = _fetch_wheels(lines, plan, cache, log)
    for wheel in wheels:
        _link_or_copy(wheel, folder / "python/wheels" / wheel.name)
    (folder / "python/requirements.txt").write_text("".join(f"{line.partition(' ')[0]}\n" for line in lines))
    _add_cuda(plan, source, folder, cache=cache, component_of=component_of, log=log, say=say)
    for part in plan.components:
        if part.kind == "archive" and part.status == "install":
            say(f"fetching {part.name}")
            _unpack_archive(part, folder / "actions-runner", cache)
    (folder / "image.json").write_text(json.dumps(image_record(plan), indent=2) + "\n")
    # Last, for every write sets a new time.
    for path in folder.rglob("*"):
        os.utime(path, (EPOCH, EPOCH), follow_symlinks=False)


def image_record(plan: ContainerPlan) -> dict[str, Any]:
    """The image's record, /etc/gpukiln/image.json.

    Returns:
        Plain data.
    """
    return {
        "schema": 1,
        "image": plan.image,
        "digest": plan.digest,
        "version": plan.version,
        "git_commit": plan.git_commit,
        "base": {"name": plan.base_name, "image": plan.base.image, "title": plan.base.title},
        "cuda": plan.cuda,
        "user": plan.user,
        "size_budget_gib": plan.base.size_budget_gib,
        "components": {
            part.name: {
                "status": "installed" if part.status == "install" else part.status,
                "version": part.version,
                "packages": part.packages,
                "source": part.source,
                "reason": part.reason,
            }
            for part in plan.components
        },
    }


def requirements_for(lock: str, python: str, architecture: str) -> list[str]:
    """The lines of a lock file whose markers hold for a Python.

    >>> lock = 'tomli==2.0.1 ; python_version < "3.11" --hash=sha256:aa'
    >>> requirements_for(lock, "3.10", "x86_64")
    ['tomli==2.0.1 --hash=sha256:aa']
    >>> requirements_for(lock, "3.12", "x86_64")
    []

    Args:
        lock: A lock file with markers and hashes.
        python: For example "3.10".
        architecture: x86_64 or arm64.

    Returns:
        `name==version --hash=... --hash=...`, one package a line.
    """
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.20",  # a patch release, for markers that compare one
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": ARCHITECTURES[architecture].machine,
    }
    requirements = []
    for line in lock.replace("\\\n", " ").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        text, *hashes = line.split("--hash=")
        requirement = Requirement(text.strip())
        if requirement.marker is None or requirement.marker.evaluate(environment):
            requirements.append(
                " --hash=".join([f"{requirement.name}{requirement.specifier}", *(h.strip() for h in hashes)])
            )
    return requirements


def _fetch_wheels(lines: list[str], plan: ContainerPlan, cache: Path, log: Path) -> list[Path]:
    """The wheels of a lock file, each checked by its hash; fetched once."""
    # The key has all that decides which files pip downloads.
    key = hashlib.sha256("\n".join([plan.base.python, plan.platform, *lines]).encode()).hexdigest()[:16]
    folder = cache / "wheels" / key
    # The folder appears only when every wheel is in it, so it needs no further check.
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(folder) as partial:
            _download(lines, plan, partial, log)
    return sorted(folder.glob("*.whl"))


def _download(lines: list[str], plan: ContainerPlan, folder: Path, log: Path) -> None:
    folder.mkdir()
    (requirements := folder / "requirements.txt").write_text("\n".join(lines) + "\n")
    machine = ARCHITECTURES[plan.architecture].machine
    command = [
        *(sys.executable, "-m", "pip", "download"),
        *("--disable-pip-version-check", "--no-input", "--no-deps", "--require-hashes"),
        # Wheels only: a source distribution would run its build script here.
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={plan.base.python}"),
        *(f"--platform={tag}_{machine}" for tag in WHEELS[plan.architecture]),
        *("--progress-bar=off", "--no-cache-dir", f"--dest={folder}", f"--requirement={requirements}"),
    ]
    with log.open("ab") as output:
        done = programs.run(command, limit_s=programs.LONG_S, folder=folder, output=output)
    if done.returncode:
        printed = log.read_text(errors="replace").splitlines()
        if any("No space left on device" in line for line in printed):
            raise programs.disk_full(folder.parent)
        raise UnavailableError(
            f"{len(lines)} Python packages can't be fetched (log: {log})",
            hint="check that this machine's pip reaches its index, then try again",
            details=tuple([line for line in printed if line.startswith("ERROR")][-3:]),
        )
    requirements.unlink()


def _add_cuda(
    plan: ContainerPlan,
    source: Path,
    folder: Path,
    *,
    cache: Path,
    component_of: Callable[[ContainerPart], Component],
    log: Path,
    say: Callable[[str], None],
) -> None:
    nvidia = [part for part in plan.components if part.kind == "nvidia" and part.status == "install"]
    pins = [f"{name}={version}" for part in nvidia for name, version in part.packages.items()]
    (folder / "cuda-packages").write_text("".join(f"{pin}\n" for pin in pins))
    if nvidia:
        say("fetching the key of NVIDIA's repository")
        _add_repository(nvidia[0], component_of(nvidia[0]), plan, folder / "cuda-apt")
    names = {
        name
        for part in plan.components
        if part.kind == "index" and part.status == "install"
        for name in part.packages
    }
    lines = requirements_for((source / LOCKS["cuda"]).read_text(), plan.base.python, plan.architecture)
    chosen = [line for line in lines if line.partition("==")[0] in names]
    if chosen:
        say("fetching CUDA's redistributables")
        key = hashlib.sha256("\n".join([str(VERSION), *chosen]).encode()).hexdigest()[:16]
        kept = cache / "cuda" / key
        if not kept.is_dir():
            wheels = _fetch_wheels(chosen, plan, cache, log)
            say("unpacking them")
            kept.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(kept) as partial:
                for wheel in wheels:
                    unpack_redistributable(wheel, partial)
            # Unpacked they are in the cache; the wheels would double its size.
            shutil.rmtree(wheels[0].parent)
        shutil.copytree(kept, folder / "cuda", symlinks=True, copy_function=_link_or_copy, dirs_exist_ok=True)


def unpack_redistributable(wheel: Path, target: Path) -> None:
    """Lay out the files of one of NVIDIA's wheels as the CUDA toolkit has them.

    Args:
        wheel: For example nvidia_cuda_nvrtc_cu12-12.1.105-py3-none-manylinux1_x86_64.whl.
        target: The folder that becomes /usr/local/cuda-12.1: bin, include, lib64, nvvm and licences.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            licence = LICENCE.fullmatch(member.filename)
            match = NVIDIA_FILE.fullmatch(member.filename)
            # Python's packaging files are of no use outside site-packages.
            if member.is_dir() or not (match or licence) or member.filename.endswith("__init__.py"):
                continue
            if licence:
                name = f"licences/{licence[1]}-{licence[2].rpartition('/')[2]}"
            else:
                name = re.sub("^lib/", "lib64/", match[1])  # type: ignore[index]  # one of both was found
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as content, path.open("wb") as file:
                shutil.copyfileobj(content, file, 1 << 20)
            # Zip files carry modes only as platform-specific attributes; programs are known by their folder.
            path.chmod(0o755 if name.startswith(("bin/", "nvvm/bin/")) else 0o644)
            # Wheels have libcudart.so.12 without libcudart.so, which linkers look for.
            library = re.fullmatch(r"(lib\w[\w-]*\.so)\.[\d.]+", path.name)
            if library and not path.with_name(library[1]).exists():
                path.with_name(library[1]).symlink_to(path.name)


def _add_repository(part: ContainerPart, component: Component, plan: ContainerPlan, folder: Path) -> None:
    """Write NVIDIA's repository and its key, whose fingerprint is in components.yaml."""
    repository = component.repository.apt if component.repository else None
    if repository is None:
        raise UnavailableError(f"components.yaml has no apt repository for {part.name}")
    names = {
        "cuda_distribution": plan.base.cuda_distribution,
        "cuda_arch": ARCHITECTURES[plan.architecture].cuda,
    }
    key = _fetch(repository.key_url.format(**names))
    fingerprints = key_fingerprints(key)
    if repository.key_fingerprint not in fingerprints:
        raise UnavailableError(
            f"the key of {part.name}'s repository has the fingerprint "
            f"{', '.join(fingerprints) or 'of no key'}",
            hint=f"wanted {repository.key_fingerprint}; check whether NVIDIA documents a new key",
        )
    # The layout of /etc/apt, which the Dockerfile copies as a whole.
    (folder / "keyrings").mkdir()
    (folder / "keyrings/gpukiln-cuda.asc").write_bytes(key)
    (folder / "sources.list.d").mkdir()
    (folder / "sources.list.d/gpukiln-cuda.sources").write_text(
        f"Types: deb\nURIs: {part.source}\nSuites: {repository.suite}\n"
        "Signed-By: /etc/apt/keyrings/gpukiln-cuda.asc\n"
    )


def key_fingerprints(key: bytes) -> list[str]:
    """Fingerprints of the primary keys in a file.

    Args:
        key: The file's content, armoured or not.

    Returns:
        40 hexadecimal digits each; none where there is no key in it.
    """
    done = programs.run(
        ["gpg", "--batch", "--with-colons", "--show-keys"], limit_s=programs.QUICK_S, given=key
    )
    rows = [line.split(":") for line in done.stdout.decode().splitlines()]
    # `fpr` follows the `pub` or `sub` record that it belongs to (GnuPG, doc/DETAILS).
    return [row[9] for before, row in pairwise(rows) if before[0] == "pub" and row[0] == "fpr"]


def _unpack_archive(part: ContainerPart, target: Path, cache: Path) -> None:
    ((url, sha256),) = part.packages.items()
    kept = cache / "archives" / sha256
    if not kept.exists():
        content = _fetch(url)
        if (digest := hashlib.sha256(content).hexdigest()) != sha256:
            raise UnavailableError(
                f"{url} has the checksum {digest}, wanted {sha256}",
                hint=f"check version and checksum of {part.name} in components.yaml",
            )
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, content)
    with tarfile.open(kept) as archive:
        archive.extractall(target)  # noqa: S202 - its checksum is the one that was reviewed


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as answer:  # noqa: S310 - from components.yaml
            content: bytes = answer.read()
            return content
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"{url} can't be fetched: {error}", hint="check the network, then try again"
        ) from error


def _copy_script(source: Path, target: Path) -> None:
    with name_full_disk_error(target):
        shutil.copyfile(source, target)
    target.chmod(0o755)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    """Link a file, or copy it where the file system has no links."""
    # CUDA's files are some GiB: a copy would take that space in the cache and in every context.
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        with name_full_disk_error(Path(target)):
            shutil.copyfile(source, target)
