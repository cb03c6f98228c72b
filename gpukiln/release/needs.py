"""Compares an image's verification with a channel's requirements: `ami.verify` provides what is missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpukiln.catalog.gpus import gpu, gpus
from gpukiln.catalog.instance_types import instance_type, instance_types
from gpukiln.clouds.tags import SBOM_TAG, STATEMENT_TAG
from gpukiln.errors import RefusedError, UsageError
from gpukiln.findings import Finding
from gpukiln.images.channels import CLUSTER, DECLARED, Channel
from gpukiln.images.keys import describe_trust
from gpukiln.pipeline.verdict_tags import DIGEST_CHARS, VerdictSummary
from gpukiln.release.verification import ImageVerification
from gpukiln.verify.digest import suite_digest

NO_MACHINE = "no machine of this cloud has a GPU"
NO_GPU = "no GPU"  # the reason of a check that does not run on such a machine
POD = "pod"  # the profile of a verdict on a node


@dataclass(frozen=True)
class MachineNeed:
    """A kind of machine on which an image must have been verified.

    Args:
        title: In words, for example `a machine with A10G`.
        gpus: Keys of GPUs, of which the machine has one; empty: any machine.
    """

    title: str
    gpus: frozenset[str] = frozenset()

    def met_by(self, name: str) -> bool:
        """Whether a verdict of an instance type counts.

        Args:
            name: The type; one that the catalogue does not know counts where any machine does.
        """
        known = instance_types().get(name)
        return not self.gpus or (known is not None and known.gpu in self.gpus)


def machine_needs(channel: Channel, verification: ImageVerification) -> list[MachineNeed]:
    """The machines on which an image must have been verified before a channel accepts it.

    Returns:
        One for each GPU or architecture that the channel names; where it names none, any machine.
    """
    needs: dict[str, MachineNeed] = {}
    for word in channel.gpus:
        # `declared` stands for the GPUs of the instance types that the image was built for.
        if word == DECLARED:
            for key in dict.fromkeys(instance_type(name).gpu for name in verification.instance_types):
                needs[key] = MachineNeed(f"a machine with {gpu(key).name}", frozenset([key]))
        elif word in gpus():
            needs[word] = MachineNeed(f"a machine with {gpu(word).name}", frozenset([word]))
        else:
            # An architecture: any of its GPUs will do.
            keys = [key for key, board in gpus().items() if board.arch == word]
            needs[word] = MachineNeed(f"a machine with a GPU of {word}", frozenset(keys))
    return list(needs.values()) or [MachineNeed("a machine")]


def evaluate(channel: Channel, verification: ImageVerification, *, has_gpus: bool) -> list[Finding]:
    """Compare a channel's requirements with an image's verification.

    Args:
        verification: How the image was verified.
        has_gpus: Whether the cloud that it was verified on has GPUs.

    Returns:
        not-passed for each type on which it failed; not-shown for each missing verification, whose evidence
        `reverify` is true where another verification would provide it, and false where the cause of a check
        that did not run has to be fixed first; not-in-cluster; attestation; and excused, which is no error,
        with the reason.
    """
    # a verdict of another profile ran other checks
    right = {
        name: verdict
        for name, verdict in verification.verdicts.items()
        if verdict.profile == verification.profile
    }
    findings = [
        Finding("not-passed", "error", "its verdict is not `passed`", name)
        for name, verdict in right.items()
        if not verdict.passed
    ]
    layers = [*channel.layers, *(verification.required_layers if channel.image_layers else ())]
    # A cloud with GPUs has no excuse: there the checks can run.
    excuses = () if has_gpus else channel.excused_without_gpus
    needs = machine_needs(channel, verification)
    # One finding for each GPU, so that the release's record says what was excused.
    if not has_gpus and NO_GPU in excuses:
        findings += [Finding("excused", "info", NO_MACHINE, need.title) for need in needs if need.gpus]
        needs = [MachineNeed("a machine")]  # the rest can be verified without a GPU
    for need in needs:
        on = [verdict for name, verdict in right.items() if verdict.passed and need.met_by(name)]
        lacking = [list(_missing_of_verdict(verdict, channel, need, layers, excuses)) for verdict in on]
        nothing = [_not_shown_finding(need, "it was not verified there", reverify=True)]
        # Of several machines of a kind the best verdict counts.
        findings += min(
            lacking, key=lambda some: sum(finding.id != "excused" for finding in some), default=nothing
        )
    if CLUSTER in channel.layers:
        findings += _cluster_findings(channel, verification, has_gpus=has_gpus, excuses=excuses)
    problems = _attestation(channel, verification)
    return findings + [Finding("attestation", "error", text, verification.image_id) for text in problems]


def _cluster_findings(
    channel: Channel, verification: ImageVerification, *, has_gpus: bool, excuses: tuple[str, ...]
) -> Iterator[Finding]:
    """What a channel requires of the image as a node of a cluster.

    Returns:
        not-in-cluster for each verdict that failed, or that a GPU lacks in a version of Kubernetes. The
        evidence has that version (empty: any will do), and the instance types to try (empty: see `gpus`).
    """
    if not has_gpus and NO_GPU in excuses:
        yield Finding("excused", "info", NO_MACHINE, "a node of a cluster")
        return
    nodes = {
        (machine, version): verdict
        for (machine, version), verdict in verification.cluster_verdicts.items()
        if verdict.profile == POD and (not channel.kubernetes or version in channel.kubernetes)
    }
    for (machine, version), verdict in nodes.items():
        # As for machines: it is not fit for that type, whatever its verdicts on others are.
        if not verdict.passed:
            yield _not_in_cluster("its verdict as a node is not `passed`", machine, version, types=[machine])
    today = suite_digest()[:DIGEST_CHARS]
    for need in machine_needs(channel, verification):
        for required in channel.kubernetes or ("",):
            suites = {
                verdict.suite
                for (machine, version), verdict in nodes.items()
                if need.met_by(machine) and required in ("", version)
            }
            if today in suites or (suites and channel.suite == "any"):
                continue
            message = "it was not verified as a node"
            if suites:
                message += f" by the current suite {today}, only by {', '.join(sorted(suites))}"
            yield _not_in_cluster(message, need.title, required, gpus=sorted(need.gpus))


def _not_in_cluster(
    message: str, machine: str, kubernetes: str, *, types: Sequence[str] = (), gpus: Sequence[str] = ()
) -> Finding:
    in_version = f" in Kubernetes {kubernetes}" if kubernetes else ""
    evidence = {"types": list(types), "gpus": list(gpus), "kubernetes": kubernetes}
    return Finding("not-in-cluster", "error", message, f"{machine}{in_version}", evidence)


def cluster_machines_to_try(
    channel_name: str,
    channel: Channel,
    verification: ImageVerification,
    given: list[str],
    kubernetes: str,
    *,
    has_gpus: bool,
) -> list[tuple[str, ...]]:
    """As `machines_to_try`, for the verdicts that a channel requires of the image as a node.

    Args:
        kubernetes: Minor version of the cluster: what is required in another version is left out.
    """
    tries = []
    for finding in evaluate(channel, verification, has_gpus=has_gpus):
        if finding.id == "not-in-cluster" and finding.evidence["kubernetes"] in ("", kubernetes):
            need = MachineNeed(finding.object, frozenset(finding.evidence["gpus"]))
            tries.append(
                tuple(finding.evidence["types"]) or _types_to_try(channel_name, need, verification, given)
            )
    return list(dict.fromkeys(tries))


def _not_shown_finding(need: MachineNeed, message: str, *, reverify: bool = False) -> Finding:
    return Finding(
        "not-shown", "error", message, need.title, {"gpus": sorted(need.gpus), "reverify": reverify}
    )


def _missing_of_verdict(
    verdict: VerdictSummary, channel: Channel, need: MachineNeed, layers: list[str], excuses: tuple[str, ...]
) -> Iterator[Finding]:
    """The findings of one verdict for a need."""
    where = verdict.instance_type
    if channel.suite == "current" and verdict.suite != (today := suite_digest()[:DIGEST_CHARS]):
        yield _not_shown_finding(
            need, f"{where}: verified by the suite {verdict.suite}, the current one is {today}", reverify=True
        )
    if need.gpus and not verdict.saw_gpu:
        yield _not_shown_finding(need, f"{where}: no check of a GPU ran", reverify=True)
    if verdict.checks is None:
        why = ", and its tags don't say why" if excuses else ""
        for layer, count in verdict.not_run.items():
            if layer in layers:
                yield _not_shown_finding(need, f"{where}: {count} checks of {layer} were not run{why}")
    for check in (check for check in verdict.checks or () if check.layer in layers):
        if check.reason in excuses:
            yield Finding("excused", "info", check.reason, check.id)
        else:
            yield _not_shown_finding(need, f"{where}: {check.id}: {check.reason}")


def _attestation(channel: Channel, verification: ImageVerification) -> Iterator[str]:
    if channel.attestation == "none":
        return
    for what, tag in (("SBOM", SBOM_TAG), ("provenance", STATEMENT_TAG)):
        if not verification.attested.get(tag):
            yield f"the image has no tag {tag}: no {what} was written"
    # A signature of the provenance is a part of the signed verdict, not a document of its own.
    if channel.attestation == "signed":
        claims = verification.vouched.verdicts.values() if verification.vouched else ()
        digests = {claim.provenance for claim in claims if claim.provenance}
        # The signed verdict names the provenance: a tag that was changed later names another one.
        if verification.attested.get(STATEMENT_TAG) not in digests:
            yield (
                "no trusted key signed its provenance: "
                f"{verification.attested.get(STATEMENT_TAG) or 'none'} by the tag {STATEMENT_TAG}, "
                f"signed {' or '.join(sorted(digests)) or 'none'}"
            )
    # `findings` is None where SBOM and provenance are on another machine.
    yield from verification.findings or ()


def require_verified(
    name: str, channel: Channel, verification: ImageVerification, *, has_gpus: bool
) -> dict[str, str]:
    """Refuse an image that does not meet a channel's requirements.

    Args:
        name: The channel's name.
        verification: How the image was verified.
        has_gpus: Whether the cloud that it was verified on has GPUs.

    Returns:
        The requirements that were excused, with the reason.

    Raises:
        RefusedError: A requirement is not met; the details name all of them, the hint how to meet them.
    """
    refused = f"channel {name} refuses {verification.image_id}"
    which = verification.named or f"{verification.image_id} --region {verification.region}"
    findings: dict[str, list[Finding]] = defaultdict(list)
    for finding in evaluate(channel, verification, has_gpus=has_gpus):
        findings[finding.id].append(finding)
    # Statements of keys that the channel does not trust are named, so that a wrong key is noticed.
    sign, unsigned = "", tuple[str, ...]()
    if channel.trust:
        signers = f"wanted: verdicts signed by {describe_trust(channel.trust)} (trust, ami/channels.yaml)"
        sign, unsigned = (
            " --sign-key KEY",
            (*(verification.vouched.refused if verification.vouched else ()), signers),
        )
        if verification.vouched is None or not verification.vouched.verdicts:
            raise RefusedError(
                f"{refused}: it has no verdict that a trusted key signed",
                details=unsigned,
                hint=f"`invoke ami.verify {which} --for {name}{sign}` boots it, verifies it and signs",
            )
    # Before `never verified`, which would hide that somebody tried with --simulated.
    if not verification.verdicts and verification.simulated:
        raise RefusedError(
            f"{refused}: it was verified on simulated GPUs only ({', '.join(verification.simulated)}), "
            "which does not count",
            hint=f"`invoke ami.verify {which} --for {name}`, without --simulated, verifies it",
        )
    if not verification.verdicts:
        raise RefusedError(
            f"{refused}: it was never verified", hint=f"`invoke ami.verify {which} --for {name}` verifies it"
        )
    if failed := [finding.object for finding in findings["not-passed"]]:
        raise RefusedError(
            f"{refused}: its verdict is not `passed` on {', '.join(failed)}",
            hint="fix the cause and build again; or, where the machine was faulty, verify it again: "
            f"`invoke ami.verify {which} --instance-types {failed[0]}`",
        )
    if missing := findings["not-shown"]:
        titles = ", ".join(dict.fromkeys(finding.object for finding in missing))
        raise RefusedError(
            f"{refused}: its requirements were not verified on {titles}",
            details=(*(f"{finding.object}: {finding.message}" for finding in missing), *unsigned),
            hint=f"`invoke ami.verify {which} --for {name}{sign}` verifies it there; where checks did not "
            "run for another reason, fix that first",
        )
    if missing := findings["not-in-cluster"]:
        raise RefusedError(
            f"{refused}: as a node of a cluster its requirements were not verified on "
            + ", ".join(dict.fromkeys(finding.object for finding in missing)),
            details=(*(f"{finding.object}: {finding.message}" for finding in missing), *unsigned),
            hint=f"`invoke ami.verify {which} --cluster CONTEXT --for {name}{sign}` verifies it in the "
            "version of that cluster; where it failed, fix the cause first",
        )
    if messages := [finding.message for finding in findings["attestation"]]:
        raise RefusedError(
            f"{refused}: {messages[0]}",
            details=tuple(messages[1:]),
            hint=f"`invoke ami.attest {verification.build}` writes SBOM and provenance on the machine that "
            "has the build's record, `--verify` checks them",
        )
    return {finding.object: finding.message for finding in findings["excused"]}


def types_for(need: MachineNeed, verification: ImageVerification, given: list[str]) -> list[str]:
    """The instance types to try for a need, the best first.

    Args:
        given: The types that the user named.

    Returns:
        The named types that meet the need, else those of the build that meet it; may be empty.
    """
    # Named types first; without a fitting one the message of the caller names the need.
    for names in (given, verification.instance_types):
        if fitting := [name for name in names if need.met_by(name)]:
            return fitting
    return []


def machines_to_try(
    channel_name: str, channel: Channel, verification: ImageVerification, given: list[str], *, has_gpus: bool
) -> list[tuple[str, ...]]:
    """The types to try, best first, for each verdict that a channel requires and a machine can provide.

    Args:
        channel_name: For the message.
        given: Types that were named; empty: those that the image was built for.
        has_gpus: Whether the cloud has GPUs.

    Raises:
        UsageError: The channel requires a GPU that none of the named types has.
    """
    findings = evaluate(channel, verification, has_gpus=has_gpus)
    tries = []
    unverified = [
        finding for finding in findings if finding.id == "not-shown" and finding.evidence["reverify"]
    ]
    for title, keys in {finding.object: finding.evidence["gpus"] for finding in unverified}.items():
        need = MachineNeed(title, frozenset(keys))
        tries.append(_types_to_try(channel_name, need, verification, given))
    # A failure may have been the machine's fault, so another machine of the type is tried.
    tries += [(finding.object,) for finding in findings if finding.id == "not-passed"]
    return list(dict.fromkeys(tries))


def _types_to_try(
    channel_name: str, need: MachineNeed, verification: ImageVerification, given: list[str]
) -> tuple[str, ...]:
    types = types_for(need, verification, given)
    if not types:
        raise UsageError(
            f"channel {channel_name} requires {need.title}, and no named type is one",
            hint="name one with --instance-types",
        )
    return tuple(types)
