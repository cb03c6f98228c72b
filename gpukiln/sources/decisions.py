"""Decides, before a build starts, where each component comes from and whether it is available."""

import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Literal

from gpukiln.catalog.architectures import ARCHITECTURES
from gpukiln.catalog.bases import Base
from gpukiln.catalog.components import AptRepository, Component, Components, RpmRepository
from gpukiln.catalog.driver_bases import bases_with
from gpukiln.errors import IncompatibleError, UnavailableError
from gpukiln.parsing import MAX_NUMBER_CHARS
from gpukiln.sources.apt import candidate_versions, strip_credentials, upstream_version
from gpukiln.sources.rpm import RpmMetadata, read_metadata
from gpukiln.sources.ubuntu import Index, driver_package, read_archive
from gpukiln.typed import unknown

# A plan asks several sources, and a user waits for it.
PROBE_TIMEOUT_S = 5.0
ESSENTIAL = "nvidia_driver"
"""The component without which no GPU image is built."""
DRIVER_MODULE = "nvidia-driver"
"""The module of NVIDIA's rpm repositories whose streams are the driver's branches."""


@dataclass(frozen=True)
class Decision:
    """Whether a build installs a component, from where, and why.

    Args:
        name: The component.
        status: install, left_out, or preinstalled in the base.
        version: The wanted version; None: the version that the source has.
        package_version: The package's full version, or None where it is only known at build time.
        branch: The branch of the driver.
        source: The source, as text.
        reason: Why this version, or why it is left out.
    """

    name: str
    status: Literal["install", "left_out", "preinstalled"]
    version: str | None
    package_version: str | None
    branch: int | None
    source: str
    reason: str


@dataclass(frozen=True)
class Probes:
    """The functions that ask the network; tests replace them.

    Args:
        unreachable: Takes an address; returns None where it answers, else the reason.
        candidates: Takes package names; returns the versions in this machine's Debian mirror.
        rpm: Takes an rpm repository's address; returns its contents, None where they can't be read.
        ubuntu: Takes a release and an architecture; returns the contents of Ubuntu's archive, None where they
            are unknown.
    """

    unreachable: Callable[[str], str | None]
    candidates: Callable[[Sequence[str]], Mapping[str, str]]
    rpm: Callable[[str], RpmMetadata | None]
    ubuntu: Callable[[str, str], Index | None] = lambda *_: None

    @classmethod
    def real(cls, cache: Path, *, refresh: bool = False) -> "Probes":
        """The functions that ask the real network.

        Args:
            cache: A folder for the private apt state.
            refresh: Whether to fetch package lists that are still fresh.
        """
        candidates = partial(candidate_versions, cache=cache, refresh=refresh)
        return cls(http_unreachable, candidates, read_metadata, read_archive)


def http_unreachable(url: str, *, timeout_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Check whether an address can be read.

    Args:
        url: An http, https or file address.
        timeout_s: How long to wait, in seconds.

    Returns:
        None where it can be read, else the reason, without credentials.
    """
    if not url.startswith(("http://", "https://", "file://")):
        return f"{strip_credentials(url)} is not an http, https or file address"
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310 - schemes checked above
            # Headers alone do not show that the content arrives.
            answer.read(1)
    except urllib.error.HTTPError as error:
        return f"{strip_credentials(url)} answered {error.code} {error.reason}"
    except (OSError, ValueError, HTTPException) as error:
        # str() of a URLError has <urlopen error ...> around the reason.
        why = error.reason if isinstance(error, urllib.error.URLError) else error
        return f"{strip_credentials(url)} can't be reached: {strip_credentials(str(why))}"
    return None


def decide_sources(
    names: Iterable[str],
    components: Components,
    base: Base,
    *,
    architecture: str,
    strict: bool,
    probes: Probes,
) -> tuple[Decision, ...]:
    """Decide the source of every component of an image.

    Args:
        names: The components of the image.
        components: Those of components.yaml with the overrides.
        base: The base that the image is built on.
        architecture: x86_64 or arm64.
        strict: Whether a source that can't be reached is an error (see `Cloud.strict_sources`).
        probes: The functions that ask the network.

    Returns:
        One decision for each component, in the order of `names`.

    Raises:
        UsageError: A name is no component.
        UnavailableError: A required source can't be reached.
        IncompatibleError: The archive has another version than the one wanted.
    """
    chosen = {}
    for name in names:
        if name not in components:
            raise unknown("component", name, components)
        chosen[name] = components[name]
    driver_branch = components[ESSENTIAL].branch if ESSENTIAL in components else None
    # Machines of a strict cloud (AWS) use their own archive; those of the embedded cloud use this machine's
    # mirror.
    look_up = not strict and base.distribution == "debian"
    packages = {
        name: package
        for name, component in chosen.items()
        if not _repository(component, base, architecture)
        and component.downloads is None
        and (package := _package(name, component, base, driver_branch))
    }
    versions = probes.candidates(list(packages.values())) if look_up and packages else {}
    decisions = []
    for name, component in chosen.items():
        if _is_in_base(name, component, base):
            decision = _from_base(name, component, base)
        elif component.downloads is not None:
            decision = _from_download(name, component, base, architecture, strict, probes)
        elif repository := _repository(component, base, architecture):
            decision = _from_repository(name, component, repository, architecture, strict, probes)
            if decision.status == "install" and isinstance(repository, RpmRepository):
                package = _package(name, component, base, driver_branch)
                decision = _from_rpm(decision, component, package, probes.rpm(repository.root(architecture)))
        elif name not in packages:
            why = f"components.yaml has no package of it for {base.title}"
            decision = _decision(name, component, "left_out", reason=why)
        elif look_up:
            decision = _from_mirror(name, component, base, packages[name], versions.get(packages[name]))
        else:
            where = f"{component.source}: {packages[name]}, its version is resolved at build time"
            decision = _decision(name, component, "install", source=where)
            on_ubuntu = name == ESSENTIAL and base.distribution == "ubuntu"
            if on_ubuntu and (index := probes.ubuntu(base.release, architecture)):
                driver_version = None if component.newest else component.version
                package_version = driver_package(
                    index, packages[name], driver_version, component.branch, base.title
                )
                decision = replace(
                    decision,
                    version=upstream_version(package_version),
                    source=f"Ubuntu archive: {packages[name]}",
                    package_version=package_version,
                )
        decisions.append(decision)
    return tuple(decisions)


def _decision(
    name: str,
    component: Component,
    status: Literal["install", "left_out", "preinstalled"],
    *,
    source: str | None = None,
    reason: str | None = None,
    package_version: str | None = None,
) -> Decision:
    version = component.version
    if version is None and package_version:
        version = upstream_version(package_version)
    return Decision(
        name=name,
        status=status,
        version=version,
        package_version=package_version,
        branch=component.branch,
        source=source or component.source,
        reason=reason or component.reason,
    )


def _package(name: str, component: Component, base: Base, branch: int | None) -> str | None:
    if component.from_base or _is_in_base(name, component, base):
        return None
    packages = (component.open_packages if component.modules == "open" else component.packages) or {}
    if base.distribution not in packages:
        raise IncompatibleError(
            f"components.yaml names no package of {name} for {base.distribution}",
            hint=f"add it below components.{name}.packages",
        )
    template = packages[base.distribution]
    return template.format(branch=branch) if template else None


def _is_in_base(name: str, component: Component, base: Base) -> bool:
    if component.from_base:
        return True
    return base.driver_preinstalled is not None and ESSENTIAL in (name, component.part_of)


def _from_base(name: str, component: Component, base: Base) -> Decision:
    if component.from_base and not base.has_kubernetes:
        return _decision(name, component, "left_out", reason=f"the base has none: {base.title}")
    if component.from_base:
        return _decision(name, component, "preinstalled", reason=f"comes with the base: {base.title}")
    note = f"comes with the base: {base.title}; the version is read at build time"
    return Decision(name, "preinstalled", None, None, component.branch, "the base image", note)


def _repository(component: Component, base: Base, architecture: str) -> AptRepository | RpmRepository | None:
    if component.repository is None:
        return None
    source = component.repository.of(base.os_family, base.distribution)
    if source is None:
        return None
    cuda_arch = ARCHITECTURES[architecture].cuda
    url = source.url.replace("{cuda_distribution}", base.cuda_distribution)
    return replace(source, url=url.replace("{cuda_arch}", cuda_arch))


def _from_repository(
    name: str,
    component: Component,
    repository: AptRepository | RpmRepository,
    architecture: str,
    strict: bool,
    probes: Probes,
) -> Decision:
    # A repository that does not answer now would fail the build after minutes.
    if why := probes.unreachable(repository.probe(architecture)):
        # On AWS a missing source is a fault of the network; the embedded cloud may run on a laptop without
        # one.
        if strict or name == ESSENTIAL:
            kind = "apt" if isinstance(repository, AptRepository) else "rpm"
            raise UnavailableError(
                f"the source of {name} can't be used: {why}",
                hint=f"check the network, or --set {name}.repository.{kind}.url=...",
            )
        return _decision(name, component, "left_out", reason=why)
    return _decision(name, component, "install", source=strip_credentials(repository.url))


def _from_download(
    name: str, component: Component, base: Base, architecture: str, strict: bool, probes: Probes
) -> Decision:
    """The decision on a file that the vendor publishes; the role verifies its checksum."""
    file = (component.downloads or {}).get(base.system)
    if file is None or architecture not in file.sha256:
        why = f"components.yaml has no file with a checksum for {base.title} on {architecture}"
        return _decision(name, component, "left_out", reason=why)
    url = file.address(component.version or "", architecture)
    if (problem := probes.unreachable(url)) is None:
        return _decision(name, component, "install", source=strip_credentials(url))
    if strict:
        raise UnavailableError(
            f"the source of {name} can't be used: {problem}",
            hint="check the network, or build without this component",
        )
    return _decision(name, component, "left_out", reason=problem)


def _from_rpm(
    decision: Decision, component: Component, package: str | None, repository: RpmMetadata | None
) -> Decision:
    """The decision with the version that the repository has."""
    if repository is None or package is None:
        return decision
    name = decision.name
    # NVIDIA's repositories have one module stream for each branch, with open or proprietary modules (dkms).
    streams = repository.streams.get(DRIVER_MODULE, ()) if name == ESSENTIAL else ()
    stream = f"{component.branch}-{'open' if component.modules == 'open' else 'dkms'}"
    if streams and stream not in streams:
        raise IncompatibleError(
            f"{decision.source} has the streams {', '.join(sorted(streams))} of {DRIVER_MODULE}; "
            f"wanted: {stream}",
            hint=f"--set {name}.branch=... to one of these, or another base",
        )
    # Compared by numbers: as text 9 would be newer than 10.
    versions = sorted(repository.versions.get(package, ()), key=_numbers)
    fitting = [version for version in versions if _version_matches(component, version.rpartition("-")[0])]
    if not fitting:
        has = f"has {package} {', '.join(versions[-5:])}" if versions else f"has no package {package}"
        wanted_text = (
            f"of branch {component.branch}" if component.newest else component.version or "in any version"
        )
        raise IncompatibleError(
            f"{decision.source} {has}, wanted {name} {wanted_text}",
            hint=f"--set {name}.version=..., or another base",
        )
    if component.version is None:
        return decision
    return replace(decision, version=fitting[-1].rpartition("-")[0], package_version=fitting[-1])


def _version_matches(component: Component, version: str) -> bool:
    """Whether a source's version is the wanted one."""
    if component.newest:
        return version.partition(".")[0] == str(component.branch)
    return component.version in (None, version)


def with_resolved_driver(components: Components, decisions: Iterable[Decision]) -> dict[str, Component]:
    """The components with the driver's exact version, where only its branch was given."""
    version = {decision.name: decision.version for decision in decisions}.get(ESSENTIAL)
    if not version:
        return dict(components)
    return {**components, ESSENTIAL: replace(components[ESSENTIAL], version=version)}


def _numbers(version: str) -> list[int]:
    """The numbers of a version, to compare two.

    >>> _numbers("570.9.1-1") < _numbers("570.10.1-1")
    True
    >>> _numbers("none")
    []
    """
    # int() refuses more than 4,300 digits with ValueError, and the metadata is foreign.
    return [int(number[-MAX_NUMBER_CHARS:]) for number in re.findall(r"\d+", version)]


def _from_mirror(
    name: str, component: Component, base: Base, package: str, has_version: str | None
) -> Decision:
    if has_version is None:
        why = f"this machine's Debian mirror has no package {package}"
        if name == ESSENTIAL:
            raise UnavailableError(
                why, hint="check whether the mirror has non-free, the archive area of the driver"
            )
        return _decision(name, component, "left_out", reason=why)
    has = upstream_version(has_version)
    if not _version_matches(component, has):
        branch = f"branch {component.branch} of " if component.newest else ""
        version = "" if component.newest else f" {component.version}"
        hint = f"--set {name}.version={has}, or another base"
        if component.branch and has.partition(".")[0] != str(component.branch):
            # Debian has one branch for each release, so that only another base helps.
            others = " or ".join(bases_with(component, component.branch))
            hint = (
                f"{base.title} has no other; --cloud aws has bases with {component.branch}: --base {others}"
            )
        raise IncompatibleError(
            f"this machine's Debian mirror has {package} {has_version}, wanted {branch}{name}{version}",
            hint=hint,
        )
    if component.newest:
        component = replace(component, version=has)
    return _decision(
        name, component, "install", source=f"Debian archive: {package}", package_version=has_version
    )
