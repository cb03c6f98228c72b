"""Signatures as DSSE envelopes, with the library of in-toto and TUF (securesystemslib)."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as SecuresystemslibError
from securesystemslib.signer import CryptoSigner, SSlibKey

from gpukiln.errors import CheckFailedError, UsageError
from gpukiln.parsing import parse_json

PAYLOAD_TYPE = "application/vnd.in-toto+json"  # in-toto attestation spec, v1/envelope.md
PASSWORD = "GPUKILN_SIGN_KEY_PASSWORD"  # noqa: S105 - the name of a variable
MAKE_ONE = "`openssl genpkey -algorithm ed25519 -out sign.pem` makes one"


def load_signer(path: Path) -> CryptoSigner:
    """Read a private key.

    Args:
        path: A PEM file with an Ed25519, ECDSA or RSA key. Where it is encrypted, its password is in the
            environment variable GPUKILN_SIGN_KEY_PASSWORD.

    Returns:
        What signs with it.

    Raises:
        UsageError: The file can't be read, is no such key, or the password is wrong.
    """
    password = os.environ.get(PASSWORD)
    try:
        key = load_pem_private_key(path.read_bytes(), password.encode() if password else None)
        return CryptoSigner(key)
    except OSError as error:
        raise UsageError(f"can't read the key {path}: {error.strerror}", hint=MAKE_ONE) from error
    except (TypeError, ValueError, SecuresystemslibError) as error:
        raise UsageError(
            f"{path} is no private key that can be used: {error}",
            hint=f"wanted: Ed25519, ECDSA or RSA as PEM ({MAKE_ONE}); only an encrypted one has ${PASSWORD}",
        ) from error


def signer_of(option: str) -> CryptoSigner | None:
    """What `--sign-key` names.

    Args:
        option: The file, or an empty string.

    Returns:
        What signs with it, or None.

    Raises:
        UsageError: See `load_signer`.
    """
    return load_signer(Path(option)) if option else None


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
        raise UsageError(f"{path} is no public key that can be used: {error}", hint=hint) from error


def sign(payload: bytes, signer: CryptoSigner) -> str:
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
    """What an envelope holds; says nothing about its signature.

    Args:
        envelope: A DSSE envelope as JSON.

    Raises:
        CheckFailedError: It is no envelope.
    """
    return _read(envelope).payload


def check_signature(envelope: str, key: SSlibKey) -> None:
    """Check that a key signed an envelope.

    Args:
        envelope: A DSSE envelope as JSON.
        key: The key that must have signed it.

    Raises:
        CheckFailedError: It is no envelope of an in-toto statement, or that key did not sign what it holds.
    """
    read = _read(envelope)
    if read.payload_type != PAYLOAD_TYPE:
        raise CheckFailedError(f"the envelope holds {read.payload_type}, wanted {PAYLOAD_TYPE}")
    if key.keyid not in read.signatures:
        signers = ", ".join(read.signatures) or "nobody"
        raise CheckFailedError(f"signed by the key {signers}, wanted {key.keyid}")
    try:
        read.verify([key], threshold=1)
    except SecuresystemslibError as error:
        raise CheckFailedError(f"the signature of the key {key.keyid} is wrong") from error


def trusted_payload(envelope: str, keys: Sequence[SSlibKey]) -> bytes:
    """What an envelope holds, where one of these keys signed it.

    Args:
        envelope: A DSSE envelope as JSON.
        keys: Those that are trusted.

    Raises:
        CheckFailedError: It is no envelope of an in-toto statement, or none of the keys signed what it holds.
    """
    read = _read(envelope)
    signers = [key for key in keys if key.keyid in read.signatures]
    if not signers:
        raise CheckFailedError(
            f"signed by the key {', '.join(read.signatures) or 'nobody'}, "
            f"trusted: {', '.join(key.keyid for key in keys)}"
        )
    check_signature(envelope, signers[0])
    return read.payload


def _read(envelope: str) -> Envelope:
    try:
        return Envelope.from_dict(parse_json(envelope))
    except (ValueError, KeyError, TypeError, SecuresystemslibError) as error:
        raise CheckFailedError(f"it is no DSSE envelope: {error}") from error
