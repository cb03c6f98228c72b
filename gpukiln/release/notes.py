"""Release notes of an image, as Markdown."""

from collections import Counter
from collections.abc import Iterable, Iterator

from gpukiln.errors import UsageError
from gpukiln.images.builds import Builds
from gpukiln.release.compared_image import ComparedImage, read_compared_image
from gpukiln.release.diff import FACTS, MEASURES, Diff, compare
from gpukiln.release.diff_view import SHOWN, markdown, sections, to_markdown
from gpukiln.release.osv import OsvEntry
from gpukiln.verify.verdict import counts_text


def predecessor(builds: Builds, image: ComparedImage) -> ComparedImage | None:
    """The image that an image follows: the last verified one before it of the same kind.

    Returns:
        The older image, or None.
    """
    plan = image.record.plan
    # Builds are listed newest first, so the first that fits is the predecessor.
    for build in builds.all():
        record = build.read()
        same = (record.plan.image, record.plan.cloud) == (plan.image, plan.cloud)
        # By the plan's time: a build that began later may have ended earlier.
        older = record.plan.created_at < plan.created_at
        if same and older and record.bake and record.verdict and record.verdict.passed_without_simulation:
            return read_compared_image(build.record_file)
    return None


def make_notes(new: ComparedImage, old: ComparedImage | None, osv: Iterable[OsvEntry] | None = None) -> str:
    """Write the release notes of an image.

    Args:
        old: The image that it replaces; None: it is the first of its kind.
        osv: Vulnerability data of the packages, or None.

    Returns:
        Markdown.

    Raises:
        UsageError: The image was not verified.
    """
    # Notes without a verdict of real machines would recommend an untested image.
    verdict = new.record.verdict
    if verdict is None or verdict.simulated:
        where = " on real GPUs or without any, only on simulated ones" if verdict else ""
        raise UsageError(
            f"{new.baked.image_id} was not verified{where}, so it must not be released",
            hint=f"`invoke ami.verify {new.record.build_id}` verifies it",
        )
    # Compared with itself where it is the first: cautions then need no case of their own.
    plan, diff = new.record.plan, compare(old or new, new, osv)
    outcome = "passed" if verdict.passed else "FAILED: do not roll it out"
    lines = [
        f"# {markdown(new.baked.name)}",
        "",
        f"`{new.baked.image_id}` in {new.baked.region} ({plan.cloud}), for {', '.join(plan.instance_types)}."
        f" Verification {outcome}: {counts_text(verdict.checks)}.",
        "",
        "## Highlights",
        "",
        *(f"- {markdown(line)}" for line in _highlights(diff if old else None)),
        "",
        "## What is in it",
        "",
        "| component | version | from, or why not |",
        "| --- | --- | --- |",
        *(f"| {' | '.join(map(markdown, row))} |" for row in _contents(new)),
        "",
        "## Before you roll it out",
        "",
        *(f"- {markdown(line)}" for line in _cautions(new, diff)),
        "",
        *_changes(diff, old),
        "## Where it comes from",
        "",
        f"- base image: {markdown(plan.base.image_name or plan.base.name)} (`{plan.base.id}`)",
        f"- commit: `{plan.git_commit or 'none'}`",
        f"- digest of all inputs of the build: `{plan.digest}`",
        f"- verdict: `{verdict.digest}`",
        f"- SBOM, provenance and their verification: `invoke ami.attest {new.record.build_id} --verify`",
    ]
    return "\n".join(lines) + "\n"


def _changes(diff: Diff, old: ComparedImage | None) -> list[str]:
    if old is None:
        return []
    title = f"Changes since {markdown(old.baked.name)} (`{diff.old}`)"
    return [f"## {title}", "", to_markdown(sections(diff), level=3)]


def _highlights(diff: Diff | None) -> Iterator[str]:
    if diff is None:
        yield "the first image of its kind that was verified on this machine"
        return
    for change in diff.facts:
        # Sizes and times vary from build to build; they are in the table below the highlights.
        if change.direction and (change.name == "base" or change.name not in {**FACTS, **MEASURES}):
            yield f"{change.name} {change.direction}: {change.old or 'none'} -> {change.new or 'none'}"
    if diff.packages:
        counts = Counter(change.direction for change in diff.packages)
        yield "packages: " + ", ".join(f"{n} {word}" for word, n in counts.items())
    else:
        yield "every package is the same"
    if diff.fixed:
        yield f"fixes {', '.join(row.id for row in diff.fixed)}"
    if worse := [check.id for check in diff.checks if check.is_worse]:
        yield f"checks that no longer pass: {', '.join(worse)}"


def _contents(image: ComparedImage) -> Iterator[tuple[str, str, str]]:
    yield "kernel", image.baked.kernel, image.record.plan.base.name
    for name, installed in image.baked.components.items():
        if installed["status"] == "left_out":
            yield name, "left out", installed["reason"]
        else:
            version = installed.get("package", {}).get("version") or installed.get("version") or "unknown"
            yield name, version, installed["source"]


def _cautions(image: ComparedImage, diff: Diff) -> Iterator[str]:
    for row in diff.introduced:
        yield f"new: {row.id} in {row.package} {row.version}, fixed in {row.fixed or 'no release yet'}"
    if diff.remaining:
        more = f" and {len(diff.remaining) - SHOWN} more" if len(diff.remaining) > SHOWN else ""
        names = ", ".join(f"{row.id} in {row.package}" for row in diff.remaining[:SHOWN])
        yield f"known, in the image before too: {names}{more}"
    yield from diff.vulnerability_notes
    for warning in image.record.plan.warnings:
        yield f"{warning.message}: {warning.remedy}" if warning.remedy else warning.message
    if verdict := image.record.verdict:
        yield from (f"{check.id} failed: {check.reason}" for check in verdict.failures)
        # Grouped by reason: without a GPU dozens of checks share one.
        reasons: dict[str, list[str]] = {}
        for check in verdict.not_run:
            reasons.setdefault(check.reason, []).append(check.id)
        yield from (f"not run ({reason}): {', '.join(names)}" for reason, names in reasons.items())
