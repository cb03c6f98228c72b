"""The plan of a container image: what would be built from what; plans that can't work are refused here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

from gpukiln.catalog.architectures import ARCHITECTURES, PLATFORMS
from gpukiln.catalog.components import Component, apply_overrides, load_components, to_plain_data
from gpukiln.catalog.containers import ContainerBase, ContainerImage, load_container
from gpukiln.catalog.load import ROOT
from gpukiln.errors import IncompatibleError, UnavailableError, UsageError
from gpukiln.images.commit import git_commit
from gpukiln.images.digest import TEXT_FIELDS, canonical, digest, hash_file
from gpukiln.sources.apt import candidate_versions, upstream_version
from gpukiln.sources.decisions import http_unreachable
from gpukiln.sources.mirror import mirror_options, mirror_sources
from gpukiln.typed import unknown

# Packages of every Debian: when one of these has a new version, the base is built again.
BASE_PACKAGES = (
    "apt",
    "base-files",
    "bash",
    "coreutils",
    "dpkg",
    "libc6",
    "libgnutls30",
    "libssl3",
    "openssl",
    "passwd",
    "perl-base",
    "tar",
    "util-linux",
    "zlib1g",
)
PACKAGE_LIST = "apt-packages"
HOOKS = (
    "scripts/hooks/gpu-job-common.sh",
    "scripts/hooks/gpu-job-started.sh",
    "scripts/hooks/gpu-job-completed.sh",
)
PROGRAMS = {"scripts/bootstrap/nvidia-gpu-processes.sh": "nvidia-gpu-processes"}
LOCKS = {"python": "python.lock", "cuda": "cuda.lock"}


@dataclass(frozen=True)
class ContainerPart:
    """The decision on one component in a container image.

    Args:
        name: The component.
        version: The version of components.yaml or of the distribution; None: known only after the build.
        kind: Where it comes from: apt of the distribution, apt of NVIDIA, the Python index, an archive.
        packages: Its packages with their versions; the archive's address with its checksum.
        source: Where it comes from, in words.
        reason: Why this version, or why it is left out.
    """

    name: str
    status: Literal["install", "left_out"]
    version: str | None
    kind: Literal["distribution", "nvidia", "index", "archive"]
    packages: dict[str, str]
    source: str
    reason: str


@dataclass(frozen=True)
class ContainerPlan:
    """What would be built, and from what.

    Args:
        image: The image's name.
        title: The image's title, for people.
        user: The user of its processes.
        base_name: The base's name in image.yaml.
        platform: For example linux/amd64.
        cuda: The CUDA version.
        components: The decision on each component.
        packages: The distribution's packages, in the order of installation.
        digest: The digest over `inputs`.
        inputs: Everything that can change the image, by name.
        created_at: When the plan was made, ISO 8601 in UTC.
        git_commit: The commit of the checkout, with -dirty when files differ from it; None: no commit.
    """

    image: str
    title: str
    user: str
    base_name: str
    base: ContainerBase
    platform: str
    cuda: str
    components: tuple[ContainerPart, ...]
    packages: tuple[str, ...]
    digest: str
    inputs: dict[str, str]
    created_at: str
    git_commit: str | None

    @property
    def architecture(self) -> str:
        """x86_64 or arm64."""
        return PLATFORMS[self.platform].name

    @property
    def version(self) -> str:
        """The tag that people read: CUDA, the day of the plan, its digest; 12.1-20260401-0123abcd."""
        # The day and the digest: two builds of a day differ, and lists sort by time.
        return f"{self.cuda}-{datetime.fromisoformat(self.created_at):%Y%m%d}-{self.digest[:8]}"

    @property
    def tag(self) -> str:
        """The tag that never moves: the first digits of the digest."""
        return self.digest[:12]

    def part(self, name: str) -> ContainerPart | None:
        """The decision on one component, or None where the image has no component of that name."""
        return next((part for part in self.components if part.name == name), None)


@dataclass(frozen=True)
class ContainerProbes:
    """The queries to the network; tests replace them.

    Args:
        unreachable: Takes an address; returns None when it answers, else why not.
        candidates: Takes package names; returns the versions in this machine's Debian mirror.
    """

    unreachable: Callable[[str], str | None]
    candidates: Callable[[Sequence[str]], Mapping[str, str]]

    @classmethod
    def real(cls, cache: Path, *, refresh: bool = False) -> ContainerProbes:
        """Queries to the real network.

        Args:
            cache: A folder for the private apt state.
            refresh: Whether to fetch package lists that are still fresh.
        """
        return cls(http_unreachable, partial(candidate_versions, cache=cache, refresh=refresh))


def make_container_plan(
    name: str,
    *,
    probes: ContainerProbes,
    base: str = "",
    platform: str = "linux/amd64",
    overrides: Iterable[str] = (),
    root: Path = ROOT,
) -> ContainerPlan:
    """Decide what a container image would be built from.

    Args:
        name: A folder of docker/.
        probes: The queries to the network.
        base: A base of its image.yaml; empty: the default.
        platform: The platform of the image.
        overrides: Values of `--set`.

    Raises:
        UsageError: A name or an override does not fit.
        UnavailableError: A source can't be reached, and the base needs all of them.
        IncompatibleError: The base can't be built for the platform.
    """
    if platform not in PLATFORMS:
        raise unknown("platform", platform, PLATFORMS)
    image = load_container(name, root)
    start = image.base(base)
    architecture = PLATFORMS[platform].name
    # Before any query to the network: no mirror makes up for a missing checksum.
    if start.cuda_from == "redistributables" and architecture != "x86_64":
        raise IncompatibleError(
            f"base {base} is built for linux/amd64 only: cuda.lock has checksums of those files alone",
            hint="name the base with NVIDIA's repository, which has packages for linux/arm64",
        )
    pinned = load_components(root / "components.yaml")
    components = apply_overrides(pinned, overrides)
    # Against the pinned components: an override that changes nothing in the image is an error, not a plan.
    _check_overrides(name, image, pinned, components)
    packages = read_packages(root / "docker" / name / PACKAGE_LIST, start.distribution)
    # One query for all packages: apt's cache is read once.
    candidates = probes.candidates([*packages, *BASE_PACKAGES]) if start.distribution == "debian" else {}
    if start.distribution == "debian" and (absent := [p for p in packages if p not in candidates]):
        raise UnavailableError(
            f"this machine's Debian mirror has no package {', '.join(absent)}",
            hint=f"check its name in docker/{name}/{PACKAGE_LIST}; --refresh fetches newer package lists",
        )
    # image.yaml and components.yaml are edited apart, so that a name may be in one of them alone.
    missing = [name for name in image.components if name not in components]
    if missing:
        raise unknown("component", missing[0], components)
    chosen = {name: components[name] for name in image.components}
    parts = tuple(
        _decide(name, component, start, architecture, candidates, probes)
        for name, component in chosen.items()
    )
    inputs = _inputs(root, name, image, base or image.default_base, platform, parts, packages, candidates)
    inputs |= {
        f"recipe {name}": canonical(
            # Without texts for people: a corrected sentence of components.yaml builds no image.
            {k: v for k, v in to_plain_data({name: chosen[name]})[name].items() if k not in TEXT_FIELDS}
        )
        for name in chosen
    }
    return ContainerPlan(
        image=name,
        title=image.title,
        user=image.user,
        base_name=base or image.default_base,
        base=start,
        platform=platform,
        cuda=components["cuda"].version or "",
        components=parts,
        packages=packages,
        digest=digest(inputs),
        inputs=inputs,
        # Not among the inputs, as is the commit: neither changes the image.
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        git_commit=git_commit(root),
    )


def _check_overrides(
    name: str, image: ContainerImage, pinned: Mapping[str, Component], overridden: Mapping[str, Component]
) -> None:
    """Refuse overrides that would be in the plan and change nothing in the image."""
    for part_name, component in overridden.items():
        if component == pinned[part_name]:
            continue
        if part_name not in image.components:
            raise unknown(f"component of {name}", part_name, image.components)
        # Packages and checksums belong to one version: another version would install the old files.
        if component.version != pinned[part_name].version:
            raise UsageError(
                f"--set {part_name}.version={component.version}: components.yaml pins the packages and"
                f" checksums of {part_name} in containers, those of {pinned[part_name].version}",
                hint="change version and `container` in components.yaml, then run `scripts/lock`",
            )


def read_packages(path: Path, distribution: str) -> tuple[str, ...]:
    """Read docker/<image>/apt-packages.

    Args:
        path: The file: a package a line, then the distribution where it is only one's, then `# why`.
        distribution: ubuntu or debian.

    Returns:
        The packages for the distribution.

    Raises:
        UsageError: A line has another form.
    """
    packages = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        # The reason of each package is its comment.
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2 or words[1:] not in ([], ["ubuntu"], ["debian"]):
            raise UsageError(f"{path.name}, line {number}: found {line!r}, wanted PACKAGE [ubuntu|debian]")
        if words[1:] in ([], [distribution]):
            packages.append(words[0])
    return tuple(packages)


def _decide(
    name: str,
    component: Component,
    base: ContainerBase,
    architecture: str,
    candidates: Mapping[str, str],
    probes: ContainerProbes,
) -> ContainerPart:
    if component.distribution:
        return _from_distribution(name, component, base, candidates)
    ways = component.container
    if ways is None:
        raise UsageError(f"components.yaml: {name} has no `container`, its source in container images")
    part = partial(ContainerPart, name, version=component.version, reason=component.reason)
    if ways.archive:
        if architecture not in ways.archive.arch:
            raise IncompatibleError(f"components.yaml names no archive of {name} for {architecture}")
        url = ways.archive.url.format(version=component.version, arch=ways.archive.arch[architecture])
        why = probes.unreachable(url)
        part = partial(part, kind="archive", packages={url: ways.archive.sha256[architecture]}, source=url)
    elif ways.apt and base.cuda_from == "nvidia":
        url = _repository(name, component, base, architecture)
        # apt fetches this file first; a mirror that has it has the repository.
        why = probes.unreachable(f"{url.rstrip('/')}/InRelease")
        part = partial(part, kind="nvidia", packages=dict(ways.apt), source=url)
    else:
        why = None if ways.index else f"nothing to get it from: {component.source}"
        packages = dict(ways.index or {})
        part = partial(part, kind="index", packages=packages, source="the Python index")
    # Debian's base builds without CUDA where NVIDIA can't be reached; the other base is CUDA's.
    if why and base.cuda_from == "nvidia":
        raise UnavailableError(
            f"the source of {name} can't be used: {why}",
            hint="check the network, or build the base whose sources can be reached: --base debian-12",
        )
    return part("left_out", reason=why) if why else part("install")


def _from_distribution(
    name: str, component: Component, base: ContainerBase, candidates: Mapping[str, str]
) -> ContainerPart:
    package = (component.packages or {}).get(base.distribution)
    if package is None:
        raise IncompatibleError(f"components.yaml names no package of {name} for {base.distribution}")
    candidate = candidates.get(package)
    version = (
        upstream_version(candidate).partition("+really")[2] or upstream_version(candidate)
        if candidate
        else None
    )
    return ContainerPart(
        name,
        "install",
        version=version,
        kind="distribution",
        packages={package: candidate or ""},
        source=f"{base.distribution} {base.release}: {package}",
        reason=component.reason,
    )


def _repository(name: str, component: Component, base: ContainerBase, architecture: str) -> str:
    if component.repository is None or component.repository.apt is None:
        raise UsageError(f"components.yaml: {name} has packages for apt and no repository for them")
    cuda_arch = ARCHITECTURES[architecture].cuda
    return component.repository.apt.url.format(cuda_distribution=base.cuda_distribution, cuda_arch=cuda_arch)


def _inputs(
    root: Path,
    name: str,
    image: ContainerImage,
    base_name: str,
    platform: str,
    parts: Iterable[ContainerPart],
    packages: Iterable[str],
    candidates: Mapping[str, str],
) -> dict[str, str]:
    base = image.bases[base_name]
    inputs = {"image": f"{name}: {image.title}", "user": image.user, "platform": platform}
    inputs["base"] = f"{base_name} {base.image or ''}".strip()
    inputs["size budget"] = f"{base.size_budget_gib} GiB"
    # A base of a registry is pinned by its digest; this one is made from the mirror, whose packages change.
    if base.image is None and base.codename:
        inputs["mirror"] = canonical([mirror_sources(base.codename), mirror_options()])
        inputs["base packages"] = canonical({package: candidates.get(package) for package in BASE_PACKAGES})
    inputs |= {f"component {part.name}": f"{part.status} {part.version or 'any version'}" for part in parts}
    inputs |= {f"package {package}": candidates.get(package, "as the base has it") for package in packages}
    # By content: a checkout's file times say nothing.
    files = [f"docker/{name}/Dockerfile", *(f"docker/{name}/{lock}" for lock in LOCKS.values())]
    return inputs | {f"file {path}": hash_file(root / path) for path in [*files, *HOOKS, *PROGRAMS]}
