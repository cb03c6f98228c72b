"""Release: point a channel at a verified image, roll back, list channels, remove old images."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpukiln.cli.command import CLOUD, SIGNERS, JsonOptions, ProfileOptions, RemovalOptions, say
from gpukiln.errors import RefusedError, UsageError
from gpukiln.options import option

if TYPE_CHECKING:
    from gpukiln.clouds.base import Cloud
    from gpukiln.release.log import Release

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
    cloud: str = CLOUD

    def connect(self) -> tuple[Cloud, list[str]]:
        """The cloud, and the regions to look at."""
        from gpukiln.release.known_regions import known_regions

        regions = known_regions(self.cloud, self.regions, say)
        return self.connect_to(self.cloud, regions[0]), regions


@dataclass(frozen=True)
class AmiRelease(ProfileOptions, JsonOptions):
    """Copy a verified image, share it, and point a channel at it in every region."""

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

    def run(self) -> None:
        from dataclasses import replace

        from gpukiln.attest.signing import signer_of
        from gpukiln.images.builds import Builds
        from gpukiln.images.channels import load_channel
        from gpukiln.progress import Progress
        from gpukiln.release import publish
        from gpukiln.release.find import find
        from gpukiln.release.log import ReleaseLog
        from gpukiln.release.needs import require_verified
        from gpukiln.release.options import key_by_region, region_names, sharing_with
        from gpukiln.release.overview import require_channel_build

        # Everything that can refuse the release comes before anything is copied, and the question to the user
        # last: nobody types a name for a release that is refused then.
        rules = load_channel(self.channel)
        if self.yes_public and not self.public:
            raise UsageError("--yes-public is for --public", hint="add --public, or leave it out")
        published = region_names(self.regions)
        image = find(
            self.build,
            Builds(),
            region=self.image_region,
            # Of an image without a record here, unless --image-region names another.
            elsewhere="".join(published[:1]),
            **self.pick("cloud", "profile"),
        )
        cloud, signer = image.cloud, signer_of(self.sign_key, image.cloud)
        verification = image.verification(rules)
        excused = require_verified(self.channel, rules, verification, has_gpus=cloud.has_gpus)
        # The command line takes precedence over the channel, and that over the image's own region.
        regions = tuple(published) or rules.regions or (verification.region,)
        spec = publish.ReleaseSpec(
            verification=verification,
            channel_name=self.channel,
            channel=rules,
            regions=regions,
            excused=excused,
            sharing=sharing_with(self.accounts, self.org, public=self.public),
            keys=key_by_region(self.kms_keys, regions, encrypt=self.encrypt),
            timeout_s=self.timeout * 60,
            signer=signer,
        )
        if self.after:
            load_channel(self.after)
            require_channel_build(
                cloud, replace(spec.pointer, channel=self.after), verification.build, regions
            )
        _clean_up_killed(cloud, dry_run=self.dry_run)
        if self.public and not self.dry_run:
            _confirm_public(publish.source_image(cloud, verification)["Name"], regions, self.yes_public)
        _report(self, publish.release(spec, cloud, ReleaseLog(), Progress(), dry_run=self.dry_run))


@dataclass(frozen=True)
class AmiRollback(RegionOptions):
    """Point a channel at the release before, in every region."""

    channel: str = CHANNEL
    image: str = option("a folder of ami/", "eks-gpu", setting="image")
    kubernetes: str = option(
        "Kubernetes version, or none; default: the only one of the channel, or that of components.yaml"
    )
    to: str = option("build or AMI id to go back to; default: the release before the current one")
    sign_key: str = option(f"signs the rollback, where the channel names keys: {SIGNERS}")
    dry_run: bool = DRY_RUN

    def run(self) -> None:
        from gpukiln.attest.signing import signer_of
        from gpukiln.images.channels import load_channel
        from gpukiln.images.pointer import Pointer
        from gpukiln.progress import Progress
        from gpukiln.release.log import ReleaseLog
        from gpukiln.release.rollback import pointer_of, rollback

        rules = load_channel(self.channel)
        cloud, regions = self.connect()
        pointer = Pointer(self.image, self.kubernetes, self.channel)
        # Only then the region is asked which versions the channel has.
        if not self.kubernetes:
            pointer = pointer_of(self.image, self.channel, cloud, regions[0])
        options = {**self.pick("to", "dry_run"), "signer": signer_of(self.sign_key, cloud)}
        _report(self, rollback(pointer, rules, cloud, regions, ReleaseLog(), Progress(), **options))


@dataclass(frozen=True)
class AmiChannels(RegionOptions):
    """Show what every channel points at in every region; exit 1 when something is wrong with one."""

    def run(self) -> None:
        from gpukiln.release.overview import read_channels, require_consistent
        from gpukiln.release.view import channels_table, trust_notes

        overview = read_channels(*self.connect())
        errors = {region: error.message for region, error in overview.errors.items()}
        parts = [channels_table(overview.rows)] if overview.rows else []
        self.report(None, parts, schema="ami.channels/1", channels=overview.rows, errors=errors)
        if not (overview.rows or overview.errors or self.json):
            say("no channel points at anything yet")
        for note in trust_notes(overview.rows):
            say(note)
        # After the table: exit 1 is about a row of it.
        require_consistent(overview)


@dataclass(frozen=True)
class AmiPrune(RemovalOptions, RegionOptions):
    """Show which images can be removed, with a reason for each; --yes removes them with their snapshots."""

    older_than: int = option("days; younger images stay", 30)
    keep: int = option("earlier releases of every channel that stay; default: as ami/channels.yaml says", -1)
    limit: int = option("images that one run removes in a region, the oldest first", 20)
    in_use: str = option(
        "files with ids of images in use, separated by commas: what Karpenter runs, for example"
    )
    without_channels: bool = option("go on where no channel points at anything", False)

    def run(self) -> None:
        from gpukiln.progress import Progress
        from gpukiln.release import prune
        from gpukiln.release.in_use import images_in_files
        from gpukiln.release.log import ReleaseLog
        from gpukiln.release.options import unique_words
        from gpukiln.release.view import prune_notice, prune_table

        cloud, regions = self.connect()
        rules = prune.PruneRules(
            **self.pick("limit", "without_channels"),
            older_than_days=self.older_than,
            # -1 is none, because 0 is a number: keep no earlier release.
            keep=None if self.keep < 0 else self.keep,
            in_use=images_in_files(unique_words(self.in_use)),
        )
        for region in regions:
            _clean_up_killed(cloud.in_region(region), dry_run=not self.removes)
        with Progress().step(f"{'remove' if self.removes else 'look for'} images that can be removed"):
            pruned = prune.prune(cloud, regions, rules, ReleaseLog(), remove=self.removes)
        parts = [prune_table(pruned)] if any(row.actions for row in pruned) else []
        rows = [row.to_dict() for row in pruned]
        self.report(None, parts, schema="ami.prune/1", removed=self.removes, regions=rows)
        if not self.json and not self.removes and (notice := prune_notice(pruned)):
            say(notice)
        # After the table of what was removed: exit 5 says that it is not all.
        prune.require_complete(pruned)


def _clean_up_killed(cloud: Cloud, *, dry_run: bool) -> None:
    """A role that releases may not ask EC2 for machines: records and keys of this machine have to do."""
    from gpukiln.images.builds import Builds
    from gpukiln.images.orphans import clean_up_killed_builds, report_killed

    if dry_run:
        report_killed(Builds(), say)
    else:
        clean_up_killed_builds(cloud, Builds(), say, ask=False)


def _report(command: JsonOptions, release: Release) -> None:
    """Show what was done; a failed region is the command's failure."""
    from gpukiln.release.log import require_complete
    from gpukiln.release.view import release_parts

    # Shown before the check: of a release that failed in one region the others are done, and are named.
    command.show(*release_parts(release))
    if release.trust:
        say(f"note: {release.trust}")
    command.report(release, schema=f"ami.{release.action}/1")
    require_complete(release)


def _confirm_public(name: str, regions: tuple[str, ...], typed: str) -> None:
    # sys.stdin is None where file descriptor 0 is closed at the start (Python's documentation of sys).
    if not typed and sys.stdin and sys.stdin.isatty():
        say(f"Everybody will be able to launch {name} in {', '.join(regions)}.")
        # Not input(): its prompt would go to standard output, where the result goes.
        print("Type the AMI's name to go on: ", end="", file=sys.stderr, flush=True)
        typed = sys.stdin.readline().strip()
    if typed != name:
        reason = f"{typed!r} is not its name" if typed else "its name was not typed"
        raise RefusedError(f"{name} is not made public: {reason}", hint=f"--public --yes-public {name}")
