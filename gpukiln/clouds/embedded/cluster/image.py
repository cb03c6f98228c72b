"""The image of the pods of a cluster of this computer: Python and a shell, out of a machine's own packages.

Nothing is downloaded: what Debian's package manager lists on the machine's disk becomes one layer.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# No registry has them: the kubelet finds the image on the node. It is that of the device plugin, too, whose
# pods are known by NVIDIA's name of its image.
NAME, PLUGIN_NAME = "gpukiln.local/rehearsal:1", "gpukiln.local/k8s-device-plugin:1"
PACKAGES = ("bash", "coreutils", "dash", "libc-bin", "python3")  # libc-bin: CDI's hooks run ldconfig
DRIVER, NVML = Path("/usr/lib/x86_64-linux-gnu/nvidia/current"), "libnvidia-ml.so.1"
STATUS, LISTS = Path("/var/lib/dpkg/status"), Path("/var/lib/dpkg/info")
LEFT_OUT = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/")
MERGED = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
# A pod's command takes the place of this one; the sandbox of a pod runs it, as Kubernetes' pause image, which
# ends by SIGTERM, too: a shutdown of the machine would wait 90 seconds for a process that ignores it.
COMMAND = ["/bin/sh", "-c", "trap 'exit 0' TERM; sleep infinity & wait"]
USER = 1001


def layer(extra: Mapping[str, bytes]) -> bytes:
    """The layer, as an archive; for `chroot.in_root`.

    Args:
        extra: More programs by their paths.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as members:
        # As Debian's base-files since Debian 12 (wiki.debian.org/UsrMerge).
        for name, target in MERGED.items():
            _add(members, name, kind=tarfile.SYMTYPE, target=target)
        for folder in ("dev", "etc", "proc", "sys", "tmp", "var/tmp"):
            _add(members, folder, kind=tarfile.DIRTYPE, mode=0o1777 if folder.endswith("tmp") else 0o755)
        _add(members, "etc/passwd", b"root:x:0:0:root:/:/bin/bash\n")
        for path in sorted(_files(closure(STATUS.read_text(errors="replace"), PACKAGES))):
            _add_file(members, Path(path))
        if DRIVER.is_dir():
            # ldconfig maps files shared, which virtiofs does not allow before Linux 6.6, so that the cache of
            # a container lacks the library of simulated GPUs. Debian's driver has this link on the machine.
            link = DRIVER.parent.parent / NVML
            _add(members, str(link).lstrip("/"), kind=tarfile.SYMTYPE, target=f"nvidia/current/{NVML}")
        for path, content in extra.items():
            _add(members, path.lstrip("/"), content, mode=0o755)
    return archive.getvalue()


def closure(status: str, names: Iterable[str]) -> set[str]:
    r"""Installed packages with all that they depend on; of alternatives the first that is installed.

    Args:
        status: dpkg's file (deb-control(5)).

    >>> text = "Package: a\nStatus: install ok installed\nDepends: x | b (>= 1), b\n\n"
    >>> sorted(closure(text + "Package: b\nStatus: install ok installed\n", ["a"]))
    ['a', 'b']
    >>> closure(text, ["none"])
    set()
    """
    needs: dict[str, list[list[str]]] = {}
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"(?m)^(Package|Status|Depends|Pre-Depends): (.*)$", paragraph))
        if fields.get("Status", "").endswith(" installed"):
            clauses = f"{fields.get('Pre-Depends', '')},{fields.get('Depends', '')}".split(",")
            needs[fields["Package"]] = [re.findall(r"(?:^|\|)\s*([^\s:(|]+)", clause) for clause in clauses]
    closed: set[str] = set()
    waiting = [name for name in names if name in needs]
    while waiting:
        name = waiting.pop()
        if name not in closed:
            closed.add(name)
            chosen = (next((other for other in clause if other in needs), None) for clause in needs[name])
            waiting += [other for other in chosen if other]
    return closed


def oci_archive(layer: bytes) -> bytes:
    """An image of one layer as an archive that `ctr images import` reads (OCI image layout)."""
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": COMMAND, "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    blobs = {digest: layer}
    config_part = _blob(blobs, "application/vnd.oci.image.config.v1+json", config)
    layer_part = {
        "mediaType": "application/vnd.oci.image.layer.v1.tar",
        "digest": f"sha256:{digest}",
        "size": len(layer),
    }
    manifest = {"schemaVersion": 2, "config": config_part, "layers": [layer_part]}
    manifest_part = _blob(blobs, "application/vnd.oci.image.manifest.v1+json", manifest)
    # containerd takes the image's name from this annotation (containerd, images/annotations.go).
    index = {
        "schemaVersion": 2,
        "manifests": [
            {**manifest_part, "annotations": {"io.containerd.image.name": name}}
            for name in (NAME, PLUGIN_NAME)
        ],
    }
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w", format=tarfile.GNU_FORMAT) as members:
        _add(members, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(members, "index.json", json.dumps(index).encode())
        for name, content in blobs.items():
            _add(members, f"blobs/sha256/{name}", content)
    return archive.getvalue()


def _blob(blobs: dict[str, bytes], media_type: str, document: Mapping[str, Any]) -> dict[str, Any]:
    content = json.dumps(document).encode()
    digest = hashlib.sha256(content).hexdigest()
    blobs[digest] = content
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}


def _files(packages: Iterable[str]) -> set[str]:
    paths: set[str] = set()
    for package in packages:
        # a package of several architectures has its own in the name
        for file in (*LISTS.glob(f"{package}.list"), *LISTS.glob(f"{package}:*.list")):
            paths |= {path for path in file.read_text().splitlines() if not path.startswith(LEFT_OUT)}
    return {path for path in paths if path != "/." and _is_content(Path(path))}


def _is_content(path: Path) -> bool:
    """Whether a path belongs into the layer: folders that are links elsewhere have their own entry."""
    merged = str(path).lstrip("/") in MERGED
    return not merged and (path.is_symlink() or path.is_dir() or path.is_file())


def _merged(path: str) -> str:
    """A path below the folders that Debian merged into /usr.

    >>> _merged("/lib/x86_64-linux-gnu/libc.so.6")
    'usr/lib/x86_64-linux-gnu/libc.so.6'
    """
    first, _, rest = path.lstrip("/").partition("/")
    return f"{MERGED[first]}/{rest}" if first in MERGED and rest else path.lstrip("/")


def _add_file(members: tarfile.TarFile, path: Path) -> None:
    """Add a file, folder or link.

    Not by `TarFile.add`: it looks for the names of owners, for which the C library could load a module from
    the machine's disk (nsswitch.conf(5)).
    """
    status, name = path.lstat(), _merged(str(path))
    if stat.S_ISLNK(status.st_mode):
        _add(members, name, kind=tarfile.SYMTYPE, target=str(path.readlink()))
    elif stat.S_ISDIR(status.st_mode):
        _add(members, name, kind=tarfile.DIRTYPE, mode=stat.S_IMODE(status.st_mode))
    else:
        _add(members, name, path.read_bytes(), mode=stat.S_IMODE(status.st_mode))


def _add(
    members: tarfile.TarFile,
    name: str,
    content: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    target: str = "",
    mode: int = 0o644,
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode, member.size = kind, target, mode, len(content)
    members.addfile(member, io.BytesIO(content))
