"""How a key is named, by options and by a channel's `trust`: a PEM file, or a key of AWS KMS."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gpukiln.errors import UsageError

KMS = "awskms:"  # the scheme of securesystemslib's AWSSigner
_KMS_ARN = re.compile(r"arn:aws[a-z-]*:kms:(?P<region>[a-z0-9-]+):\d{12}:(?P<kind>key|alias)/[A-Za-z0-9/_-]+")
# AWS KMS developer guide, "Key identifiers": the id of a key, of a multi-Region key, the name of an alias
_KMS_NAME = re.compile(r"alias/[A-Za-z0-9/_-]+|mrk-[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class KmsKey:
    """A key of AWS KMS.

    Args:
        name: What KMS takes as KeyId.
        region: Where it is; empty: in the region of the command.
    """

    name: str
    region: str = ""

    @property
    def is_fixed(self) -> bool:
        """Whether the name always means the same key, in whatever region it is used; an alias does not."""
        return bool(self.region) and ":key/" in self.name


def kms_key(reference: str) -> KmsKey | None:
    """The key of KMS that a reference names; None: it names a file.

    Raises:
        UsageError: It begins like one, and is none.
    """
    if not reference.startswith(KMS):
        return None
    name = reference.removeprefix(KMS)
    if match := _KMS_ARN.fullmatch(name):
        return KmsKey(name, match["region"])
    if _KMS_NAME.fullmatch(name):
        return KmsKey(name)
    raise UsageError(
        f"{reference!r} names no key of AWS KMS",
        hint=f"{KMS}alias/NAME, {KMS}KEY-ID, or {KMS}ARN of a key or an alias",
    )
