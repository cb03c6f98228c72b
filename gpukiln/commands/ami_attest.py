"""Machine images: SBOM and provenance, signed and verified."""

from __future__ import annotations

from dataclasses import dataclass

from gpukiln.cli.command import SIGNERS, JsonOptions, ProfileOptions, say
from gpukiln.errors import UsageError
from gpukiln.options import option


@dataclass(frozen=True)
class AmiAttest(ProfileOptions, JsonOptions):
    """Write an image's SBOM and provenance into its record and their digests on the AMI, or verify them."""

    build: str = option("build id, AMI id or `last`", first=True, required=True)
    sign_key: str = option(f"signs the provenance: {SIGNERS}")
    verify: bool = option("check what was written instead of writing it", False)
    key: str = option(
        "public key that must have signed it (with --verify): a PEM file, or awskms:KEY of AWS KMS"
    )
    identity: str = option("instead of --key, with --issuer: the identity of OIDC that must have signed it")
    issuer: str = option(
        "issuer of --identity's certificate, for example https://token.actions.githubusercontent.com"
    )
    dry_run: bool = option("say what would be written", False)

    def run(self) -> None:
        from gpukiln.attest import attestation
        from gpukiln.attest.signing import required_key, signer_of
        from gpukiln.images.builds import Builds
        from gpukiln.images.orphans import clean_up_killed_builds

        self._check_together()
        build = Builds().find(self.build)
        record = build.read()
        image_id = attestation.baked_image(record).image_id
        cloud = self.connect_to(record.plan.cloud, record.plan.region)
        # In a dry run, too: it fails for a key that can't sign.
        signer = signer_of(self.sign_key, cloud)
        if self.dry_run:
            signed = signer is not None
            self.report(None, schema="ami.attest.plan/1", build=build.id, image_id=image_id, signed=signed)
            say(
                f"dry run: would write {attestation.SBOM} and {attestation.STATEMENT} to {build.folder}"
                f"{f', sign with {self.sign_key}' if signed else ''}, and tag {image_id} with their digests"
            )
        elif self.verify:
            key = required_key(cloud, **self.pick("key", "identity", "issuer"))
            findings = attestation.verify_attestation(build, record, cloud, key)
            self.show(*attestation.findings_lines(findings))
            fields = {"build": build.id, "image_id": image_id, "findings": findings}
            self.report(fields, schema="ami.attest.verify/1")
            # After the report: exit 1 without the findings would not say what is wrong.
            attestation.require_verified(image_id, findings)
        else:
            # ask=False, as a role that only writes tags may not list machines: records and keys of this
            # computer have to do.
            clean_up_killed_builds(cloud, Builds(), say, ask=False)
            # The lock keeps a build or a verification from writing the record at the same time.
            with build.locked():
                written = attestation.write_attestation(build, record, cloud, signer)
            self.report(written, attestation.attestation_lines(written), schema="ami.attest/1")

    def _check_together(self) -> None:
        if self.verify and (self.sign_key or self.dry_run):
            raise UsageError(
                "--verify changes nothing", hint="leave out --sign-key and --dry-run, or leave out --verify"
            )
        if (self.key or self.identity or self.issuer) and not self.verify:
            raise UsageError(
                "--key, --identity and --issuer are for --verify",
                hint="add --verify, or sign with --sign-key",
            )
        # An identity counts only with its issuer: any other OIDC provider could certify the same name. cosign
        # asks for both, too.
        if bool(self.identity) != bool(self.issuer) or (self.key and self.identity):
            raise UsageError("wanted: --key, or both --identity and --issuer")
