"""Machine images: SBOM and provenance, signed and verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpukiln.commands.cli import SIGNERS, JsonOptions, ProfileOptions, print_document, results, say
from gpukiln.options import option
from gpukiln.typed import dump

STYLES = {"passed": "green", "failed": "bold red", "not_run": "yellow"}


@dataclass(frozen=True)
class AmiAttest(ProfileOptions, JsonOptions):
    """Write an image's SBOM and provenance beside its record and their digests on the AMI, or verify them."""

    build: str = option("build id, AMI id or `last`", first=True, required=True)
    sign_key: str = option(f"signs the provenance: {SIGNERS}")
    verify: bool = option("check what was written instead of writing it", False)
    key: str = option(
        "public key that must have signed it (with --verify): a PEM file, or awskms:KEY of AWS KMS"
    )
    identity: str = option("instead of --key, with --issuer: the identity of OIDC that must have signed it")
    issuer: str = option(
        "who vouches for --identity, for example https://token.actions.githubusercontent.com"
    )
    dry_run: bool = option("say what would be written", False)

    def run(self) -> int:
        from gpukiln.attest import attestation
        from gpukiln.attest.signing import public_key_of, signer_of
        from gpukiln.clouds.select import make_cloud
        from gpukiln.errors import UsageError
        from gpukiln.images.builds import Builds
        from gpukiln.images.orphans import remove_orphans
        from gpukiln.state import state_home

        if self.verify and (self.sign_key or self.dry_run):
            raise UsageError(
                "--verify changes nothing", hint="leave out --sign-key and --dry-run, or leave out --verify"
            )
        if (self.key or self.identity or self.issuer) and not self.verify:
            raise UsageError(
                "--key, --identity and --issuer are for --verify",
                hint="add --verify, or sign with --sign-key",
            )
        if bool(self.identity) != bool(self.issuer) or (self.key and self.identity):
            raise UsageError("wanted: --key, or both --identity and --issuer")
        folder = Builds(state_home()).find(self.build)
        record = folder.read()
        baked = attestation.baked_image(record)
        cloud = make_cloud(record.plan.cloud, record.plan.region, profile=self.profile or None)
        signer = signer_of(self.sign_key, cloud)
        if self.dry_run:
            if self.json:
                print_document(
                    "ami.attest.plan/1", build=folder.id, image_id=baked.image_id, signed=signer is not None
                )
            signing = f", sign with {self.sign_key}" if signer else ""
            say(
                f"dry run: would write {attestation.SBOM} and {attestation.STATEMENT} to {folder.folder}"
                f"{signing}, and tag {baked.image_id} with their digests"
            )
            return 0
        if self.verify:
            from gpukiln.attest.keyless import IdentityKey

            key: Any = public_key_of(self.key, cloud) if self.key else None
            if self.identity:
                key = IdentityKey(self.identity, self.issuer)
            return _verify(folder, record, cloud, key, self.json)
        remove_orphans(cloud, Builds(state_home()), say, ask=False)
        with folder.locked():
            written = attestation.write_attestation(folder, record, cloud, signer)
        if self.json:
            print_document("ami.attest/1", dump(written))
            return 0
        shown = results()
        shown.print_text(f"SBOM: {written.sbom}\nprovenance: {written.provenance}")
        shown.print_text(
            f"signed: {written.envelope}" if written.envelope else "not signed: --sign-key FILE signs it"
        )
        shown.print_text(f"{written.image_id} is tagged with the digests of both")
        return 0


def _verify(folder: Any, record: Any, cloud: Any, key: Any, json: bool) -> int:
    from rich.text import Text

    from gpukiln.attest import attestation
    from gpukiln.errors import CheckFailedError

    found = attestation.verify_attestation(folder, record, cloud, key)
    console = results(json=json)
    for finding in found:
        outcome = finding.outcome.replace("_", " ")
        line = Text.assemble((f"{outcome:8}", STYLES[finding.outcome]), f" {finding.id:24} {finding.message}")
        console.print(line, soft_wrap=True)
    if json:
        print_document(
            "ami.attest.verify/1",
            build=folder.id,
            image_id=record.bake.image_id,
            findings=[dump(finding) for finding in found],
        )
    if failed := [finding for finding in found if finding.outcome == "failed"]:
        raise CheckFailedError(
            f"{len(failed)} of {len(found)} steps failed for {record.bake.image_id}",
            hint="don't roll this image out before it is known who changed what",
            details=tuple(f"{finding.id}: {finding.message}" for finding in failed),
        )
    return 0
