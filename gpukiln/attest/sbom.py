"""The software bill of materials of an image, as CycloneDX 1.6."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.license import DisjunctiveLicense, LicenseAcknowledgement
from cyclonedx.model.lifecycle import LifecyclePhase, PredefinedLifecycle
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import fixup_id

from gpukiln import __version__
from gpukiln.attest.image_contents import PRESENT, ImageContents, package_url
from gpukiln.catalog import drivers
from gpukiln.images.builds import Bake, Record
from gpukiln.parsing import parse_json

DRIVER = "nvidia_driver"


def make_sbom(record: Record, baked: Bake, installed: ImageContents) -> str:
    """The contents of an image: its system, its components and every package.

    Args:
        record: The build's record.
        installed: The image's own record of its packages.

    Returns:
        CycloneDX 1.6 as JSON; the same arguments always give the same text.
    """
    base = record.plan.base
    image = Component(
        type=ComponentType.PLATFORM,
        name=baked.name,
        version=baked.image_id,
        bom_ref=baked.image_id,
        description=f"{record.plan.image}, an AMI in {baked.region}",
        properties=[
            Property(name="gpukiln:build", value=record.build_id),
            Property(name="gpukiln:digest", value=record.plan.digest),
            *_left_out(baked),
        ],
    )
    system = Component(
        type=ComponentType.OPERATING_SYSTEM,
        name=base.distribution,
        version=base.release,
        bom_ref=f"os:{base.distribution}-{base.release}",
        properties=[
            Property(name="gpukiln:kernel", value=baked.kernel),
            Property(name="gpukiln:base-image", value=base.id),
        ],
    )
    packages = {name: _package(record, name, version, installed) for name, version in baked.packages.items()}
    bom = Bom(
        # A random serial number would give another digest for the same image, and the tag on the AMI would
        # not match.
        serial_number=uuid5(NAMESPACE_URL, f"urn:gpukiln:build:{record.build_id}"),
        metadata=BomMetaData(
            component=image,
            timestamp=datetime.fromisoformat(installed.built_at or record.plan.created_at),
            lifecycles=[PredefinedLifecycle(LifecyclePhase.BUILD)],
            tools=ToolRepository(components=list(_tools(record))),
        ),
        components=[system, *packages.values()],
    )
    # Without these edges tools such as Dependency-Track show the packages as unconnected.
    bom.register_dependency(image, [system, *packages.values()])
    for component, package in _components(baked):
        bom.components.add(component)
        bom.register_dependency(image, [component])
        bom.register_dependency(component, [packages[package]] if package in packages else [])
    return str(JsonV1Dot6(bom).output_as_string(indent=2)) + "\n"


def sbom_difference(sbom: bytes, baked: Bake) -> str:
    """Compare an SBOM with the record of an image.

    Args:
        sbom: Its content.

    Returns:
        The differences; empty where every package and component is there in its version.
    """
    try:
        document = parse_json(sbom)
        rows, of = document["components"], document["metadata"]["component"]["version"]
        there = {row["name"]: row["version"] for row in rows if "purl" in row}
        others = {row["bom-ref"]: row["version"] for row in rows if "purl" not in row}
    except (ValueError, KeyError, TypeError) as error:
        return f"the file is not a CycloneDX document with components: {error!r}"
    if of != baked.image_id:
        return f"found the SBOM of {of}, wanted that of {baked.image_id}"
    # An empty record and an emptied SBOM would be equal.
    if not baked.packages:
        return "the record lists no package, so there is nothing to compare with"
    present = {name: entry for name, entry in baked.components.items() if entry["status"] in PRESENT}
    expected = {f"component:{name}": entry["version"] for name, entry in present.items()}
    wrong = [
        *_version_differences(baked.packages, there),
        *_version_differences(expected, {k: others.get(k) for k in expected}),
    ]
    if not wrong:
        return ""
    # After an upgrade all packages may differ; three names are enough for a message.
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f"{len(there)} packages, the record has {len(baked.packages)}; wrong: {', '.join(wrong[:3])}{more}"


def _version_differences(expected: Mapping[str, str], actual: Mapping[str, str | None]) -> list[str]:
    names = sorted(expected.keys() | actual.keys())
    return [
        f"{name} {actual.get(name) or 'missing'} instead of {expected.get(name, 'nothing')}"
        for name in names
        if expected.get(name) != actual.get(name)
    ]


def _tools(record: Record) -> Iterator[Component]:
    yield Component(type=ComponentType.APPLICATION, name="gpukiln", version=__version__)
    for name, version in record.plan.inputs.items():
        if name.startswith("tool "):
            tool = name.removeprefix("tool ")
            yield Component(type=ComponentType.APPLICATION, name=tool, version=version)


def _package(record: Record, name: str, version: str, installed: ImageContents) -> Component:
    known = installed.details.get(name)
    purl = package_url(record.plan.base, name, version, installed)
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=purl.to_string(),
        purl=purl,
        licenses=[_license(text) for text in known.licenses] if known else (),
        properties=[
            Property(name="gpukiln:source-package", value=known.source),
            Property(name="gpukiln:source-version", value=known.source_version),
        ]
        if known
        else (),
    )


def _license(text: str) -> DisjunctiveLicense:
    # Some of Debian's short names are SPDX ids, others are not, such as GPL-2+: those stay names
    declared = LicenseAcknowledgement.DECLARED
    if spdx := fixup_id(text):
        return DisjunctiveLicense(id=spdx, acknowledgement=declared)
    return DisjunctiveLicense(name=text, acknowledgement=declared)


def _components(baked: Bake) -> Iterator[tuple[Component, str]]:
    for name, entry in baked.components.items():
        if entry["status"] not in PRESENT:
            continue
        yield _component(name, entry), entry.get("package", {}).get("name", "")
        # libcuda has no package of its own on every distribution, but scanners ask for the CUDA version that
        # the driver supports.
        known = drivers.branches().get(entry.get("branch") or 0)
        if name == DRIVER and known:
            yield (
                Component(
                    type=ComponentType.LIBRARY,
                    name="cuda-driver-api",
                    version=known.native_cuda,
                    bom_ref="component:cuda-driver-api",
                    supplier=OrganizationalEntity(name="NVIDIA"),
                    description=f"the CUDA version of libcuda in driver branch {known.branch}",
                ),
                entry.get("package", {}).get("name", ""),
            )


def _component(name: str, entry: dict[str, Any]) -> Component:
    # Only these components are from NVIDIA; Docker or nvtop have other suppliers.
    nvidia = name.startswith("nvidia_")
    return Component(
        type=ComponentType.DEVICE_DRIVER if name == DRIVER else ComponentType.APPLICATION,
        name=name,
        version=entry["version"],
        bom_ref=f"component:{name}",
        supplier=OrganizationalEntity(name="NVIDIA") if nvidia else None,
        properties=[
            Property(name=f"gpukiln:{key}", value=str(entry[key]))
            for key in ("status", "source", "branch")
            if entry.get(key)
        ],
    )


def _left_out(baked: Bake) -> Iterator[Property]:
    for name, entry in baked.components.items():
        if entry["status"] == "left_out":
            yield Property(name=f"gpukiln:left-out:{name}", value=entry["reason"])
