"""Release: point a channel at a proven image, go back, look, and remove what is not needed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gpukiln.commands.cli import SIGNERS, command, print_document, results, say
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.release.log import Release, ReleaseLog

COMMON = {
    "channel": "a channel of ami/channels.yaml, for example stable",
    "cloud": "embedded (this machine, the default) or aws (your account)",
    "profile": "AWS profile (aws only)",
    "dry_run": "only look, and say what would be done",
    "json": "print one JSON document to standard output",
}


@command(
    help={
        **COMMON,
        "build": "build id, `last`, or AMI id (with --region and --cloud when another machine built it)",
        "regions": "where to publish, separated by commas; default: the channel's, or the image's own",
        "accounts": "accounts that may launch the image, separated by commas",
        "org": "ARNs of organizations or organizational units that may, separated by commas",
        "public": "let everybody launch it; the AMI's name has to be typed",
        "yes_public": "the AMI's name, instead of typing it",
        "encrypt": "encrypt every region's copy with the account's default key",
        "kms_keys": "encrypt with these keys, REGION=KEY for every region, separated by commas",
        "sign_key": f"signs the release, where the channel names keys: {SIGNERS}",
        "after": "only when this channel points at the build in every one of the regions",
        "timeout": "minutes that a copy gets",
        "region": "where the image is, when this machine has no record of it",
        "cloud": "where the image is; default: as its record says",
    },
)
def release(
    _: Any,
    build: str,
    channel: str,
    regions: str = "",
    accounts: str = "",
    org: str = "",
    public: bool = False,
    yes_public: str = "",
    encrypt: bool = False,
    kms_keys: str = "",
    sign_key: str = "",
    after: str = "",
    timeout: int = 120,
    region: str = "",
    cloud: str = "",
    profile: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Copy a proven image, share it, and point a channel at it in every region."""
    from dataclasses import replace

    from gpukiln.attest.signing import signer_of
    from gpukiln.errors import UsageError
    from gpukiln.images.builds import Builds
    from gpukiln.images.channels import load_channel
    from gpukiln.progress import Progress
    from gpukiln.release import publish
    from gpukiln.release.find import find
    from gpukiln.release.needs import require_proven
    from gpukiln.release.options import key_by_region, region_names, sharing_with
    from gpukiln.release.overview import require_pointed
    from gpukiln.state import state_home

    rules = load_channel(channel)
    if yes_public and not public:
        raise UsageError("--yes-public is for --public", hint="add --public, or leave it out")
    found = find(build, Builds(state_home()), cloud=cloud, region=region, profile=profile)
    where, signer = found.cloud, signer_of(sign_key, found.cloud)
    proof = found.proof(rules)
    excused = require_proven(channel, rules, proof, has_gpus=where.has_gpus)
    chosen = tuple(region_names(regions)) or rules.regions or (proof.region,)
    spec = publish.ReleaseSpec(
        proof=proof,
        channel_name=channel,
        channel=rules,
        regions=chosen,
        excused=excused,
        sharing=sharing_with(accounts, org, public=public),
        keys=key_by_region(kms_keys, chosen, encrypt=encrypt),
        timeout_s=timeout * 60,
        signer=signer,
    )
    if after:
        load_channel(after)
        require_pointed(where, replace(spec.pointer, channel=after), proof.build, chosen)
    _clean_up_after_killed(where, dry_run=dry_run)
    if public and not dry_run:
        _confirm_public(publish.source_image(where, proof)["Name"], chosen, yes_public)
    done = publish.release(spec, where, _releases(), Progress(), dry_run=dry_run)
    return _end(done, json=json)


REGIONS = "regions to look at, separated by commas; they name the others of a release"


@command(
    help={
        **COMMON,
        "regions": f"{REGIONS}; default: where this machine has released, or built",
        "image": "a folder of ami/",
        "kubernetes": "Kubernetes version, or none; default: the only one there, or that of components.yaml",
        "to": "build or AMI id to go back to; default: the release before the current one",
        "sign_key": f"signs the rollback, where the channel names keys: {SIGNERS}",
    }
)
def rollback(
    _: Any,
    channel: str,
    regions: str = "",
    image: str = "eks-gpu",
    kubernetes: str = "",
    to: str = "",
    sign_key: str = "",
    cloud: str = "embedded",
    profile: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Point a channel at the release before, in every region."""
    from gpukiln.attest.signing import signer_of
    from gpukiln.images.channels import load_channel
    from gpukiln.images.pointer import Pointer
    from gpukiln.progress import Progress
    from gpukiln.release.rollback import pointer_of
    from gpukiln.release.rollback import rollback as go_back

    rules, records = load_channel(channel), _releases()
    where, chosen = _regions(cloud, regions, profile, records)
    named = Pointer(image, kubernetes, channel)
    pointer = named if kubernetes else pointer_of(image, channel, where, chosen[0])
    signer = signer_of(sign_key, where)
    done = go_back(pointer, rules, where, chosen, records, Progress(), signer=signer, to=to, dry_run=dry_run)
    return _end(done, json=json)


@command(
    help={
        **{name: COMMON[name] for name in ("cloud", "profile", "json")},
        "regions": f"{REGIONS}; default: where this machine has released, or built",
    }
)
def channels(
    _: Any, regions: str = "", cloud: str = "embedded", profile: str = "", json: bool = False
) -> int:
    """Show what every channel points at in every region; exit 1 when something is wrong with one."""
    from gpukiln.release.overview import look, require_whole
    from gpukiln.release.view import channels_table

    where, chosen = _regions(cloud, regions, profile, _releases())
    overview = look(where, chosen)
    if json:
        errors = {region: error.message for region, error in overview.errors.items()}
        print_document("ami.channels/1", channels=[dump(row) for row in overview.rows], errors=errors)
    elif overview.rows:
        results().print(channels_table(overview.rows))
    elif not overview.errors:
        print("no channel points at anything yet", file=sys.stderr)
    for trust in dict.fromkeys(row.trust for row in overview.rows if row.trust):
        names = dict.fromkeys(row.pointer.channel for row in overview.rows if row.trust == trust)
        say(f"note: {', '.join(names)}: {trust}")
    require_whole(overview)
    return 0


@command(
    help={
        **{name: COMMON[name] for name in ("cloud", "profile", "json")},
        "regions": "where, separated by commas; default: where this machine has released, or built",
        "older_than": "days; younger images stay",
        "keep": "earlier releases of every channel that stay; default: as ami/channels.yaml says",
        "limit": "images that one run removes in a region, the oldest first",
        "in_use": "files with ids of images in use, separated by commas: what Karpenter runs, for example",
        "without_channels": "go on where no channel points at anything",
        "yes": "remove; without it nothing is removed",
        "dry_run": "only show them, the default",
    }
)
def prune(
    _: Any,
    regions: str = "",
    older_than: int = 30,
    keep: int = -1,
    limit: int = 20,
    in_use: str = "",
    without_channels: bool = False,
    yes: bool = False,
    cloud: str = "embedded",
    profile: str = "",
    dry_run: bool = False,
    json: bool = False,
) -> int:
    """Show which images nobody needs, with a reason for each; --yes removes them with their snapshots."""
    from gpukiln.progress import Progress
    from gpukiln.release import prune as pruning
    from gpukiln.release.in_use import listed
    from gpukiln.release.options import unique_words
    from gpukiln.release.view import prune_table

    records, yes = _releases(), yes and not dry_run
    where, chosen = _regions(cloud, regions, profile, records)
    rules = pruning.Rules(
        older_than_days=older_than,
        keep=None if keep < 0 else keep,
        limit=limit,
        in_use=listed(unique_words(in_use)),
        without_channels=without_channels,
    )
    for region in chosen:
        _clean_up_after_killed(where.in_region(region), dry_run=not yes)
    with Progress().step("look for images that nobody needs" if not yes else "remove what nobody needs"):
        done = pruning.prune(where, chosen, rules, records, remove=yes)
    if json:
        print_document("ami.prune/1", removed=yes, regions=[one.to_dict() for one in done])
    else:
        actions = [
            action for one in done for action in (*(i.action for i in one.items), *one.leftovers.values())
        ]
        if actions:
            results().print(prune_table(done))
        if not yes and not all(one.error for one in done):
            what = "--yes removes what says `remove`" if "remove" in actions else "nothing is to be"
            print(f"nothing was removed: {what}", file=sys.stderr)
    pruning.require_complete(done)
    return 0


def _clean_up_after_killed(where: Cloud, *, dry_run: bool) -> None:
    """A role that releases may not ask EC2 for machines, so records and keys of this machine have to do."""
    from gpukiln.images.builds import Builds
    from gpukiln.images.killed import clean_up_after_killed, tell_killed
    from gpukiln.state import state_home

    builds = Builds(state_home())
    if dry_run:
        tell_killed(builds, say)
    else:
        clean_up_after_killed(where, builds, say, ask=False)


def _regions(cloud: str, typed: str, profile: str, records: ReleaseLog) -> tuple[Cloud, list[str]]:
    """The cloud, and the regions to look at: those that were typed, or that this machine's records name."""
    from gpukiln.clouds.select import make_cloud
    from gpukiln.errors import UsageError
    from gpukiln.images.builds import Builds
    from gpukiln.release.options import region_names
    from gpukiln.state import state_home

    chosen = region_names(typed)
    if not chosen and (chosen := records.regions(cloud)):
        say(f"--regions {','.join(chosen)}: where this machine has released")
    if not chosen:
        builds = (build.read() for build in Builds(state_home()).all())
        if last := next((record for record in builds if record.plan.cloud == cloud), None):
            chosen = [last.plan.region]
            say(f"--regions {chosen[0]}: of this machine's last build, {last.build_id}")
    if not chosen:
        raise UsageError(
            f"this machine has built and released nothing on {cloud}, so it knows no region to look at",
            hint="--regions us-west-2: one region of a release is enough, it names the others",
        )
    return make_cloud(cloud, chosen[0], profile=profile or None), chosen


def _end(done: Release, *, json: bool) -> int:
    """Show what was done; failed regions are the command's failure."""
    from gpukiln.release.log import require_complete
    from gpukiln.release.view import release_table

    console = results(json=json)
    console.tell(
        f"{done.pointer.path}: {done.action} {'to' if done.action == 'rollback' else 'of'} {done.build}"
    )
    console.print(release_table(done))
    if done.not_run:
        console.tell(f"checks not run: {done.not_run}")
    if done.trust:
        say(f"note: {done.trust}")
    for check, reason in done.excused.items():
        console.print(f"[yellow]not proven[/] {check}: {reason}")
    if done.state == "planned":
        console.print("dry run: nothing was changed")
    if json:
        print_document(f"ami.{done.action}/1", dump(done))
    require_complete(done)
    return 0


def _confirm_public(name: str, regions: tuple[str, ...], typed: str) -> None:
    from gpukiln.errors import RefusedError

    if not typed and sys.stdin.isatty():
        print(f"Everybody will be able to launch {name} in {', '.join(regions)}.", file=sys.stderr)
        print("Type the AMI's name to go on: ", end="", file=sys.stderr, flush=True)
        typed = sys.stdin.readline().strip()
    if typed != name:
        found = f"{typed!r} is not its name" if typed else "its name was not typed"
        raise RefusedError(f"{name} is not made public: {found}", hint=f"--public --yes-public {name}")


def _releases() -> ReleaseLog:
    from gpukiln.release.log import ReleaseLog
    from gpukiln.state import state_home

    return ReleaseLog(state_home())
