"""The plan of an image: what would be built from what; combinations that can't work are refused here."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpukiln import project as projects
from gpukiln.catalog import compat
from gpukiln.catalog.bases import NO_KUBERNETES
from gpukiln.catalog.bases import base as find_base
from gpukiln.catalog.components import (
    Component,
    apply_overrides,
    check_on_nodes,
    load_components,
    to_plain_data,
)
from gpukiln.catalog.driver_bases import check_published, components_on_base, suggest_bases
from gpukiln.catalog.images import ImageDefinition, load_image
from gpukiln.catalog.instance_types import gpus_of
from gpukiln.catalog.load import ROOT
from gpukiln.catalog.regions import check_region
from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.findings import Finding
from gpukiln.images.bases import ResolvedBase, resolve_base
from gpukiln.images.commit import git_commit
from gpukiln.images.digest import digest, image_inputs
from gpukiln.images.fit import check_types, refuse
from gpukiln.project import OwnRoles
from gpukiln.sources.decisions import Decision, Probes, decide_sources, with_resolved_driver
from gpukiln.typed import unknown
from gpukiln.verify.checks import LAYERS, PROFILES

NEEDED = ("nvidia_driver", "nvidia_container_toolkit", "cuda", "kubernetes")  # by the rules of compatibility


@dataclass(frozen=True)
class ImagePlan:
    """What would be built, and from what.

    Args:
        image: The image's name.
        architecture: x86_64 or arm64.
        cloud: The cloud's name.
        base: The base image that was found.
        instance_types: The GPU machines that the image must run on.
        builder_instance_type: The machine that it is built on.
        volume_size_gib: Size of the root volume in GiB.
        profile: The verification profile.
        required_layers: The layers whose checks must have run before a release.
        kubernetes: The Kubernetes version that the base has, or `NO_KUBERNETES`.
        components: The decision on each component.
        overrides: The `--set` values, as typed.
        warnings: Findings that do not stop the build.
        digest: The digest over `inputs`.
        inputs: Everything that can change the image, by name.
        created_at: When the plan was made, ISO 8601 in UTC.
        git_commit: The commit of the checkout, with -dirty when files differ from it; None: no commit.
        resolved: Every component as components.yaml and the overrides say it, with the kind of the driver's
            modules chosen: what the roles get.
        encrypted: Whether the root volume is encrypted.
        own_roles: The roles of the project that the image gets.
    """

    image: str
    architecture: str
    cloud: str
    region: str
    base: ResolvedBase
    instance_types: tuple[str, ...]
    builder_instance_type: str
    volume_size_gib: int
    profile: str
    required_layers: tuple[str, ...]
    kubernetes: str
    components: tuple[Decision, ...]
    overrides: tuple[str, ...]
    warnings: tuple[Finding, ...]
    digest: str
    inputs: dict[str, str]
    created_at: str
    git_commit: str | None
    resolved: dict[str, Any]
    encrypted: bool = True
    own_roles: OwnRoles = field(default_factory=OwnRoles)

    def component(self, name: str) -> Decision:
        """What happens to one component.

        Raises:
            UsageError: The image has no such component.
        """
        for decision in self.components:
            if decision.name == name:
                return decision
        raise unknown(f"component of {self.image}", name, [decision.name for decision in self.components])


def make_plan(
    image: str,
    cloud: Cloud,
    *,
    probes: Probes,
    base: str | None = None,
    instance_types: Sequence[str] = (),
    overrides: Sequence[str] = (),
    also: Sequence[str] = (),
    tools: Mapping[str, str] | None = None,
    signer: str = "",
    root: Path = ROOT,
    now: datetime | None = None,
) -> ImagePlan:
    """Resolve everything that an image is built from, and refuse what can't work.

    The rules that need no network come first, so that they refuse at once and without cost.

    Args:
        image: The image's name, for example eks-gpu.
        cloud: Where it is built.
        probes: How package sources are queried.
        base: The base's name; the cloud's default when None.
        instance_types: The GPU machines it must run on; the image's own when empty.
        overrides: For example `["nvidia_driver.branch=580"]`.
        also: Optional components that this build has in addition to the image's own.
        tools: The versions of the tools that build, by name; they count in the digest.
        signer: Checksum of the certificate that kernel modules are signed with; empty: they are not.
        now: The time for checks of ends of support; the present when None.

    Raises:
        UsageError: A name is unknown.
        IncompatibleError: By a rule it can never work; the details have every finding.
        UnavailableError: The cloud, a base image or a source can't be reached.
    """
    moment = now or datetime.now(UTC)
    check_region(cloud.region)
    definition = load_image(image, root)
    _check_choice(f"ami/{image}/image.yaml: profile", [definition.profile], PROFILES)
    _check_choice(f"ami/{image}/image.yaml: required layer", definition.required_layers, LAYERS)
    own_roles = projects.roles(image)
    # The order stays: the first type is the one that is verified first.
    types = tuple(dict.fromkeys(instance_types or definition.instance_types))
    base_name = base or cloud.default_base
    base_facts = find_base(base_name)
    components = chosen_components(root / "components.yaml", overrides, types, base_facts.system)
    _check_choice("components.yaml lacks", [], components, needed=NEEDED)
    optional = [name for name, component in components.items() if component.optional]
    _check_choice("optional component", also, optional)
    definition = replace(definition, components=tuple(dict.fromkeys((*definition.components, *also))))
    check_on_nodes(components, definition.components, f"ami/{image}/image.yaml")
    driver, kubernetes = components["nvidia_driver"], components["kubernetes"].version or ""

    findings = list(
        compat.check_base(
            base_name,
            base_facts,
            branch=driver.branch or 0,
            architecture=definition.architecture,
            keep_build_tools=driver.keep_build_tools is not False,
        )
    )
    findings += check_components(components, definition, moment)
    findings += check_types(
        types,
        base=base_name,
        architecture=definition.architecture,
        driver=driver.version or "",
        modules=driver.modules or "proprietary",
        cuda=components["cuda"].version or "",
    )
    if base_facts.has_kubernetes:
        findings += compat.check_kubernetes(kubernetes, today=moment.date())
        findings += check_published(base_name, base_facts, kubernetes)
    # Names bases that have the requested branch, where this base does not have it.
    findings = suggest_bases(findings, driver, base_facts)
    refuse(findings)

    resolved = resolve_base(
        base_name, base_facts, cloud, kubernetes=kubernetes, architecture=definition.architecture
    )
    decisions = decide_sources(
        definition.components,
        components,
        base_facts,
        architecture=definition.architecture,
        strict=cloud.strict_sources,
        probes=probes,
    )
    # From here on the driver has the version that the source really has.
    components = with_resolved_driver(components, decisions)
    inputs = image_inputs(root, definition, resolved, decisions, components, tools or {}, own_roles)
    gpus, switched = gpus_of(types)  # variables of the role nvidia_driver
    inputs["GPUs"] = ", ".join(gpus) + (" with NVSwitch" if switched else "")
    if signer:
        inputs["modules' signing certificate"] = signer
    # A newer kernel in the archive makes another image. A base on AWS has its own kernel, as its id says.
    if base_facts.kernel_package and not cloud.strict_sources:
        kernels = probes.candidates([base_facts.kernel_package])
        inputs["kernel"] = kernels.get(base_facts.kernel_package, "unknown")
    return ImagePlan(
        image=definition.name,
        architecture=definition.architecture,
        cloud=cloud.name,
        region=cloud.region,
        base=resolved,
        instance_types=types,
        builder_instance_type=definition.builder_instance_type,
        volume_size_gib=definition.volume_size_gib,
        profile=definition.profile,
        required_layers=definition.required_layers,
        kubernetes=kubernetes if base_facts.has_kubernetes else NO_KUBERNETES,
        components=decisions,
        overrides=tuple(overrides),
        warnings=tuple(finding for finding in findings if finding.severity == "warning"),
        digest=digest(inputs),
        inputs=inputs,
        created_at=moment.astimezone(UTC).isoformat(timespec="seconds"),
        git_commit=git_commit(root),
        resolved=to_plain_data(components),
        encrypted=definition.encrypted,
        own_roles=own_roles,
    )


def chosen_components(
    path: Path, overrides: Sequence[str], instance_types: Iterable[str], system: str
) -> dict[str, Component]:
    """The components of a build: those of its system, with overrides, and the driver's kernel modules chosen.

    Args:
        path: components.yaml.
        overrides: For example `["nvidia_driver.branch=580"]`.
        instance_types: The GPU machines that the image must run on.
        system: Distribution and release of the base, for example ubuntu-24.04.

    Returns:
        The components by name.

    Raises:
        UsageError: The file, an override or an instance type is wrong.
    """
    components = components_on_base(apply_overrides(load_components(path), overrides), system, overrides)
    driver = components.get("nvidia_driver")
    # Open or proprietary modules depend on the GPUs, which only the plan knows.
    if driver and driver.modules == "auto":
        modules = compat.choose_modules(driver.version or "", instance_types)
        components["nvidia_driver"] = replace(driver, modules=modules)
    return components


def _check_choice(
    what: str, given: Iterable[str], choices: Iterable[str], *, needed: Iterable[str] = ()
) -> None:
    known = list(choices)
    for name in given:
        if name not in known:
            raise unknown(what, name, known)
    if missing := [name for name in needed if name not in known]:
        raise UsageError(f"{what} {', '.join(missing)}; it has {', '.join(known) or 'nothing'}")


def check_components(
    components: Mapping[str, Component], image: ImageDefinition, moment: datetime
) -> list[Finding]:
    """Check the versions by themselves; `check_types` checks them against instance types.

    Args:
        components: The components, with overrides.
        moment: The time for ends of support and reviews.

    Returns:
        Every finding, in the order of the rules.

    Raises:
        UsageError: The catalogue does not know a version.
    """
    findings = [
        Finding(
            "review-overdue",
            "warning",
            f"{name} was to be reviewed by {components[name].review}",
            remedy="check whether its version in components.yaml is still right, and set the next date",
            source="components.yaml",
        )
        for name in image.components
        if components[name].review < moment.date()
    ]
    driver = components["nvidia_driver"]
    version, modules = driver.version or "", driver.modules or "proprietary"
    findings += compat.check_driver(version, modules, today=moment.date())
    if toolkit := components["nvidia_container_toolkit"].version:
        findings += compat.check_container_toolkit(toolkit)
    return findings
