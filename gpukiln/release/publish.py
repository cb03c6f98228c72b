"""Release: copy an image, share it, point the channel at it, retire the image that it replaces.

Two rules keep a channel consistent. No pointer moves before the image is available in every region; and every
step reads the state before it acts, so that a second run does what is missing and nothing twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpukiln.attest import statements, trust
from gpukiln.attest.statements import ReleaseClaim, TrustedStatements
from gpukiln.clouds.base import Cloud
from gpukiln.clouds.tags import NOT_RUN_TAG
from gpukiln.errors import RefusedError, UnavailableError
from gpukiln.images import pointer as pointers
from gpukiln.images.channels import CLUSTER, Channel
from gpukiln.images.pointer import Pointer
from gpukiln.instances.tags import tags_of
from gpukiln.progress import Progress
from gpukiln.release.images import (
    COPY_TAGS,
    LaunchPermissions,
    ensure_copy,
    ensure_imds,
    ensure_shared,
    ensure_tags,
    find_copies,
    find_images,
    is_encrypted,
    make_live,
    wait_until_available,
)
from gpukiln.release.log import RegionResult, Release, ReleaseLog, now
from gpukiln.release.regions import RegionOutcome, Site, each, make_sites
from gpukiln.release.run import ReleaseRun, retirement
from gpukiln.release.signing import require_newest_release, sign_release
from gpukiln.release.verification import ImageVerification, require_same_verdict
from gpukiln.verify.digest import suite_digest

if TYPE_CHECKING:
    from securesystemslib.signer import Signer

# stands for the account's default key for EBS, whose id differs by region
DEFAULT_KEY = "default"


@dataclass(frozen=True)
class ReleaseSpec:
    """What to release, and how.

    Args:
        channel: The channel's rules.
        excused: Requirements that were not verified and are excused, with the reason.
        sharing: The launch permissions to add.
        keys: KMS key by region; `default` for the account's. Empty: copies are encrypted as the image is.
        timeout_s: Seconds that a copy gets.
        signer: The key that signs the release, where the channel trusts keys.
    """

    verification: ImageVerification
    channel_name: str
    channel: Channel
    regions: tuple[str, ...]
    excused: Mapping[str, str]
    sharing: LaunchPermissions
    keys: Mapping[str, str]
    timeout_s: float
    signer: Signer | None = None

    @property
    def pointer(self) -> Pointer:
        """The parameter."""
        return Pointer(self.verification.image, self.verification.kubernetes, self.channel_name)

    @property
    def not_run(self) -> str:
        """How many checks of each layer were not run."""
        return self.verification.not_run


def source_image(cloud: Cloud, verification: ImageVerification) -> dict[str, Any]:
    """The image that is to be released.

    Args:
        cloud: The cloud, in the image's region.

    Returns:
        The image, as DescribeImages gives it.

    Raises:
        UnavailableError: It is gone, or not available.
        RefusedError: Its tags have another verdict.
    """
    [outcome] = each(
        make_sites(cloud, [verification.region]),
        "look up the image",
        lambda site: find_images(site, [verification.image_id]),
    ).values()
    image = outcome.require().get(verification.image_id)
    if image is None or image["State"] != "available":
        raise UnavailableError(
            f"{verification.image_id} in {verification.region} is {image['State'] if image else 'gone'}; "
            "wanted: available",
            hint="`invoke ami.build` makes it again",
        )
    require_same_verdict(verification, tags_of(image))
    return image


def release(
    spec: ReleaseSpec, cloud: Cloud, records: ReleaseLog, progress: Progress, *, dry_run: bool = False
) -> Release:
    """Release an image; the failure of a region is in its result, not an exception.

    Args:
        spec: What to release, and how.
        cloud: The cloud, in the image's region.
        records: The store of the record.
        dry_run: Only read.

    Returns:
        The state of each region.

    Raises:
        RefusedError: A safety rule forbids it; nothing was changed.
        UnavailableError: The image is gone; nothing was changed.
        BusyError: Another release runs on this machine.
    """
    if not dry_run:
        # Before anything changes: a missing key would otherwise be noticed after the copies.
        trust.require_signer(spec.channel_name, spec.channel, spec.signer, cloud)
    with contextlib.nullcontext() if dry_run else records.locked():
        with progress.step("read the current state"):
            source = source_image(cloud, spec.verification)
            sites = make_sites(cloud, spec.regions)
            seen = each(sites, "read the channel", lambda site: _inspect_region(site, spec, source))
        _refuse_left_behind(spec, cloud, seen)
        # A safety rule stops the whole release; other failures stop their region only.
        for outcome in seen.values():
            if isinstance(outcome.error, RefusedError):
                raise outcome.error
        started = Release(
            action="release",
            pointer=spec.pointer,
            build=spec.verification.build,
            cloud=cloud.name,
            regions=tuple(_initial_result(site.region, seen[site.region]) for site in sites),
            excused=dict(spec.excused),
            not_run=spec.not_run,
            trust=_trust_text(spec),
            started_at=now(),
        )
        if dry_run:
            # A dry run reports failures of its checks as they would be.
            planned = {r.region: r if r.error else replace(r, state="planned") for r in started.regions}
            return replace(started.with_results(planned), state="planned")
        run = ReleaseRun(started, records, progress, sites)
        return run.all_steps(
            "copy, share and protect",
            lambda site: _prepare(site, spec, source, progress.show_activity),
            moved=lambda site, image_id: require_newest_release(site, spec.pointer, spec.channel, image_id),
            retire=retirement(spec.channel),
        )


@dataclass(frozen=True)
class _RegionState:
    image_id: str  # of the image that exists there already, or an empty string
    replaces: str
    regions: tuple[str, ...]


def _inspect_region(site: Site, spec: ReleaseSpec, source: Mapping[str, Any]) -> _RegionState:
    """Check a region before a release, and read what the channel points at; changes nothing."""
    if spec.sharing.public:
        encrypted = is_encrypted(source) or bool(spec.keys)
        if encrypted:
            raise RefusedError(
                "an encrypted image can't be public: no other account has the key",
                hint="leave out --encrypt and --kms-keys, or --public",
            )
        # Without this check ModifyImageAttribute would fail after an hour of copying.
        state = site.ec2.get_image_block_public_access_state()["ImageBlockPublicAccessState"]
        if state != "unblocked":
            raise RefusedError(
                f"block public access for AMIs is on in {site.region}, so EC2 makes no image public",
                hint="where the account's owner agrees, turn it off: "
                f"aws ec2 disable-image-block-public-access --region {site.region}",
            )
    key, image_id = spec.keys.get(site.region), str(source["ImageId"])
    _refuse_default_key(site.region, spec, key, encrypted=bool(key) or is_encrypted(source))
    if is_copied(site.region, spec, source):
        image_id, _ = find_copies(site, source, key)
        if image_id:
            _require_copy(site, spec, source, find_images(site, [image_id])[image_id])
    versions = pointers.history(site.ssm, spec.pointer)
    current = versions[-1] if versions else None
    return _RegionState(image_id, current.image_id if current else "", current.regions if current else ())


def is_copied(region: str, spec: ReleaseSpec, source: Mapping[str, Any]) -> bool:
    """Whether a region gets a copy and not the image itself."""
    key = spec.keys.get(region)
    # Another region always gets a copy; the own region only where encryption is wanted.
    if region != spec.verification.region or key is None:
        return region != spec.verification.region
    return key != DEFAULT_KEY or not is_encrypted(source)


def _refuse_default_key(region: str, spec: ReleaseSpec, key: str | None, *, encrypted: bool) -> None:
    """Refuse to share an image that the account's default key encrypts."""
    # EC2 user guide, "Share an AMI": only the account itself can use its default key.
    if encrypted and key in (None, DEFAULT_KEY) and spec.sharing.permissions:
        raise RefusedError(
            f"the image in {region} would be encrypted with the account's default key, which no other account"
            " can use",
            hint=f"name a key that the other accounts may use: --kms-keys {region}=KEY",
        )


def _initial_result(region: str, outcome: RegionOutcome[_RegionState]) -> RegionResult:
    # A region that already failed its checks is not touched by any step.
    result = RegionResult(region)
    if outcome.error:
        return result.failed(outcome.error)
    seen = outcome.require()
    return replace(result, replaces=seen.replaces, image_id=seen.image_id)


def _refuse_left_behind(
    spec: ReleaseSpec, cloud: Cloud, seen: Mapping[str, RegionOutcome[_RegionState]]
) -> None:
    """Refuse a release to fewer regions than the last: the others would silently keep the old image."""
    known = {region for outcome in seen.values() if outcome.value for region in outcome.value.regions}
    others = make_sites(cloud, sorted(known - set(spec.regions)))
    histories = each(others, "read the channel", lambda site: pointers.history(site.ssm, spec.pointer))
    if left := [region for region, outcome in histories.items() if outcome.error or outcome.value]:
        raise RefusedError(
            f"channel {spec.channel_name} also points at an image in {', '.join(left)}",
            hint=f"add them: --regions {','.join([*spec.regions, *left])}; "
            f"or end it there: aws ssm delete-parameter "
            f"--name {spec.pointer.path} --region {left[0]}",
        )


def _prepare(site: Site, spec: ReleaseSpec, source: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """The image in a region: available, tagged, shared, protected."""
    verification, image_id = spec.verification, str(source["ImageId"])
    # The copy gets the source's tags, but for those that a copy itself is found by.
    kept = {name: value for name, value in tags_of(source).items() if name not in COPY_TAGS}
    # Only gpukiln's tags and the name: others, such as for cost, belong to the source's owner.
    tags = {name: value for name, value in kept.items() if name == "Name" or name.startswith("gpukiln:")}
    # The count of this release's verdicts, whatever the source's tag says.
    tags[NOT_RUN_TAG] = spec.not_run
    key = spec.keys.get(site.region)
    if is_copied(site.region, spec, source):
        image_id = ensure_copy(site, source, verification.region, key=key, tags=tags)
    image = wait_until_available(site, image_id, timeout_s=spec.timeout_s, say=say)
    if is_copied(site.region, spec, source):
        _require_copy(site, spec, source, image)
    ensure_tags(site, image, tags)
    ensure_imds(site, image, source)
    # An account can have every new volume encrypted, so the copy may be even where no key was named.
    if is_copied(site.region, spec, source):
        _refuse_default_key(site.region, spec, key, encrypted=is_encrypted(image))
    ensure_shared(site, image_id, spec.sharing)
    # Protected before the pointer moves: from then on nodes launch it.
    make_live(site, image)
    if spec.channel.trust:
        _sign(site, spec, image)
    return image_id


def _trust_text(spec: ReleaseSpec) -> str:
    if not spec.channel.trust:
        return trust.UNSIGNED
    return f"signed: trusts {' and '.join(map(str, spec.channel.trust))}"


def _require_copy(site: Site, spec: ReleaseSpec, source: Mapping[str, Any], image: Mapping[str, Any]) -> None:
    """Refuse an image that is a copy by its tags only."""
    # EC2's record of the copy, or a statement of a trusted key, must confirm it (attest/trust.py).
    vouched = None
    if spec.channel.trust:
        vouched, _ = trust.channel_statements(site.cloud, image, spec.channel.trust, site.ssm)
    place = statements.location_of(source, spec.verification.region)
    verified = spec.verification.vouched.verified.values() if spec.verification.vouched else ()
    trust.require_copy(site.cloud, image, place, spec.verification.build, vouched, verified)


def _counting_types(spec: ReleaseSpec, vouched: TrustedStatements) -> tuple[str, ...]:
    """The instance types whose signed verdicts count for the channel."""
    suite = suite_digest() if spec.channel.suite == "current" else ""
    return tuple(
        name
        for name, claim in vouched.verdicts.items()
        if claim.outcome == "passed"
        and claim.profile == spec.verification.profile
        and suite in ("", claim.suite)
    )


def _counting_nodes(
    spec: ReleaseSpec, vouched: TrustedStatements, verified: statements.AmiLocation
) -> tuple[str, ...]:
    """The names of the signed verdicts on nodes that count for the channel."""
    if CLUSTER not in spec.channel.layers:
        return ()
    suite, versions = suite_digest() if spec.channel.suite == "current" else "", spec.channel.kubernetes
    return tuple(
        name
        for name, statement in vouched.cluster_verdicts.items()
        if statement.location == verified
        and (not versions or statement.claim.cluster_kubernetes in versions)
        and statement.claim.outcome == "passed"
        and suite in ("", statement.claim.suite)
    )


def _sign(site: Site, spec: ReleaseSpec, image: Mapping[str, Any]) -> None:
    """Sign the release of an image to the channel, and store it with the verdicts; then read both back."""
    vouched, signer = spec.verification.vouched, spec.signer
    if vouched is None or signer is None:
        raise RefusedError(f"{spec.verification.image_id} has no signed verdict")
    # The statement names the verdicts that the release relied on.
    counted = _counting_types(spec, vouched)
    verified = vouched.verified[counted[0]] if counted else vouched.location
    claim = ReleaseClaim(
        image=spec.verification.about,
        channel=spec.channel_name,
        number=0,  # sign_release sets it
        source=verified,
        suite=suite_digest() if spec.channel.suite == "current" else "",
        instance_types=tuple(name for name in counted if vouched.verified[name] == verified),
        nodes=_counting_nodes(spec, vouched, verified),
        released_at=statements.utc_now(),
    )
    there, keys = trust.channel_statements(site.cloud, image, spec.channel.trust, site.ssm)
    sign_release(site, spec.pointer, claim, there, keys, signer)
    # A copy has an id of its own, so its verdicts are stored under that id too.
    for (kind, name), envelope in vouched.envelopes.items():
        if there.envelopes.get((kind, name)) != envelope:
            site.check_interrupted()
            statements.store_statement(site.ssm, there.location.image_id, kind, name, envelope)
    # Read back before the pointer moves: a statement that can't be verified must not be pointed at.
    trust.require_released(site.cloud, image, spec.pointer, site.ssm, pointed=False)
