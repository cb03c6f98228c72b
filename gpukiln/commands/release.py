"""Release: point a channel at a proven image, go back, look, and remove what is not needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.commands.cli import (
    SIGNERS,
    JsonOptions,
    ProfileOptions,
    RemovalOptions,
    print_document,
    results,
    say,
)
from gpukiln.options import option
from gpukiln.typed import dump

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.release.log import Release, ReleaseLog

DRY_RUN = option("only look, and say what would be done", False)
CHANNEL = option(
    "a channel of ami/channels.yaml, for example stable", first=True, required=True, setting="channel"
)


@dataclass(frozen=True)
class RegionOptions(ProfileOptions, JsonOptions):
    """Where channels are looked at."""

    regions: str = option(
        "regions to look at, separated by commas; they name the others of a release; default: where this "
        "machine has released, or built",
        also="region",
    )
    cloud: str = option("embedded (this machine) or aws (your account)", "embedded", setting="cloud")

    def sites(self, records: ReleaseLog) -> tuple[Cloud, list[str]]:
        """The cloud, and the regions to look at: typed ones, or those of this machine's records."""
        from gpukiln.clouds.select import make_cloud
        from gpukiln.errors import UsageError
        from gpukiln.images.builds import Builds
        from gpukiln.release.options import region_names
        from gpukiln.state import state_home

        chosen = region_names(self.regions)
        if not chosen and (chosen := records.regions(self.cloud)):
            say(f"--regions {','.join(chosen)}: where this machine has released")
        if not chosen:
            builds = (build.read() for build in Builds(state_home()).all())
            if last := next((record for record in builds if record.plan.cloud == self.cloud), None):
                chosen = [last.plan.region]
                say(f"--regions {chosen[0]}: of this machine's last build, {last.build_id}")
        if not chosen:
            raise UsageError(
                f"this machine has built and released nothing on {self.cloud}, "
                "so it knows no region to look at",
                hint="--regions us-west-2: one region of a release is enough, it names the others",
            )
        return make_cloud(self.cloud, chosen[0], profile=self.profile or None), chosen


@dataclass(frozen=True)
class AmiRelease(ProfileOptions, JsonOptions):
    """Copy a proven image, share it, and point a channel at it in every region."""

    build: str = option(
        "build id, `last`, or AMI id (with --cloud, and --image-region, when another machine built it)",
        first=True,
        required=True,
    )
    channel: str = CHANNEL
    regions: str = option(
        "where to publish, separated by commas; default: the channel's, or the image's own", also="region"
    )
    accounts: str = option("accounts that may launch the image, separated by commas")
    org: str = option("ARNs of organizations or organizational units that may, separated by commas")
    public: bool = option("let everybody launch it; the AMI's name has to be typed", False)
    yes_public: str = option("the AMI's name, instead of typing it")
    encrypt: bool = option("encrypt every region's copy with the account's default key", False)
    kms_keys: str = option("encrypt with these keys, REGION=KEY for every region, separated by commas")
    sign_key: str = option(f"signs the release, where the channel names keys: {SIGNERS}")
    after: str = option("only when this channel points at the build in every one of the regions")
    timeout: int = option("minutes that a copy gets", 120)
    image_region: str = option(
        "where the image is, when this machine has no record of it; default: the first of --regions"
    )
    cloud: str = option("where the image is; default: as its record says")
    dry_run: bool = DRY_RUN

    def run(self) -> int:
        from dataclasses import replace

        from gpukiln.attest.signing import signer_of
        from gpukiln.errors import UsageError
        from gpukiln.images.builds import Builds
        from gpukiln.images.channels import load_channel
        from gpukiln.progress import Progress
        from gpukiln.release import publish
        from gpukiln.release.find import find
        from gpukiln.release.needs import require_verified
        from gpukiln.release.options import key_by_region, region_names, sharing_with
        from gpukiln.release.overview import require_channel_build
        from gpukiln.state import state_home

        rules = load_channel(self.channel)
        if self.yes_public and not self.public:
            raise UsageError("--yes-public is for --public", hint="add --public, or leave it out")
        published = region_names(self.regions)
        found = find(
            self.build,
            Builds(state_home()),
            region=self.image_region,
            elsewhere="".join(published[:1]),
            **self.pick("cloud", "profile"),
        )
        where, signer = found.cloud, signer_of(self.sign_key, found.cloud)
        verification = found.verification(rules)
        excused = require_verified(self.channel, rules, verification, has_gpus=where.has_gpus)
        chosen = tuple(published) or rules.regions or (verification.region,)
        spec = publish.ReleaseSpec(
            verification=verification,
            channel_name=self.channel,
            channel=rules,
            regions=chosen,
            excused=excused,
            sharing=sharing_with(self.accounts, self.org, public=self.public),
            keys=key_by_region(self.kms_keys, chosen, encrypt=self.encrypt),
            timeout_s=self.timeout * 60,
            signer=signer,
        )
        if self.after:
            load_channel(self.after)
            require_channel_build(
                where, replace(spec.pointer, channel=self.after), verification.build, chosen
            )
        _clean_up_after_killed(where, dry_run=self.dry_run)
        if self.public and not self.dry_run:
            _confirm_public(publish.source_image(where, verification)["Name"], chosen, self.yes_public)
        done = publish.release(spec, where, _releases(), Progress(), dry_run=self.dry_run)
        return _end(done, json=self.json)


@dataclass(frozen=True)
class AmiRollback(RegionOptions):
    """Point a channel at the release before, in every region."""

    channel: str = CHANNEL
    image: str = option("a folder of ami/", "eks-gpu", setting="image")
    kubernetes: str = option(
        "Kubernetes version, or none; default: the only one there, or that of components.yaml"
    )
    to: str = option("build or AMI id to go back to; default: the release before the current one")
    sign_key: str = option(f"signs the rollback, where the channel names keys: {SIGNERS}")
    dry_run: bool = DRY_RUN

    def run(self) -> int:
        from gpukiln.attest.signing import signer_of
        from gpukiln.images.channels import load_channel
        from gpukiln.images.pointer import Pointer
        from gpukiln.progress import Progress
        from gpukiln.release.rollback import pointer_of
        from gpukiln.release.rollback import rollback as go_back

        rules, records = load_channel(self.channel), _releases()
        where, chosen = self.sites(records)
        named = Pointer(self.image, self.kubernetes, self.channel)
        pointer = named if self.kubernetes else pointer_of(self.image, self.channel, where, chosen[0])
        signer = signer_of(self.sign_key, where)
        how = self.pick("to", "dry_run")
        done = go_back(pointer, rules, where, chosen, records, Progress(), signer=signer, **how)
        return _end(done, json=self.json)


@dataclass(frozen=True)
class AmiChannels(RegionOptions):
    """Show what every channel points at in every region; exit 1 when something is wrong with one."""

    def run(self) -> int:
        from gpukiln.release.overview import read_channels, require_consistent
        from gpukiln.release.view import channels_table

        where, chosen = self.sites(_releases())
        overview = read_channels(where, chosen)
        if self.json:
            errors = {region: error.message for region, error in overview.errors.items()}
            print_document("ami.channels/1", channels=[dump(row) for row in overview.rows], errors=errors)
        elif overview.rows:
            results().print(channels_table(overview.rows))
        elif not overview.errors:
            print("no channel points at anything yet", file=sys.stderr)
        for trust in dict.fromkeys(row.trust for row in overview.rows if row.trust):
            names = dict.fromkeys(row.pointer.channel for row in overview.rows if row.trust == trust)
            say(f"note: {', '.join(names)}: {trust}")
        require_consistent(overview)
        return 0


@dataclass(frozen=True)
class AmiPrune(RemovalOptions, RegionOptions):
    """Show which images nobody needs, with a reason for each; --yes removes them with their snapshots."""

    older_than: int = option("days; younger images stay", 30)
    keep: int = option("earlier releases of every channel that stay; default: as ami/channels.yaml says", -1)
    limit: int = option("images that one run removes in a region, the oldest first", 20)
    in_use: str = option(
        "files with ids of images in use, separated by commas: what Karpenter runs, for example"
    )
    without_channels: bool = option("go on where no channel points at anything", False)

    def run(self) -> int:
        from gpukiln.progress import Progress
        from gpukiln.release import prune as pruning
        from gpukiln.release.in_use import images_in_files
        from gpukiln.release.options import unique_words
        from gpukiln.release.view import prune_table

        records = _releases()
        where, chosen = self.sites(records)
        rules = pruning.PruneRules(
            **self.pick("limit", "without_channels"),
            older_than_days=self.older_than,
            keep=None if self.keep < 0 else self.keep,
            in_use=images_in_files(unique_words(self.in_use)),
        )
        for region in chosen:
            _clean_up_after_killed(where.in_region(region), dry_run=not self.removes)
        with Progress().step(f"{'remove' if self.removes else 'look for'} images that nobody needs"):
            done = pruning.prune(where, chosen, rules, records, remove=self.removes)
        if self.json:
            print_document("ami.prune/1", removed=self.removes, regions=[one.to_dict() for one in done])
        else:
            actions = [
                action
                for one in done
                for action in (*(i.action for i in one.items), *one.orphaned_snapshots.values())
            ]
            if actions:
                results().print(prune_table(done))
            if not self.removes and not all(one.error for one in done):
                what = "--yes removes what says `remove`" if "remove" in actions else "nothing is to be"
                print(f"nothing was removed: {what}", file=sys.stderr)
        pruning.require_complete(done)
        return 0


def _clean_up_after_killed(where: Cloud, *, dry_run: bool) -> None:
    """A role that releases may not ask EC2 for machines, so records and keys of this machine have to do."""
    from gpukiln.images.builds import Builds
    from gpukiln.images.orphans import remove_orphans, report_killed
    from gpukiln.state import state_home

    builds = Builds(state_home())
    if dry_run:
        report_killed(builds, say)
    else:
        remove_orphans(where, builds, say, ask=False)


def _end(done: Release, *, json: bool) -> int:
    """Show what was done; failed regions are the command's failure."""
    from gpukiln.release.log import require_complete
    from gpukiln.release.view import release_table

    console = results(json=json)
    console.print_text(
        f"{done.pointer.path}: {done.action} {'to' if done.action == 'rollback' else 'of'} {done.build}"
    )
    console.print(release_table(done))
    if done.not_run:
        console.print_text(f"checks not run: {done.not_run}")
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
