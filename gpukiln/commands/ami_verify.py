"""Machine images: judge one again, on the machines that somebody names or that a channel still asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpukiln.commands.ami import COMMON
from gpukiln.commands.cli import command, print_json, say, words

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.images.builds import Build
    from gpukiln.images.subject import Subject
    from gpukiln.proof.judge import Judgement


@command(
    help={
        **{name: COMMON[name] for name in ("profile", "subnet_id", "ssh_cidr", "json")},
        "build": "build id, `last`, or AMI id (with --region and --cloud when another machine built it)",
        "instance_types": "GPU machines to try, separated by commas, the best first; default: the first that "
        "the image was built for",
        "for": "a channel: judge it on what this one still asks for; nothing when nothing is missing",
        "spot": "take a spot instance: cheaper, and EC2 may take it away",
        "region": "where the image is, when this machine has no record of it",
        "cloud": "where the image is; default: as its record says",
    }
)
def verify(
    _: Any,
    build: str,
    instance_types: str = "",
    for_: str = "",
    spot: bool = False,
    region: str = "",
    cloud: str = "",
    profile: str = "",
    subnet_id: str = "",
    ssh_cidr: str = "",
    json: bool = False,
) -> int:
    """Boot a new machine from an image, judge it, and add the verdict to its record and its tags."""
    from gpukiln.images.killed import clean_up_after_killed
    from gpukiln.images.subject import check_machines
    from gpukiln.instances.access import words_of_access
    from gpukiln.progress import PlainConsole
    from gpukiln.proof import pipeline
    from gpukiln.release.channels import load_channel
    from gpukiln.verify import report

    rules = load_channel(for_) if for_ else None
    found = find(build, cloud, region, {"profile": profile, "subnet_id": subnet_id, "ssh_cidr": ssh_cidr})
    given = check_machines(found.subject, words(instance_types))
    tries = [given] if rules is None else _wanted(found, rules, for_, list(given))
    if tries:
        clean_up_after_killed(found.cloud, _builds(), say)
        say(words_of_access(found.cloud))
    verdicts = []
    for types in tries:
        done = judge(found, types, spot=spot)
        verdicts.append(done.verdict)
        PlainConsole(stderr=True).print(report.ending(done.verdict))
        machine = done.machine
        say(f"judged on {machine.instance_type} in {machine.zone}{', spot' if machine.spot else ''}")
        say(f"report: {done.folder / 'report.html'}")
    if json:
        shown = [verdict.to_dict() for verdict in verdicts]
        print_json(shown if for_ else shown[0])
    for verdict in verdicts:
        pipeline.require_passed(verdict, build)
    if rules:
        _require(found, rules, for_)
    return 0


@dataclass(frozen=True)
class Found:
    """An image, where it is, and its build where this machine has it."""

    subject: Subject
    cloud: Cloud
    build: Build | None


def find(name: str, cloud: str, region: str, account: dict[str, str]) -> Found:
    """An image by this machine's record, or by its tags.

    Args:
        name: What was typed.
        cloud: The cloud's name, or an empty string.
        region: The region, or an empty string.
        account: profile, subnet_id and ssh_cidr, as typed.

    Raises:
        UsageError: There is no such build or image.
    """
    from gpukiln.clouds.select import make_cloud
    from gpukiln.errors import UsageError
    from gpukiln.images.subject import subject_from_tags
    from gpukiln.instances.tags import tags_of
    from gpukiln.proof.judge import subject_of_build
    from gpukiln.release.by_tags import find_image

    options = {key: value or None for key, value in account.items()}
    try:
        build = _builds().find(name)
    except UsageError as error:
        if not name.startswith("ami-"):
            raise
        if not region:
            raise UsageError(
                error.message, hint="name the --region, and --cloud aws, where another machine built it"
            ) from error
        where = make_cloud(cloud or "embedded", region, **options)
        return Found(subject_from_tags(name, tags_of(find_image(where, name))), where, None)
    subject, plan = subject_of_build(build), build.read().plan
    for option, typed, known in (("cloud", cloud, plan.cloud), ("region", region, plan.region)):
        if typed not in ("", known):
            raise UsageError(f"build {build.id} is in {known}, not in {typed}", hint=f"leave out --{option}")
    return Found(subject, make_cloud(plan.cloud, plan.region, **options), build)


def judge(found: Found, types: tuple[str, ...], *, spot: bool = False) -> Judgement:
    """Judge an image on the first of these types that can be had.

    Args:
        found: The image.
        types: Instance types; empty: the first that it was built for.
        spot: Whether the machine may be a spot instance.
    """
    from gpukiln.proof.judge import judge_build, judge_image
    from gpukiln.state import state_home

    if found.build:
        return judge_build(found.build, found.cloud, instance_types=types, spot=spot)
    return judge_image(found.subject, found.cloud, state_home(), instance_types=types, spot=spot)


def _proof(found: Found) -> Any:
    from gpukiln.release.by_tags import find_proof, proof_of_build

    if found.build:
        return proof_of_build(found.cloud, found.build)
    return find_proof(found.cloud, found.subject.image_id)


def _wanted(found: Found, rules: Any, channel: str, given: list[str]) -> list[tuple[str, ...]]:
    """The types to try for each machine that a channel still asks for."""
    from gpukiln.errors import UsageError
    from gpukiln.images.subject import check_machines
    from gpukiln.release.needs import judge as ask
    from gpukiln.release.needs import types_for

    proof = _proof(found)
    answer = ask(rules, proof, has_gpus=found.cloud.has_gpus)
    wanted = []
    for missing in (one for one in answer.missing if one.again):
        types = types_for(missing.need, proof, given)
        if not types:
            raise UsageError(
                f"channel {channel} asks for {missing.need.title}, and no type that was named has it",
                hint="name one with --instance-types",
            )
        wanted.append(check_machines(found.subject, types))
    wanted += [(name,) for name in answer.failed]  # what failed there may be mended: a flaw of the machine
    if not wanted:
        say(f"channel {channel} asks for no other verdict on {found.subject.image_id}: nothing to verify")
    return list(dict.fromkeys(wanted))


def _require(found: Found, rules: Any, channel: str) -> None:
    """Say what the channel asks for still, which no verification provides."""
    from gpukiln.release.needs import require_proven

    require_proven(channel, rules, _proof(found), has_gpus=found.cloud.has_gpus)


def _builds() -> Any:
    from gpukiln.images.builds import Builds
    from gpukiln.state import state_home

    return Builds(state_home())
