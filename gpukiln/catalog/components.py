"""components.yaml: the one place of versions."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import date
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, StringConstraints, TypeAdapter

from gpukiln.catalog import drivers
from gpukiln.catalog.architectures import ARCHITECTURES
from gpukiln.catalog.cuda import needs
from gpukiln.catalog.load import ROOT, read_yaml
from gpukiln.errors import UsageError
from gpukiln.typed import load, strict, template, unknown


# file: for a mirror on this computer.
def _address(text: str) -> str:
    if not re.match(r"(https?://[^/\s]|file:///)\S*$", text):
        raise ValueError("wanted: an http, https or file address")
    return text


def _hexadecimal(digits: int, of: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(rf"[{of}]{{{digits}}}", text):
            raise ValueError(f"wanted: {digits} digits of {of.replace('-', ' to ')}, without spaces")
        return text

    return AfterValidator(check)


Architecture = Annotated[str, StringConstraints(pattern="^(x86_64|arm64)$")]
# A short key id can be forged; only the whole fingerprint identifies a key.
Fingerprint = Annotated[str, _hexadecimal(40, "0-9A-F")]
"""Of an OpenPGP key of version 4 (RFC 4880), as `gpg --show-keys` prints it: the roles compare the two."""
Sha256 = Annotated[str, _hexadecimal(64, "0-9a-f")]
Address = AfterValidator(_address)
RepositoryAddress = Annotated[str, template("cuda_distribution", "cuda_arch"), Address]
# Names carry the branch on Ubuntu (nvidia-driver-535-server), and none on Debian.
PackageName = Annotated[str, template("branch")]


@strict
class AptRepository:
    """A package repository of a vendor's own, for apt.

    Args:
        url: Its address; $(ARCH) stands for apt's name of the architecture, {cuda_distribution} and
            {cuda_arch} for what NVIDIA's CUDA repository calls them.
        key_url: Where its signing key is.
        key_fingerprint: The fingerprint that the key must have, 40 hexadecimal digits.
        suite: The suite; one that ends in "/" is a folder (a flat repository).
        component: The component, none in a flat repository.
        distributions: Where the component comes from here; None: wherever apt is.
    """

    url: RepositoryAddress
    key_url: RepositoryAddress
    key_fingerprint: Fingerprint
    suite: str = "/"
    component: str | None = None
    distributions: tuple[str, ...] | None = None

    def probe(self, architecture: str) -> str:
        """The file that apt reads first.

        Args:
            architecture: x86_64 or arm64.

        Returns:
            Its address.
        """
        # apt resolves $(ARCH) itself; the probe runs without apt.
        root = self.url.replace("$(ARCH)", ARCHITECTURES[architecture].debian)
        # A flat repository has no dists/ (sources.list(5)).
        folder = self.suite.strip("/") if self.suite.endswith("/") else f"dists/{self.suite}"
        return "/".join(part for part in (root.rstrip("/"), folder, "InRelease") if part)


@strict
class RpmRepository:
    """A package repository of a vendor's own, for dnf.

    Args:
        url: Its address; $basearch stands for dnf's name of the architecture, {cuda_distribution} and
            {cuda_arch} for what NVIDIA's CUDA repository calls them.
        key_url: Where its signing key is.
        key_fingerprint: The fingerprint that the key must have, 40 hexadecimal digits.
        repo_gpgcheck: Whether its metadata is signed as well as its packages.
        includepkgs: The packages that may come from there; None: all.
        distributions: Where the component comes from here; None: wherever dnf is.
    """

    url: RepositoryAddress
    key_url: RepositoryAddress
    key_fingerprint: Fingerprint
    repo_gpgcheck: bool = False
    # Keeps a vendor's repository from replacing packages of the distribution.
    includepkgs: tuple[str, ...] | None = None
    distributions: tuple[str, ...] | None = None

    def root(self, architecture: str) -> str:
        """The address for one architecture.

        Args:
            architecture: x86_64 or arm64.
        """
        return self.url.replace("$basearch", ARCHITECTURES[architecture].machine).rstrip("/")

    def probe(self, architecture: str) -> str:
        """The file that dnf reads first.

        Args:
            architecture: x86_64 or arm64.

        Returns:
            Its address.
        """
        return f"{self.root(architecture)}/repodata/repomd.xml"


@strict
class Repositories:
    """The package repositories of a component's own.

    Args:
        apt: The one for Debian and Ubuntu.
        rpm: The one for Amazon Linux and the RHEL family.
    """

    apt: AptRepository | None = None
    rpm: RpmRepository | None = None

    def of(self, os_family: str, distribution: str) -> AptRepository | RpmRepository | None:
        """The repository that a distribution gets the component from.

        Args:
            os_family: debian or redhat.
            distribution: For example "ubuntu".

        Returns:
            None when the component comes in the distribution itself.
        """
        repository = self.apt if os_family == "debian" else self.rpm
        if repository and (repository.distributions is None or distribution in repository.distributions):
            return repository
        return None


@strict
class Archive:
    """A file that is fetched.

    Args:
        url: Its address; {version} and {arch} stand for the component's version and for what `arch` names.
        sha256: Its checksum for each architecture, 64 hexadecimal digits.
        arch: What the address calls each architecture.
    """

    url: Annotated[str, template("version", "arch"), Address]
    sha256: Mapping[Architecture, Sha256]
    arch: Mapping[Architecture, str]

    def address(self, version: str, architecture: str) -> str:
        """Where the file of a version is.

        Args:
            architecture: x86_64 or arm64.
        """
        return self.url.format(version=version, arch=self.arch[architecture])


@strict
class InContainer:
    """How a container image gets a component, by what it is built from.

    Args:
        apt: Packages of the component's own apt repository, with their versions.
        index: Packages of the Python index, with their versions.
        archive: A file.
    """

    apt: Mapping[str, str] | None = None
    index: Mapping[str, str] | None = None
    archive: Archive | None = None


@strict
class Pin:
    """Another version on one release of a distribution, and why."""

    version: str
    branch: int
    reason: str


@strict
class Component:
    """Something with a version that goes into an image.

    Args:
        source: Where it comes from, in words.
        reason: Why this version.
        review: The day by which somebody looks at the pin again.
        version: What is wanted, or None with `distribution`.
        distribution: Whether the version is whatever the base's distribution ships.
        from_base: Whether it comes only with the base image, so that nothing installs it.
        part_of: The component that brings it along where the base image has that one.
        branch: The branch of the driver.
        newest: Whether the newest version that the base's sources have of the branch is wanted, and `version`
            is only the newest that the catalogue knows.
        by_system: Another version by distribution and release, for example ubuntu-24.04.
        modules: The kind of the driver's kernel modules; auto: what the GPUs need.
        keep_build_tools: Whether compilers stay when the driver's modules are there.
        packages: For each distribution the package whose version is the component's version; {branch} in it
            stands for the driver branch, null: this distribution has none.
        open_packages: The same for open kernel modules, where they are other packages.
        repository: The repositories, when it has some of its own.
        downloads: Its package as a file of its vendor's, by distribution and release; elsewhere it has none.
        optional: Whether it comes only where an image lists it, or a build or a node asks for it.
        container_only: Whether no role installs it, so that machine images can't have it.
        container: How a container image gets it.
    """

    source: str
    reason: str
    # A pin must not outlive its reason.
    review: date
    version: str | None = None
    distribution: bool = False
    from_base: bool = False
    part_of: str | None = None
    branch: int | None = None
    # The base's own sources decide at build time, so that security fixes come without a commit.
    newest: bool = False
    by_system: Mapping[str, Pin] | None = None
    modules: Literal["proprietary", "open", "auto"] | None = None
    keep_build_tools: bool | None = None
    packages: Mapping[str, PackageName | None] | None = None
    open_packages: Mapping[str, PackageName | None] | None = None
    repository: Repositories | None = None
    downloads: Mapping[str, Archive] | None = None
    optional: bool = False
    container_only: bool = False
    container: InContainer | None = None


@strict
class FrameworkEnvironment:
    """A framework that `gpu.env` starts.

    Args:
        cuda: The CUDA version that it was built with.
        least_driver: The first driver that runs it at all.
        image: Its container image, with a tag.
        digest: The image's, which is what is pulled.
        wheels: Arguments of `pip install` where the framework has no image, or the user wants none.
        source: Where digest and CUDA version were seen.
        reason: Why this one.
        review: The day by which somebody looks at it again.
    """

    version: str
    cuda: str
    least_driver: str
    source: str
    reason: str
    review: date
    image: str | None = None
    # A tag can be moved; the digest is what the source was seen with.
    digest: str | None = None
    wheels: tuple[str, ...] = ()


@strict
class AddOn:
    """Something that clusters get, by a chart or as an image.

    Args:
        version: The chart's; without a chart what the image is tagged by, or the oldest that will do.
        source: Where its keys and versions were read.
        reason: Why this version.
        review: The day by which somebody looks at it again.
        chart: Its name in the repository.
        repository: An https address of charts, or an oci one.
        image: What it runs, where that has to be known here.
        kubernetes: The first minor version of a cluster that it is made for.
    """

    version: str
    source: str
    reason: str
    review: date
    chart: str | None = None
    repository: Annotated[str, StringConstraints(pattern=r"^(https|oci)://\S+$")] | None = None
    image: str | None = None
    kubernetes: str | None = None


@strict
class ServerArchive:
    """The programs of Kubernetes' server, which `cloud.cluster` downloads.

    Args:
        url: Its address; {version} and {arch} stand for the version and for what `arch` names.
        sha512: Its checksum for each architecture, as Kubernetes' changelog gives it.
        source: Where the checksums were read.
        reason: Why this version.
        review: The day by which somebody looks at it again.
    """

    version: str
    url: Annotated[str, template("version", "arch"), Address]
    arch: Mapping[Architecture, str]
    sha512: Mapping[Architecture, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{128}$")]]
    source: str
    reason: str
    review: date


# What `--set` may change: other fields describe the source and are not a build's choice.
SETTABLE = ("version", "branch", "modules", "keep_build_tools")  # and the fields of the repository
SECTIONS = ("components", "environments", "add_ons", "kubernetes_server")
LISTS = ("distributions", "includepkgs")
Components = Mapping[str, Component]


def load_components(path: Path = ROOT / "components.yaml") -> dict[str, Component]:
    """Read components.yaml.

    Args:
        path: Another file of the same form.

    Returns:
        The components by name.

    Raises:
        UsageError: The file is missing or does not fit.
    """
    document = read_yaml(path)
    if not {"components"} <= set(document) <= set(SECTIONS):
        raise UsageError(
            f"{path.name} has the keys {', '.join(map(str, document))}; wanted: {', '.join(SECTIONS)}"
        )
    components = load(dict[str, Component], document["components"], where=path.name)
    for name, component in components.items():
        # Exactly one of the two: a version that nothing installs would stand in the record.
        if (component.version is None) != component.distribution:
            raise UsageError(f"{path.name}: {name} needs either a version or `distribution: true`")
        archives = [component.container.archive] if component.container else []
        for archive in (*archives, *(component.downloads or {}).values()):
            if archive and set(archive.arch) != set(archive.sha256):
                raise UsageError(
                    f"{path.name}: the archive of {name} needs arch and sha256 of the same machines"
                )
    if driver := components.get("nvidia_driver"):
        _check_driver(driver, path.name)
        # A pin has its own branch, which must agree with its version as the main one does.
        for pin in (driver.by_system or {}).values():
            _check_driver(replace(driver, version=pin.version, branch=pin.branch), path.name)
    return components


def load_environments(path: Path = ROOT / "components.yaml") -> dict[str, tuple[FrameworkEnvironment, ...]]:
    """Read what `gpu.env` starts.

    Returns:
        By framework, the one to be preferred first.

    Raises:
        UsageError: The file does not fit.
    """
    document = read_yaml(path).get("environments", {})
    environments = load(
        dict[str, tuple[FrameworkEnvironment, ...]], document, where=f"{path.name}: environments"
    )
    for framework, rows in environments.items():
        for row in rows:
            where = f"{path.name}: {framework} {row.version}"
            if not (row.image or row.wheels):
                raise UsageError(f"{where} has neither an image nor wheels")
            if (row.image is None) != (row.digest is None):
                raise UsageError(f"{where}: an image needs its digest, and a digest its image")
            # For its error: the catalogue must know the CUDA version.
            needs(row.cuda)
    return environments


def load_add_ons(path: Path = ROOT / "components.yaml") -> dict[str, AddOn]:
    """Read what clusters get.

    Raises:
        UsageError: The file does not fit.
    """
    document = read_yaml(path).get("add_ons", {})
    add_ons = load(dict[str, AddOn], document, where=f"{path.name}: add_ons")
    for name, add_on in add_ons.items():
        if (add_on.chart is None) != (add_on.repository is None):
            raise UsageError(f"{path.name}: {name}: a chart needs its repository, and a repository its chart")
    return add_ons


def load_server_archive(path: Path = ROOT / "components.yaml") -> ServerArchive:
    """Read what `cloud.cluster` downloads.

    Raises:
        UsageError: The file does not fit.
    """
    document = read_yaml(path).get("kubernetes_server", {})
    return load(ServerArchive, document, where=f"{path.name}: kubernetes_server")


def _check_driver(driver: Component, where: str) -> None:
    if driver.branch is None or driver.modules is None or driver.version is None:
        raise UsageError(f"{where}: nvidia_driver needs a version, a branch and the kind of its modules")
    # For its error: the catalogue must know the branch.
    drivers.branch(driver.branch)
    if driver.version.partition(".")[0] != str(driver.branch):
        raise UsageError(f"{where}: driver version {driver.version} is not of branch {driver.branch}")


def check_on_nodes(components: Components, names: Iterable[str], where: str) -> None:
    """Refuse components that a machine image can't have.

    Args:
        components: What components.yaml and the overrides say.
        names: Those of the image.
        where: The image's file, for the message.

    Raises:
        UsageError: One is unknown, or goes into containers only.
    """
    # Named in the error, so that a typo and a misplaced component read alike.
    on_nodes = [name for name, component in components.items() if not component.container_only]
    for name in names:
        if name not in components:
            raise unknown(f"component in {where}:", name, on_nodes)
        if name not in on_nodes:
            raise UsageError(
                f"{where}: {name} goes into containers only, no role installs it on a machine; "
                f"valid: {', '.join(on_nodes)}",
                hint="take it out there; docker/runner-gpu/image.yaml is an image that has it",
            )


def apply_overrides(components: Components, overrides: Iterable[str]) -> dict[str, Component]:
    """Change components for one build.

    A driver branch without a version means the newest release of that branch that the base's sources have, or
    the catalogue knows where they are not asked; a driver version without a branch means its own branch.

    Args:
        components: What components.yaml says.
        overrides: For example `["nvidia_driver.branch=580"]`.

    Returns:
        A changed copy.

    Raises:
        UsageError: An override has another form, names what is not there, or its value does not fit.

    >>> driver = apply_overrides(load_components(), ["nvidia_driver.branch=580"])["nvidia_driver"]
    >>> driver.version.partition(".")[0], driver.newest
    ('580', True)
    >>> apply_overrides(load_components(), [])["nvidia_driver"].newest
    False
    """
    result = dict(components)
    given: dict[str, str] = {}
    for override in overrides:
        path, equals, value = override.partition("=")
        name, dot, key = path.partition(".")
        # An empty value would be read as a missing one.
        if not equals or not dot or not value:
            raise UsageError(f"can't read --set {override!r}", hint="wanted: --set component.key=value")
        if name not in result:
            raise unknown("component", name, result)
        result[name] = _override(name, result[name], key, value)
        given[path] = value
    if "nvidia_driver" in result and any(path.startswith("nvidia_driver.") for path in given):
        result["nvidia_driver"] = _match_driver_branch(result["nvidia_driver"], given)
    return result


def _override(name: str, component: Component, key: str, value: str) -> Component:
    plain: dict[str, Any] = asdict(component)
    # A field that the component does not have can't be overridden: it would do nothing.
    own = [known for known in SETTABLE if plain[known] is not None or known == "version"]
    for kind, repository in (plain["repository"] or {}).items():
        own += [f"repository.{kind}.{field}" for field in repository or () if field not in LISTS]
    if key not in own:
        raise unknown(f"key of {name}", key, own)
    if key == "version" and component.distribution:
        raise UsageError(
            f"--set {name}.version={value}: {name} comes in the version of the distribution",
            hint="another base image brings another one: --base",
        )
    # The record of a build is readable by everybody who can read the image's tags and files.
    if re.match(r"\w+://[^/]*@", value):
        raise UsageError(
            f"--set {name}.{key} holds credentials, which would be written into the record and the image",
            hint="let the machine's own proxy or mirror ask for them",
        )
    # repository.apt.url and the like go into the nested mapping.
    *folders, leaf = key.split(".")
    reduce(getitem, folders, plain)[leaf] = value
    return load(Component, plain, where=f"--set {name}.{key}={value}")


def _match_driver_branch(after: Component, given: Mapping[str, str]) -> Component:
    """Make version and branch of a changed driver agree."""
    if "nvidia_driver.branch" in given and "nvidia_driver.version" not in given and after.branch:
        # The catalogue's newest is the floor; `newest` lets the base's sources have a later one.
        latest = drivers.branch(after.branch).latest
        if latest is None:
            raise UsageError(
                f"no release of driver branch {after.branch} is known",
                hint="name one: --set nvidia_driver.version=...",
            )
        after = replace(after, version=latest, newest=True)
    elif "nvidia_driver.branch" not in given and after.version:
        head = after.version.partition(".")[0]
        after = replace(after, branch=int(head) if head.isdigit() else after.branch)
    _check_driver(after, "--set")
    return after


def to_plain_data(components: Components) -> dict[str, Any]:
    """The components as plain data, for the variables of Ansible and Packer.

    Args:
        components: What `load_components` or `apply_overrides` returned.

    Returns:
        The same form as components.yaml, ready for JSON.
    """
    plain: dict[str, Any] = TypeAdapter(dict[str, Component]).dump_python(dict(components), mode="json")
    return {name: _without_none(body) for name, body in plain.items()}


def _without_none(body: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in body.items()
        if value is not None
    }
