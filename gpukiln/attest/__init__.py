"""Attestation of images: SBOM, provenance, signed statements, and their verification.

Central values: `Attestation` (the files that a build gets), `SignedStatement` (a verdict or release that a
trusted key signed) and `TrustedStatements` (all of an AMI). Tags of an AMI are hints; where a channel names
keys, only signed statements count.

- `image_contents`, `sbom`, `provenance`, `attestation`: what an image is made of and where it comes from.
- `signing`, `keyless`: keys in files, AWS KMS, and OIDC identities of CI jobs.
- `statements`: statements in SSM parameters; `trust`: whether an AMI may be used; `newest_release`: detects
  a pointer that was set back.
"""
