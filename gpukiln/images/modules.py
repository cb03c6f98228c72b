"""A cache of compiled kernel modules; an entry is verified before it is used.

An entry is an archive of `dkms mktarball` for one kernel. Its name is the SHA-256 of its key: the text in
which the role nvidia_driver lists everything that the modules depend on
(roles/nvidia_driver/files/module-key.sh). Next to the archive is a description with the key and the archive's
checksum. A machine that is baked gets a folder with the entries that may fit, uses those that fit exactly,
and adds the ones that it compiled.
"""

import gzip
import hashlib
import json
import lzma
import re
import shutil
import ssl
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from gpukiln import programs
from gpukiln.errors import GpukilnError, UsageError
from gpukiln.images.module_store import ModuleStore
from gpukiln.parsing import parse_json

PAIR_HINT = "name both: a private key (PEM, without a passphrase) and its certificate (DER)"
MODULES = "modules"  # folder of a build, as long as its machine is baked
OFFERED = 4  # newest entries of a driver version that a machine gets; an image seldom has more kernels
ARCHIVE, DESCRIPTION, KEY = ".tar.gz", ".json", ".key"
SIGNATURE_MARKER = b"~Module signature appended~\n"  # include/linux/module_signature.h
SIGNATURE_BYTES = 12  # struct module_signature, whose last four bytes are the signature's length
DECOMPRESSORS = {".ko": lambda content: content, ".gz": gzip.decompress, ".xz": lzma.decompress}


@dataclass(frozen=True)
class ModuleUse:
    """Origin of the modules for one kernel.

    Args:
        kernel: Its release.
        module: Name and version as DKMS has them.
        cached: Whether they came from the cache; else they were compiled.
        reason: Why, in words.
    """

    kernel: str
    module: str
    cached: bool
    reason: str


@dataclass(frozen=True)
class SigningPair:
    """The key pair that signs kernel modules, for Secure Boot.

    Args:
        key: Private key (PEM, without a passphrase).
        certificate: Certificate (DER).
    """

    key: Path
    certificate: Path

    @property
    def sha256(self) -> str:
        """Checksum of the certificate: a part of the keys of modules and of an image's digest."""
        return hashlib.sha256(self.certificate.read_bytes()).hexdigest()


def signing_pair(key: str, certificate: str) -> SigningPair | None:
    """The key pair that the options name.

    Args:
        key: Path of the private key, or empty.
        certificate: Path of the certificate, or empty.

    Raises:
        UsageError: One of them is missing, no file, or has the wrong format; or they are no pair.
    """
    if not key and not certificate:
        return None
    pair = SigningPair(Path(key).expanduser().absolute(), Path(certificate).expanduser().absolute())
    for option, typed, file in (
        ("--module-key", key, pair.key),
        ("--module-certificate", certificate, pair.certificate),
    ):
        if not file.is_file() or not typed:
            raise UsageError(
                f"{option} {typed or 'is missing'}{' is no file' if typed else ''}",
                hint=PAIR_HINT,
            )
    _check_pair(pair)
    return pair


def _check_pair(pair: SigningPair) -> None:
    """Check that key and certificate belong together, before an hour of baking depends on it."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415 - slow
    from cryptography.x509 import load_der_x509_certificate  # noqa: PLC0415 - slow to import

    try:
        public = load_pem_private_key(pair.key.read_bytes(), None).public_key()
    except (ValueError, TypeError) as error:
        raise UsageError(f"--module-key {pair.key} can't be used: {error}", hint=PAIR_HINT) from error
    try:
        certified = load_der_x509_certificate(pair.certificate.read_bytes()).public_key()
    except ValueError as error:
        raise UsageError(
            f"--module-certificate {pair.certificate} can't be used: {error}", hint=PAIR_HINT
        ) from error
    if public != certified:
        raise UsageError(f"{pair.certificate} is not the certificate of {pair.key}", hint=PAIR_HINT)


def read_key(text: str) -> dict[str, str]:
    """The parts of a key.

    >>> read_key("kernel=6.1.0-18-amd64")
    {'kernel': '6.1.0-18-amd64'}
    >>> read_key("flags=-O2 -DX=1")
    {'flags': '-O2 -DX=1'}

    Args:
        text: One NAME=VALUE a line.
    """
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def find_entry_fault(archive: Path, key: str, sha256: str, certificate: Path | None = None) -> str:
    """Verify an entry.

    Args:
        archive: An archive of `dkms mktarball`.
        key: The text that the entry is named after.
        sha256: The checksum in its description.
        certificate: The certificate that modules are signed with (DER); None: they are not signed.

    Returns:
        Why the entry is refused; empty when it can be used.
    """
    with archive.open("rb") as file:
        # The checksum finds damage in transit; who may write to the store could change both.
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        return f"its checksum is {digest[:12]}..., wanted {sha256[:12]}..."
    parts, modules = read_key(key), 0
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                # root of the baked machine unpacks it: a link, a device or `..` could write anywhere
                if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
                    return f"its member {member.name} is no plain file below the archive's root"
                # .ko, .ko.xz or .ko.gz, as the kernel's configuration compresses modules
                if ".ko" in path.suffixes and (content := tar.extractfile(member)):
                    modules += 1
                    if why := _module_fault(content.read(), path, parts, certificate):
                        return f"{path.name}: {why}"
    except (tarfile.TarError, OSError, EOFError, lzma.LZMAError, KeyError) as error:
        return f"it can't be read: {error!r}"
    # An archive without modules would count as compiled, and the node would have no driver.
    return "" if modules else "it has no module"


def _module_fault(content: bytes, path: PurePosixPath, key: dict[str, str], certificate: Path | None) -> str:
    if path.suffix not in DECOMPRESSORS:
        return f"it is compressed as {path.suffix}, wanted one of {', '.join(DECOMPRESSORS)}"
    content = DECOMPRESSORS[path.suffix](content)
    kernel, folder = key["kernel"], path.parts[-4:-2]
    if kernel not in path.parts:
        return f"it lies in {'/'.join(folder)}, wanted {kernel}"
    # vermagic begins with the release of the kernel that it was compiled for (include/linux/vermagic.h).
    magic = _modinfo_field(content, b"vermagic").split(" ")[0]
    if magic != kernel:
        return f"its vermagic names the kernel {magic or '(none)'}, wanted {kernel}"
    version = _modinfo_field(content, b"version")
    # Not every module of the package has a version; the kernel's release was checked before.
    if version and version != key["version"]:
        return f"its version is {version}, wanted {key['version']}"
    if key["signer"] == "none":
        return ""
    return _signature_fault(content, key["signer"], certificate)


def _modinfo_field(module: bytes, name: bytes) -> str:
    """A field of the section .modinfo, as `modinfo --field` prints it: strings that end with a zero byte."""
    match = re.search(rb"\0" + name + rb"=([^\0]*)\0", module)
    return match[1].decode(errors="replace") if match else ""


def _signature_fault(module: bytes, signer: str, certificate: Path | None) -> str:
    if certificate is None or hashlib.sha256(certificate.read_bytes()).hexdigest() != signer:
        return "it is signed with another key pair than this build's"
    if not module.endswith(SIGNATURE_MARKER):
        return "it is not signed"
    # The kernel appends: module, PKCS #7 signature, struct module_signature, marker (scripts/sign-file.c).
    body = module[: -len(SIGNATURE_MARKER)]
    length = int.from_bytes(body[-4:], "big")
    body = body[:-SIGNATURE_BYTES]
    if not 0 < length < len(body):
        return "its signature is damaged"
    with tempfile.TemporaryDirectory() as folder:
        signature, signed, pem = (Path(folder, name) for name in ("signature", "module", "certificate"))
        pem.write_text(ssl.DER_cert_to_PEM_cert(certificate.read_bytes()))
        signature.write_bytes(body[-length:])
        signed.write_bytes(body[:-length])
        # -nointern, -noverify: only this build's certificate counts, and its issuer does not (openssl-cms(1))
        done = programs.run(
            [
                *("openssl", "cms", "-verify", "-binary", "-inform", "DER", "-in", str(signature)),
                *("-content", str(signed), "-certfile", str(pem), "-nointern", "-noverify"),
                *("-out", "/dev/null"),
            ],
            limit_s=programs.QUICK_S,
        )
    return "its signature is not the certificate's" if done.returncode else ""


class ModuleCache:
    """The cache for one build.

    Args:
        store: Where the entries are.
        folder: The folder on this computer that is copied to the machine; created by `offer`.
        version: The driver's version.
        certificate: The certificate that the modules are signed with (DER), or None.
    """

    def __init__(
        self, store: ModuleStore, folder: Path, version: str, certificate: Path | None = None
    ) -> None:
        self._store, self.folder, self._version = store, folder, version
        self._certificate = certificate
        self._offered: set[str] = set()
        self._refused: dict[str, str] = {}

    def offer(self, say: Callable[[str], None]) -> None:
        """Copy the entries that may fit into the folder, without those that are refused.

        Args:
            say: Shows which entries are refused, and why.

        Raises:
            GpukilnError: The store can't be read.
        """
        self.folder.mkdir()
        entries = []
        # Only descriptions are read here: archives are large.
        for name in self._store.names(self._version):
            if name.endswith(DESCRIPTION):
                file = self.folder / Path(name).name
                self._store.get(name, file)
                try:
                    about = parse_json(file.read_text())
                    entries.append(
                        (str(about["created_at"]), file.stem, str(about["key"]), str(about["sha256"]))
                    )
                except (ValueError, KeyError, TypeError) as error:
                    self._refuse(file.stem, f"its description can't be read: {error!r}", say)
                file.unlink()
        # The newest first: they are the most likely to be of the base's kernel.
        for _, entry, key, sha256 in sorted(entries, reverse=True)[:OFFERED]:
            archive = self.folder / f"{entry}{ARCHIVE}"
            try:
                self._store.get(f"{self._version}/{archive.name}", archive)
                why = find_entry_fault(archive, key, sha256, self._certificate)
                # The machine trusts the name, so the name must belong to the key.
                if hashlib.sha256(key.encode()).hexdigest() != entry:
                    why = "its name is not its key's checksum"
            except (GpukilnError, OSError) as error:
                why = str(error)
            if why:
                archive.unlink(missing_ok=True)
                self._refuse(entry, why, say)
            else:
                self._offered.add(entry)

    def _refuse(self, entry: str, why: str, say: Callable[[str], None]) -> None:
        self._refused[entry] = why
        say(f"refused the modules {entry[:12]} of the cache: {why}")

    def collect(self, build_id: str, say: Callable[[str], None]) -> tuple[ModuleUse, ...]:
        """Report which entries the machine used, and keep what it compiled.

        Args:
            build_id: The build, for the description of new entries.

        Returns:
            The origin of the modules, one a kernel.
        """
        uses = []
        # The role leaves a key file for each kernel, with an archive next to it where it compiled.
        for file in sorted(self.folder.glob(f"*{KEY}")):
            key = file.read_text()
            parts = read_key(key)
            if file.stem in self._offered:
                reason = f"compiled before with {parts['compiler']}, verified"
            else:
                why = self._refused.get(file.stem)
                reason = f"the cache's entry was refused: {why}" if why else "the cache had no entry"
                reason += f"; {self._keep(file.stem, key, build_id)}"
            use = ModuleUse(
                parts["kernel"], f"{parts['module']}/{parts['version']}", file.stem in self._offered, reason
            )
            say(module_line(use))
            uses.append(use)
        shutil.rmtree(self.folder)
        return tuple(uses)

    def _keep(self, entry: str, key: str, build_id: str) -> str:
        archive = self.folder / f"{entry}{ARCHIVE}"
        if not archive.exists():
            return "they were not kept: they were not compiled to the end"
        with archive.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if why := find_entry_fault(archive, key, sha256, self._certificate):
            return f"they were not kept: {why}"
        about = {
            "schema": 1,
            "key": key,
            "sha256": sha256,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "build_id": build_id,
        }
        description = self.folder / f"{entry}{DESCRIPTION}"
        try:
            description.write_text(json.dumps(about, indent=2) + "\n")
            self._store.put(archive, f"{self._version}/{archive.name}")
            # The description last: an archive without one is no entry, so a kill leaves no incomplete entry.
            self._store.put(description, f"{self._version}/{description.name}")
        except (GpukilnError, OSError) as error:
            return f"they were not kept: {error}"
        return "they are kept"


def module_line(use: ModuleUse) -> str:
    """Origin of modules, in words."""
    origin = "from the cache" if use.cached else "compiled"
    return f"modules {use.module} for {use.kernel}: {origin} ({use.reason})"
