"""Signatures as DSSE envelopes, with the library of in-toto and TUF (securesystemslib)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SecuresystemslibError
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import AWSSigner, CryptoSigner, Key, Signature, Signer, SSlibKey

from gpukiln.attest.keyless import IdentityKey, KeylessSigner, signer_name
from gpukiln.clouds.base import Cloud, explain_aws_errors
from gpukiln.errors import CheckFailedError, UsageError
from gpukiln.images.keys import SIGSTORE, KmsKey, kms_key
from gpukiln.parsing import parse_json

# The type is signed too, so that a signature on another kind of document is not accepted here.
PAYLOAD_TYPE = "application/vnd.in-toto+json"  # in-toto attestation spec, v1/envelope.md
PASSWORD = "GPUKILN_SIGN_KEY_PASSWORD"  # noqa: S105 - the name of a variable
KEYGEN_HINT = "`openssl genpkey -algorithm ed25519 -out sign.pem` makes one"


def load_signer(path: Path) -> CryptoSigner:
    """Read a private key.

    Args:
        path: A PEM file with an Ed25519, ECDSA or RSA key. Where it is encrypted, its password is in the
            environment variable GPUKILN_SIGN_KEY_PASSWORD.

    Returns:
        The signer.

    Raises:
        UsageError: The file can't be read, has no such key, or the password is wrong.
    """
    password = os.environ.get(PASSWORD)
    try:
        key = load_pem_private_key(path.read_bytes(), password.encode() if password else None)
        return CryptoSigner(key)
    except OSError as error:
        raise UsageError(f"can't read the key {path}: {error.strerror}", hint=KEYGEN_HINT) from error
    # cryptography raises TypeError for a missing or unneeded password, ValueError for everything else that is
    # wrong in a PEM file.
    except (TypeError, ValueError, SecuresystemslibError) as error:
        raise UsageError(
            f"{path} is not a usable private key: {error}",
            hint=f"wanted: Ed25519, ECDSA or RSA as PEM ({KEYGEN_HINT}); ${PASSWORD} is for an encrypted one",
        ) from error


class KmsSigner(AWSSigner):
    """Signs with a key of AWS KMS; the private key never leaves KMS.

    Args:
        client: A KMS client of the key's region.
    """

    def __init__(self, key_id: str, public_key: SSlibKey, client: Any) -> None:
        # The constructor of AWSSigner creates a client of boto3's default session, which has neither
        # --profile nor --cloud.
        self.aws_key_id, self._public_key, self.client = key_id, public_key, client
        self.aws_algo = self.aws_algos[public_key.scheme]

    def sign(self, payload: bytes) -> Signature:
        """Sign.

        Raises:
            UnavailableError: KMS refused, or can't be reached.
        """
        with explain_aws_errors(f"sign with the key {self.aws_key_id}"):
            return super().sign(payload)


def signer_of(reference: str, cloud: Cloud) -> Signer | None:
    """The signer that `--sign-key` names.

    Args:
        reference: A file; a key of KMS; `sigstore:` for the identity of a CI job, optionally followed by the
            file of another Sigstore instance; or an empty string.
        cloud: Whose KMS has the key.

    Returns:
        The signer; None for an empty reference.

    Raises:
        UsageError: The key can't sign, see `load_signer`.
        UnavailableError: KMS refused or can't be reached, or this is no CI job with an identity.
    """
    if not reference:
        return None
    if reference.startswith(SIGSTORE):
        config = reference.removeprefix(SIGSTORE)
        return KeylessSigner(Path(config) if config else None)
    if key := kms_key(reference):
        return KmsSigner(key.name, _public_key_of(key, cloud), _kms_client(key, cloud))
    return load_signer(Path(reference))


def public_key_of(reference: str, cloud: Cloud, folder: Path = Path()) -> SSlibKey:
    """The public key that `--key` or a channel's `trust` names.

    Args:
        reference: A file, or a key of KMS, whose public key KMS gives.
        cloud: Whose KMS has the key.
        folder: What a file's path is relative to.

    Raises:
        UsageError: It is no public key.
        UnavailableError: KMS refused, or can't be reached.
    """
    key = kms_key(reference)
    return _public_key_of(key, cloud) if key else load_public_key(folder / reference)


def required_key(cloud: Cloud, *, key: str, identity: str, issuer: str) -> Key | None:
    """The key that must have signed: a public key, or an identity of OIDC; None: none is required."""
    if identity:
        return IdentityKey(identity, issuer)
    return public_key_of(key, cloud) if key else None


def _kms_client(key: KmsKey, cloud: Cloud) -> Any:
    there = cloud.in_region(key.region) if key.region not in ("", cloud.region) else cloud
    return there.client("kms")


def _public_key_of(key: KmsKey, cloud: Cloud) -> SSlibKey:
    with explain_aws_errors(f"get the public key of {key.name}"):
        answer = _kms_client(key, cloud).get_public_key(KeyId=key.name)
    # Keys for encryption have no signing algorithms in the answer (GetPublicKey).
    algorithms = answer.get("SigningAlgorithms", [])
    try:
        # KMS returns SubjectPublicKeyInfo as DER (GetPublicKey).
        public = SSlibKey.from_crypto(load_der_public_key(answer["PublicKey"]))
        scheme = public.scheme
    # an elliptic curve that the libraries do not support
    except (ValueError, UnsupportedAlgorithm, SecuresystemslibError):
        public, scheme = None, ""
    if public is None or AWSSigner.aws_algos.get(scheme) not in algorithms:
        raise UsageError(
            f"{key.name} can't sign statements: found the signing algorithms "
            f"{', '.join(algorithms) or 'none'} of KMS",
            hint="wanted: a key for SIGN_VERIFY of ECC_NIST_P256, ECC_NIST_P384 or RSA_2048 to RSA_4096",
        )
    return public


def load_public_key(path: Path) -> SSlibKey:
    """Read a public key.

    Args:
        path: A PEM file.

    Raises:
        UsageError: The file can't be read, or is no public key.
    """
    hint = "wanted: a public key as PEM; `openssl pkey -in sign.pem -pubout` prints that of sign.pem"
    try:
        return SSlibKey.from_crypto(load_pem_public_key(path.read_bytes()))
    except OSError as error:
        raise UsageError(f"can't read the key {path}: {error.strerror}", hint=hint) from error
    except (ValueError, SecuresystemslibError) as error:
        raise UsageError(f"{path} is not a usable public key: {error}", hint=hint) from error


def sign(payload: bytes, signer: Signer) -> str:
    """Sign a statement.

    Args:
        payload: The statement's bytes.

    Returns:
        A DSSE envelope as JSON.
    """
    envelope = Envelope(payload, PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return json.dumps(envelope.to_dict(), indent=2) + "\n"


def payload_of(envelope: str) -> bytes:
    """The payload of an envelope; its signature is not checked.

    Args:
        envelope: A DSSE envelope as JSON.

    Raises:
        CheckFailedError: The text is no envelope.
    """
    return _parse_envelope(envelope).payload


def check_signature(envelope: str, key: Key) -> None:
    """Check that a key signed an envelope.

    Args:
        envelope: A DSSE envelope as JSON.
        key: The key that must have signed it.

    Raises:
        CheckFailedError: It is no envelope of an in-toto statement, or has no valid signature of that key.
    """
    read = _parse_envelope(envelope)
    # Checked before the signature, for a message that names the cause.
    if read.payload_type != PAYLOAD_TYPE:
        raise CheckFailedError(f"found an envelope of {read.payload_type}, wanted {PAYLOAD_TYPE}")
    # The key id is only a hint in DSSE; it chooses the signature, and verification below decides.
    if key.keyid not in read.signatures:
        raise CheckFailedError(f"signed by {_signers(read)}, wanted {key_name(key)}")
    try:
        key.verify_signature(read.signatures[key.keyid], read.pae())
    except UnverifiedSignatureError as error:
        # The library's reason is useful for identities only; for keys it repeats the message.
        why = f": {error}" if isinstance(key, IdentityKey) else ""
        raise CheckFailedError(f"the signature of {key_name(key)} is wrong{why}") from error
    except SecuresystemslibError as error:
        raise CheckFailedError(f"the signature of {key_name(key)} can't be verified: {error}") from error


def key_name(key: Key) -> str:
    """A key or an identity, for a message."""
    return str(key) if isinstance(key, IdentityKey) else f"the key {key.keyid}"


def _signers(envelope: Envelope) -> str:
    return ", ".join(map(signer_name, envelope.signatures.values())) or "nobody"


def trusted_payload(envelope: str, keys: Sequence[Key]) -> tuple[bytes, Key]:
    """The payload of an envelope that one of these keys signed, and that key.

    Args:
        envelope: A DSSE envelope as JSON.

    Raises:
        CheckFailedError: It is no envelope of an in-toto statement, or has no valid signature of a trusted
            key.
    """
    read = _parse_envelope(envelope)
    signers = [key for key in keys if key.keyid in read.signatures]
    if not signers:
        raise CheckFailedError(f"signed by {_signers(read)}, trusted: {', '.join(map(key_name, keys))}")
    check_signature(envelope, signers[0])
    return read.payload, signers[0]


def _parse_envelope(envelope: str) -> Envelope:
    try:
        return Envelope.from_dict(parse_json(envelope))
    except (ValueError, KeyError, TypeError, SecuresystemslibError) as error:
        raise CheckFailedError(f"the text is not a DSSE envelope: {error}") from error
