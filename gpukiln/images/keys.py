"""References to signers in options and a channel's `trust`: a PEM file, an AWS KMS key, an OIDC identity."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpukiln.errors import UsageError
from gpukiln.typed import strict

KMS, SIGSTORE = "awskms:", "sigstore:"  # the schemes of securesystemslib's AWSSigner and SigstoreSigner
# AWS KMS developer guide, "Key ARN" and "Alias ARN"; partitions are aws, aws-cn, aws-us-gov
_KMS_ARN = re.compile(r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):\d{12}:(?P<kind>key|alias)/[A-Za-z0-9/_-]+")
# AWS KMS developer guide, "Key identifiers": the id of a key, of a multi-Region key, the name of an alias
_KMS_NAME = re.compile(r"alias/[A-Za-z0-9/_-]+|mrk-[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@strict
class OidcIdentity:
    """An identity of an OIDC issuer that a channel trusts.

    Args:
        identity: The subject that Sigstore's certificate names.
        trust_config: A file of the checkout that names another instance of Sigstore; empty: the public one.
    """

    identity: str
    issuer: str
    trust_config: str = ""

    def __str__(self) -> str:
        return f"{self.identity} of {self.issuer}"


def describe_trust(trust: Iterable[str | OidcIdentity]) -> str:
    """The signers that a channel trusts, for a message.

    >>> describe_trust(["ami/keys/release.pub", "awskms:arn:aws:kms:us-west-2:111122223333:key/k"])
    'ami/keys/release.pub or awskms:arn:aws:kms:us-west-2:111122223333:key/k'
    """
    return " or ".join(map(str, trust))


@dataclass(frozen=True)
class KmsKey:
    """A key of AWS KMS.

    Args:
        name: KMS's KeyId.
        region: The key's region; empty: the region of the command.
    """

    name: str
    region: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether the name means the same key in every region and for good, which an alias does not."""
        return bool(self.region) and ":key/" in self.name


def kms_key(reference: str) -> KmsKey | None:
    """The KMS key that a reference names; None: it names a file.

    >>> kms_key("awskms:alias/release")
    KmsKey(name='alias/release', region='')
    >>> kms_key("sign.pem") is None
    True

    Raises:
        UsageError: It begins with `awskms:`, and the rest names no key.
    """
    # Without the scheme it is a path, whatever it looks like.
    if not reference.startswith(KMS):
        return None
    name = reference.removeprefix(KMS)
    if match := _KMS_ARN.fullmatch(name):
        return KmsKey(name, match["region"])
    if _KMS_NAME.fullmatch(name):
        return KmsKey(name)
    raise UsageError(
        f"{reference!r} names no key of AWS KMS",
        hint=f"write {KMS}alias/NAME, {KMS}KEY-ID, or {KMS}ARN of a key or an alias",
    )
