"""The differences of two images that matter before one replaces the other."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpukiln.findings import Outcome
from gpukiln.images.digest import explain_change
from gpukiln.release.compared_image import ComparedImage
from gpukiln.release.osv import OsvEntry
from gpukiln.release.versions import Direction, direction
from gpukiln.release.vulnerabilities import Vulnerability, known_vulnerabilities
from gpukiln.units import Memory
from gpukiln.verify.verdict import CheckResult, counts_text


@dataclass(frozen=True)
class ValueChange:
    """A value that differs between the images, or that only one of them has.

    Args:
        old: The value on the older image; None: it has none.
        new: The value on the newer one; None: it has none.
        direction: The kind of the change; None: there is none.
    """

    name: str
    old: str | None
    new: str | None
    direction: Direction | None


@dataclass(frozen=True)
class CheckChange:
    """A check with another result.

    Args:
        title: What is true when it passes.
        old: Its outcome on the older image; None: it was not examined there.
        new: Its outcome on the newer one, likewise.
        reason: The reason on the newer image, or on the older one where the newer has no result.
    """

    id: str
    title: str
    old: Outcome | None
    new: Outcome | None
    reason: str

    @property
    def is_worse(self) -> bool:
        """Whether a check that passed does not pass any more, or fails."""
        return self.old == "passed" or self.new == "failed"


@dataclass(frozen=True)
class Diff:
    """The difference of two images.

    Args:
        old: Id of the older image.
        new: Id of the newer image.
        facts: Base, kernel, components, sizes, boot time, verdict: also what did not change.
        packages: The packages that differ.
        fixed: Vulnerabilities of the older image that the newer one does not have.
        introduced: Vulnerabilities that only the newer image has.
        remaining: Vulnerabilities that both have.
        vulnerability_notes: What was not checked, and why.
        checks: The checks whose result changed.
        durations: Seconds of each step of both builds.
        inputs: Changed inputs of the builds, a line a change.
    """

    old: str
    new: str
    facts: tuple[ValueChange, ...]
    packages: tuple[ValueChange, ...]
    fixed: tuple[Vulnerability, ...]
    introduced: tuple[Vulnerability, ...]
    remaining: tuple[Vulnerability, ...]
    vulnerability_notes: tuple[str, ...]
    checks: tuple[CheckChange, ...]
    durations: dict[str, tuple[float | None, float | None]]
    inputs: tuple[str, ...]


def compare(old: ComparedImage, new: ComparedImage, osv: Iterable[OsvEntry] | None = None) -> Diff:
    """Compare two images.

    Args:
        old: The image that is in use.
        new: The image that is to replace it.
        osv: Vulnerability data of the packages, or None.

    Returns:
        The difference.
    """
    records = None if osv is None else list(osv)
    before, after = known_vulnerabilities(old, records), known_vulnerabilities(new, records)
    # By name and package: the fixed version may differ between two releases of the data.
    keys = {row.key for row in before.vulnerabilities}, {row.key for row in after.vulnerabilities}
    family = _family(old, new)
    durations = old.record.durations_s, new.record.durations_s
    return Diff(
        old=old.baked.image_id,
        new=new.baked.image_id,
        facts=tuple(_facts(old, new, family)),
        packages=tuple(_changes(old.baked.packages, new.baked.packages, family)),
        fixed=tuple(row for row in before.vulnerabilities if row.key not in keys[1]),
        introduced=tuple(row for row in after.vulnerabilities if row.key not in keys[0]),
        remaining=tuple(row for row in after.vulnerabilities if row.key in keys[0]),
        vulnerability_notes=tuple(dict.fromkeys((*before.notes, *after.notes))),
        checks=tuple(_checks(old, new)),
        durations={
            step: (durations[0].get(step), durations[1].get(step))
            for step in dict.fromkeys((*durations[0], *durations[1]))
        },
        inputs=tuple(explain_change(old.record.plan.inputs, new.record.plan.inputs)),
    )


def _family(old: ComparedImage, new: ComparedImage) -> str | None:
    """The family whose rules order the versions; None where the images are of different distributions."""
    bases = old.record.plan.base, new.record.plan.base
    return old.os_family if bases[0].distribution == bases[1].distribution else None


def _changes(old: Mapping[str, str], new: Mapping[str, str], family: str | None) -> Iterator[ValueChange]:
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        # Equal packages are left out: an image has hundreds of them.
        if before != after:
            yield ValueChange(name, before, after, direction(before, after, family))


def _facts(old: ComparedImage, new: ComparedImage, family: str | None) -> Iterator[ValueChange]:
    for name, ask in FACTS.items():
        yield _plain(name, ask(old), ask(new))
    kernels = old.baked.kernel, new.baked.kernel
    yield ValueChange("kernel", *kernels, direction(*kernels, family))
    components = old.baked.components, new.baked.components
    for name in dict.fromkeys((*components[1], *components[0])):
        before, after = (_component(image.get(name)) for image in components)
        # The text has the package's version, the direction comes from the component's own version.
        versions = old.version(name), new.version(name)
        way = direction(*versions, family) if before != after else None
        yield ValueChange(name, before, after, way or ("changed" if before != after else None))
    for name, measure in MEASURES.items():
        yield _plain(name, measure(old), measure(new))


def _plain(name: str, old: str | None, new: str | None) -> ValueChange:
    return ValueChange(name, old, new, direction(old, new, None))


def _component(installed: Mapping[str, Any] | None) -> str | None:
    if installed is None:
        return None
    if installed["status"] == "left_out":
        return "left out"
    return str(
        installed.get("package", {}).get("version") or installed.get("version") or "of an unknown version"
    )


def _base(image: ComparedImage) -> str:
    base = image.record.plan.base
    return f"{base.name} {base.id}"


def _size(image: ComparedImage) -> str | None:
    size = image.installed.size_kib
    return Memory(size * 1024).shown if size else None


def _boot(image: ComparedImage) -> str | None:
    return f"{image.boot_s:.0f} s" if image.boot_s is not None else None


def _verdict(image: ComparedImage) -> str:
    verdict = image.record.verdict
    return counts_text(verdict.checks) if verdict else "not verified"


# Values that have no order: they are shown as changed, never as better or worse.
FACTS: dict[str, Callable[[ComparedImage], str | None]] = {
    "build": lambda image: image.record.build_id,
    "planned at": lambda image: image.record.plan.created_at,
    "commit": lambda image: image.record.plan.git_commit or "none",
    "base": _base,
    "runs on": lambda image: ", ".join(image.record.plan.instance_types),
}
MEASURES: dict[str, Callable[[ComparedImage], str | None]] = {
    "root volume": lambda image: f"{image.record.plan.volume_size_gib} GiB",
    "installed packages": lambda image: str(len(image.baked.packages)),
    "size of the packages": _size,
    "first boot": _boot,
    "checks": _verdict,
}


def _checks(old: ComparedImage, new: ComparedImage) -> Iterator[CheckChange]:
    before, after = _results(old), _results(new)
    for name in dict.fromkeys((*after, *before)):
        earlier, other = before.get(name), after.get(name)
        outcomes = earlier.outcome if earlier else None, other.outcome if other else None
        known = other or earlier
        if outcomes[0] != outcomes[1] and known:
            yield CheckChange(name, known.title, *outcomes, known.reason)


def _results(image: ComparedImage) -> dict[str, CheckResult]:
    verdict = image.record.verdict
    return {check.id: check for check in verdict.checks} if verdict else {}
