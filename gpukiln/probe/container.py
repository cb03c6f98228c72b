"""Runs nvidia-smi in a container of every engine. Runs on the machine that is verified.

The container's image is built from this machine's C library only: no registry is needed, and nvidia-smi and
the driver's libraries must come from the container toolkit. Image and container are removed afterwards.
"""

# See gpukiln/probe/gather.py.

# ruff: noqa: PTH110, PTH118, PTH207
from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import tarfile
import tempfile
from typing import Any

from gpukiln.probe.base import (
    NOT_REACHED,
    NotReachedError,
    check_output,
    pci_gpus,
    read,
    require_driver_answers,
    run,
    tail,
)

NAME = "gpukiln-verify:probe"
# containerd and podman expand short names with a registry's name; that registry is never contacted.
FULL_NAME = f"docker.io/library/{NAME}"
NAMESPACE = "gpukiln-verify"  # of containerd, so that images of others are not touched
TIMEOUT_S = 180
# Ubuntu's EKS images: the script that joins a cluster, and the files with which it replaces containerd's.
JOIN_SCRIPT = "/etc/eks/bootstrap.sh"
JOIN_TEMPLATES = "/usr/local/share/eks/*config*.toml"
CONTAINERD_DROP_IN = "/etc/systemd/system/containerd.service.d/gpukiln.conf"
LIBRARIES = r"(/\S*(?:ld-linux|libc\.|libm\.|libdl\.|librt\.|libpthread\.)\S*)"


def container() -> dict[str, Any]:
    """{engine: {rc, out}} of nvidia-smi -L in a container of docker, containerd and podman.

    Empty without a GPU or the container toolkit; engines that are not installed are left out.
    """
    require_driver_answers()
    if not pci_gpus() or run("sh", "-c", "command -v nvidia-ctk")["rc"] != 0:
        return {}
    # Debian's /usr/bin/nvidia-smi is a link of update-alternatives; ldd needs the program.
    program = os.path.realpath("/usr/bin/nvidia-smi")
    return probe(libraries_of(program), ["nvidia-smi", "-L"])


def libraries_of(program: str) -> list[str]:
    """Paths of the C library's parts that a program is linked with."""
    return sorted(set(re.findall(LIBRARIES, check_output("ldd", program))))


def probe(paths: list[str], command: list[str]) -> dict[str, Any]:
    """Run a command in a container of each installed engine: {engine: {rc, out}}.

    paths are the files of the container's image.
    """
    engines = {"docker": _docker, "containerd": _containerd, "podman": _podman}
    tools = {"containerd": "ctr"}
    results: dict[str, Any] = {}
    with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
        archive.write(_archive(paths))
        archive.flush()
        for name, start in engines.items():
            if run("sh", "-c", f"command -v {tools.get(name, name)}")["rc"] == 0:
                try:
                    done = start(archive.name, command)
                    results[name] = {"rc": done["rc"], "out": (done["out"] + done["err"])[:2000]}
                except NotReachedError as error:
                    results[name] = {NOT_REACHED: str(error)}
    return results


def _docker(archive: str, command: list[str]) -> dict[str, Any]:
    loaded = run("docker", "load", "--quiet", "--input", archive, timeout=TIMEOUT_S)
    if loaded["rc"] != 0:
        return loaded
    try:
        # Without network: the test must not depend on CNI or on an address range.
        options = ("--rm", "--network", "none", "--gpus", "all")
        return run("docker", "run", *options, NAME, *command, timeout=TIMEOUT_S)
    finally:
        run("docker", "image", "rm", "--force", NAME)


def _podman(archive: str, command: list[str]) -> dict[str, Any]:
    loaded = run("podman", "load", "--quiet", "--input", archive, timeout=TIMEOUT_S)
    if loaded["rc"] != 0:
        return loaded
    try:
        # Podman would else ask a registry for the name.
        options = ("--rm", "--network", "none", "--device", "nvidia.com/gpu=all", "--pull", "never")
        return run("podman", "run", *options, FULL_NAME, *command, timeout=TIMEOUT_S)
    finally:
        run("podman", "image", "rm", "--force", FULL_NAME)


def _containerd(archive: str, command: list[str]) -> dict[str, Any]:
    ctr = ("ctr", "--namespace", NAMESPACE)
    loaded = run(*ctr, "images", "import", archive, timeout=TIMEOUT_S)
    if loaded["rc"] != 0:
        return loaded
    try:
        options = ("--rm", "--runc-binary", "nvidia-container-runtime", "--env", "NVIDIA_VISIBLE_DEVICES=all")
        return run(*ctr, "run", *options, FULL_NAME, "gpukiln-probe", *command, timeout=TIMEOUT_S)
    finally:
        run(*ctr, "images", "remove", "--sync", FULL_NAME)
        # An empty namespace would stay as a trace of the verification.
        run("ctr", "namespaces", "remove", NAMESPACE)


def runtimes_in(dump: dict[str, Any]) -> list[str]:
    """The runtimes in the output of `containerd config dump`.

    >>> runtimes_in({"out": "[plugins.cri.containerd.runtimes.nvidia]"})
    ['nvidia']
    >>> runtimes_in({"out": ""})
    []
    """
    return sorted(set(re.findall(r"runtimes\.[\"']?([\w-]+)[\"']?\]", dump["out"])))


def runtimes_after_join() -> dict[str, dict[str, Any]]:
    """{template: {rc, error, runtimes}}: containerd after an Ubuntu EKS image has joined a cluster.

    /etc/eks/bootstrap.sh replaces containerd's configuration with one of these and restarts it. Here
    a copy goes through the commands that systemd runs before containerd; the machine's own file is not
    changed.
    """
    if not os.path.exists(JOIN_SCRIPT):
        return {}
    results = {}
    lines = (read(CONTAINERD_DROP_IN) or "").splitlines()
    commands = [shlex.split(line.partition("=")[2]) for line in lines if line.startswith("ExecStartPre=")]
    for template in sorted(glob.glob(JOIN_TEMPLATES)):
        with tempfile.TemporaryDirectory() as folder:
            copy = os.path.join(folder, "config.toml")
            shutil.copy(template, copy)
            said = [run(*command, copy) for command in commands]
            said.append(run("containerd", "--config", copy, "config", "dump", timeout=120))
        wrong = next((answer for answer in said if answer["rc"] != 0), said[-1])
        results[template] = {
            "rc": wrong["rc"],
            "error": tail(wrong["err"], 500),
            "runtimes": runtimes_in(said[-1]),
        }
    return results


def _archive(paths: list[str]) -> bytes:
    """An image of one layer in the form of `docker save`, which every engine reads."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for path in paths:
            # The loader's path in the program is a link on merged-/usr systems; the image has no links.
            tar.add(os.path.realpath(path), arcname=path.lstrip("/"))
    config = {
        # the catalogue with the names of architectures is not sent to machines
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine),
        "os": "linux",
        "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [NAME], "Layers": ["layer.tar"]}]
    files = {
        "layer.tar": layer.getvalue(),
        "config.json": json.dumps(config).encode(),
        "manifest.json": json.dumps(manifest).encode(),
    }
    image = io.BytesIO()
    with tarfile.open(fileobj=image, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return image.getvalue()
