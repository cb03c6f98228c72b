"""Attests a release of gpukiln itself: an SBOM and a provenance statement of the wheel.

    python -m gpukiln.attest.wheel WHEEL [KEY]

writes next to a wheel of this checkout what `ami.attest` writes for an image: an SBOM (CycloneDX), an in-toto
statement (SLSA provenance v1) and, with a key (a file, or `sigstore:` in a CI job), its signature.
scripts/release builds the wheel and calls this; .github/workflows/release.yml calls scripts/release.
"""

from __future__ import annotations

import email
import hashlib
import json
import re
import sys
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpukiln.attest import signing
from gpukiln.attest.keyless import KeylessSigner
from gpukiln.attest.provenance import DIRTY, PREDICATE_TYPE, STATEMENT_TYPE, Descriptor, checkout
from gpukiln.catalog.load import ROOT
from gpukiln.errors import UsageError
from gpukiln.files import write_atomic
from gpukiln.images.commit import git_commit
from gpukiln.images.keys import SIGSTORE

BUILD_TYPE = "urn:gpukiln:build-type:wheel:v1"
LOCK = "requirements.lock"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", re.MULTILINE)


@dataclass(frozen=True)
class Wheel:
    """A wheel as its file says.

    Attributes:
        requirements: Each distribution that it needs, extras included, as pyproject.toml has it.
    """

    file: Path
    name: str
    version: str
    sha256: str
    requirements: tuple[Requirement, ...]

    @property
    def purl(self) -> PackageURL:
        """Its package URL, https://github.com/package-url/purl-spec."""
        return PackageURL("pypi", name=self.name, version=self.version)


def read_wheel(file: Path) -> Wheel:
    """Read the metadata of a wheel (PEP 566).

    Raises:
        UsageError: The file is no wheel.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            headers = email.message_from_bytes(archive.read(metadata))
        requirements = tuple(Requirement(line) for line in headers.get_all("Requires-Dist", ()))
        name, version = str(headers["Name"]), str(headers["Version"])
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"{file} is no wheel that can be read: {error}", hint="wanted: a file *.whl"
        ) from error
    return Wheel(file, name, version, hashlib.sha256(file.read_bytes()).hexdigest(), requirements)


def pins(lock: str) -> dict[str, str]:
    r"""Version of each distribution in a lock file, by its canonical name.

    >>> pins("PyYAML==6.0.2 \\\n    --hash=sha256:00\nboto3==1.40.1 \\\n")
    {'pyyaml': '6.0.2', 'boto3': '1.40.1'}
    """
    return {canonicalize_name(name): version for name, version in PIN.findall(lock)}


def make_sbom(wheel: Wheel, locked: dict[str, str], created: datetime) -> str:
    """SBOM of a wheel: the distributions that it needs, in the versions that the tests ran with.

    Args:
        locked: See `pins`. A requirement without a pin has no version in the SBOM.

    Returns:
        CycloneDX 1.6 as JSON; the same arguments always give the same text.
    """
    subject = Component(
        type=ComponentType.APPLICATION,
        name=wheel.name,
        version=wheel.version,
        bom_ref=wheel.purl.to_string(),
        purl=wheel.purl,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=wheel.sha256)],
    )
    # An extra may name a distribution that the core needs too: one component, with every requirement of it.
    needed: dict[str, list[str]] = {}
    for requirement in wheel.requirements:
        if canonicalize_name(requirement.name) != wheel.name:  # the extra `all` names the project itself
            needed.setdefault(canonicalize_name(requirement.name), []).append(str(requirement))
    components = [
        Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=locked.get(name),
            bom_ref=f"pkg:pypi/{name}",
            purl=PackageURL("pypi", name=name, version=locked.get(name)),
            properties=[Property(name="gpukiln:requirement", value=text) for text in texts],
        )
        for name, texts in sorted(needed.items())
    ]
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"urn:gpukiln:wheel:{wheel.sha256}"),
        metadata=BomMetaData(component=subject, timestamp=created),
        components=components,
    )
    bom.register_dependency(subject, components)
    return str(JsonV1Dot6(bom).output_as_string(indent=2)) + "\n"


def make_statement(wheel: Wheel, sbom: str, *, commit: str, lock: bytes, built: datetime) -> dict[str, Any]:
    """Provenance of a wheel: the in-toto statement that says from what and when it was built."""
    dependencies: list[Descriptor] = [
        *checkout(commit),
        {"name": LOCK, "digest": {"sha256": hashlib.sha256(lock).hexdigest()}},
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": wheel.file.name, "digest": {"sha256": wheel.sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"version": wheel.version},
                "internalParameters": {"python": ".".join(map(str, sys.version_info[:3]))},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": "urn:gpukiln:builder:wheel"},
                "metadata": {"finishedOn": built.strftime("%Y-%m-%dT%H:%M:%SZ")},
                "byproducts": [
                    {"name": "SBOM", "digest": {"sha256": hashlib.sha256(sbom.encode()).hexdigest()}}
                ],
            },
        },
    }


def attest(file: Path, key: str = "", root: Path = ROOT) -> list[Path]:
    """Write SBOM and provenance of a wheel that was built from a checkout, and with a key their signature.

    Args:
        file: The wheel.
        key: File of a private key, `sigstore:` for the identity of the CI job, or empty: nothing is signed.
        root: The checkout.

    Returns:
        The files that were written.

    Raises:
        UsageError: The checkout has changes that are not committed, or wheel or key can't be read.
    """
    commit = git_commit(root)
    if commit is None or commit.endswith(DIRTY):
        raise UsageError(
            f"the checkout {root} is {'changed since its last commit' if commit else 'no git repository'}",
            hint="a release is built from a commit: commit or stash what differs",
        )
    wheel = read_wheel(file)
    lock = (root / LOCK).read_bytes()
    built = datetime.fromtimestamp(file.stat().st_mtime, UTC)
    sbom = make_sbom(wheel, pins(lock.decode()), built)
    text = json.dumps(make_statement(wheel, sbom, commit=commit, lock=lock, built=built), indent=2) + "\n"
    contents = {".cdx.json": sbom, ".provenance.json": text}
    if key:
        signer = KeylessSigner() if key == SIGSTORE else signing.load_signer(Path(key))
        contents[".provenance.dsse.json"] = signing.sign(text.encode(), signer)
    written = []
    for suffix, content in contents.items():
        written.append(file.with_name(file.name + suffix))
        write_atomic(written[-1], content)
    return written


def main(argv: list[str]) -> int:
    """Attest the wheel that is named, and print the files that were written."""
    if len(argv) not in (1, 2):
        raise UsageError(
            f"found {len(argv)} arguments, wanted WHEEL [KEY]", hint="scripts/release FOLDER [KEY]"
        )
    key = argv[1] if len(argv) == 2 else ""
    sys.stdout.write("".join(f"{file}\n" for file in attest(Path(argv[0]), key)))
    return 0
