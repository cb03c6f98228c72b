"""Whether a build has something to do: a plan compared with the images that passed already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from gpukiln.clouds.base import Cloud
from gpukiln.errors import UsageError
from gpukiln.images.builds import Builds
from gpukiln.images.cost import Cost, cost_lines, estimate
from gpukiln.images.plan import ImagePlan
from gpukiln.images.plan_view import plan_table
from gpukiln.images.subject import subject_from_tags
from gpukiln.instances.access import access_line
from gpukiln.instances.tags import tags_of
from gpukiln.pipeline.steps import why_build
from gpukiln.pipeline.verdict_tags import VerifiedAmi, find_verified
from gpukiln.pipeline.verify import verify_again
from gpukiln.state import state_home
from gpukiln.verify import report
from gpukiln.verify.digest import suite_digest
from gpukiln.verify.verdict import Verdict

if TYPE_CHECKING:
    from securesystemslib.signer import Signer


@dataclass(frozen=True)
class BuildPreview:
    """What a build of a plan would do.

    Args:
        existing: An image of this plan that passed a suite; None: there is none.
        is_current: Whether it passed the suite of today, so that a build has nothing to do.
        why: Why a build bakes; empty where an image is there.
        cost: Of a build; None: the cloud has no prices.
    """

    plan: ImagePlan
    existing: VerifiedAmi | None
    is_current: bool
    why: list[str]
    cost: Cost | None

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the document, in addition to those of the plan."""
        image_id = self.existing.image_id if self.existing else None
        return {
            "verified_image": image_id if self.is_current else None,
            "verified_by_another_suite": None if self.is_current else image_id,
            "why_build": self.why,
        }

    def parts(self) -> Iterator[RenderableType]:
        """For people."""
        yield plan_table(self.plan)
        yield from cost_lines(self.cost)
        if self.existing:
            yield reuse_line(self.existing, then="`invoke ami.build` would verify it again")
        else:
            yield "`invoke ami.build` would bake it:"
            yield from (f"  {line}" for line in self.why)


def preview(plan: ImagePlan, cloud: Cloud, builds: Builds) -> BuildPreview:
    """What a build of a plan would do; nothing is started."""
    existing = find_verified(plan, cloud, suite_digest())
    return BuildPreview(
        plan,
        existing,
        existing is not None and existing.passed_suite(suite_digest()),
        [] if existing else why_build(plan, builds),
        estimate(plan, builds.last_durations(plan)),
    )


def reuse_line(existing: VerifiedAmi, *, then: str) -> str:
    """Why nothing is baked.

    Args:
        then: What happens where the image passed another suite than today's.
    """
    when = existing.verified_at
    verified = f"verified on {when[:10]} at {when[11:16]} UTC" if when else "and was verified"
    text = f"nothing to bake: {existing.image_id} has this digest, {verified}"
    if existing.passed_suite(suite_digest()):
        return text
    suites = ", ".join(sorted(suite[:12] for suite in existing.suites))
    return f"{text} by the suite {suites or 'unknown'}, today's is {suite_digest()[:12]}: {then}"


def verify_existing(
    existing: VerifiedAmi,
    plan: ImagePlan,
    cloud: Cloud,
    signer: Signer | None,
    say: Callable[[str], None],
    show: Callable[..., None],
) -> Verdict | None:
    """Verify an existing image of a plan, unless it passed the suite of today.

    Args:
        say: Gets a notice of who reaches the machine.
        show: Gets what people read of the verdict.

    Returns:
        The new verdict; None: the image passed already.
    """
    if existing.passed_suite(suite_digest()):
        return None
    try:
        build = Builds().find(existing.image_id)
    except UsageError:  # another computer built it
        build = None
    say(access_line(cloud))
    verdict, _, folder = verify_again(
        subject_from_tags(existing.image_id, tags_of(existing.image)),
        cloud,
        build,
        state_home(),
        instance_types=plan.instance_types[:1],
        signer=signer,
    )
    show(report.ending(verdict), f"report: {folder / 'report.html'}")
    return verdict
