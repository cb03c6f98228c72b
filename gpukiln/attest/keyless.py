"""Signatures without a private key: Sigstore certifies an OIDC identity for minutes, and logs the signature.

A signature in an envelope then has Sigstore's bundle: the certificate, and the log entry with its inclusion
data. The bundle signs the bytes that DSSE signs and is not an envelope itself: for envelopes the library
accepts only subjects with SHA-2 or SHA-3 digests, which an AMI does not have.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from cryptography import x509
from securesystemslib.exceptions import UnverifiedSignatureError
from securesystemslib.signer import Key, Signature, Signer, SigstoreKey, SigstoreSigner

from gpukiln.errors import UnavailableError, UsageError

GITHUB = "https://token.actions.githubusercontent.com"
BUNDLE = "bundle"
_ISSUER_OID = "1.3.6.1.4.1.57264.1.1"  # Fulcio, docs/oid-info.md


class IdentityKey(SigstoreKey):
    """An identity that an OIDC issuer certifies, used like a public key.

    Args:
        identity: The certificate's subject alternative name, compared exactly.
        issuer: The issuer's address, compared exactly.
        trust_config: A file that names an instance of Sigstore (ClientTrustConfig); None: the public one.
    """

    def __init__(self, identity: str, issuer: str, trust_config: Path | None = None) -> None:
        _, key = SigstoreSigner.import_(identity, issuer)
        super().__init__(key.keyid, key.keytype, key.scheme, key.keyval)
        self.trust_config = trust_config

    def __str__(self) -> str:
        return f"{self.keyval['identity']} of {self.keyval['issuer']}"

    def verify_signature(self, signature: Signature, data: bytes) -> None:
        """Verify a signature offline.

        Raises:
            UnverifiedSignatureError: It is not by this identity, or not on this data; the message has the
                reason.
            UnavailableError: The library is missing.
            UsageError: The file that names the instance can't be read.
        """
        # securesystemslib keeps fields that it does not know; the bundle is one of them (see the docstring of
        # the module).
        self.verify_digest(signature.unrecognized_fields.get(BUNDLE), hashlib.sha256(data).digest())

    def verify_digest(self, bundle: Any, sha256: bytes) -> None:
        """The same for a bundle's document and the SHA-256 of what was signed."""
        _require_library()
        from sigstore.errors import Error  # noqa: PLC0415 - optional, and slow to import
        from sigstore.hashes import Hashed  # noqa: PLC0415 - optional
        from sigstore.models import Bundle  # noqa: PLC0415 - optional
        from sigstore.verify.policy import Identity  # noqa: PLC0415 - optional
        from sigstore_models.common.v1 import HashAlgorithm  # noqa: PLC0415 - optional

        # Both are compared: an identity of another issuer may have the same name.
        policy = Identity(identity=self.keyval["identity"], issuer=self.keyval["issuer"])
        try:
            digest = Hashed(algorithm=HashAlgorithm.SHA2_256, digest=sha256)
            _verifier(_config(self.trust_config)).verify_artifact(
                digest, Bundle.from_json(json.dumps(bundle)), policy
            )
        except (Error, ValueError) as error:
            raise UnverifiedSignatureError(str(error)) from error


class KeylessSigner(Signer):
    """Signs as the OIDC identity of the CI job that runs this.

    Args:
        trust_config: A file that names another instance of Sigstore; None: the public one.

    Raises:
        UnavailableError: The library is missing, or this is no CI job with an identity.
    """

    def __init__(self, trust_config: Path | None = None) -> None:
        self._trust_config = trust_config
        token = _token()
        self._key = IdentityKey(_identity(token), str(token.federated_issuer), trust_config)

    @property
    def public_key(self) -> Key:
        """The identity, which verifies what it signed."""
        return self._key

    @classmethod
    def from_priv_key_uri(
        cls,
        priv_key_uri: str,  # noqa: ARG003 - the library's interface
        public_key: Key,  # noqa: ARG003 - as in the library
        secrets_handler: Any = None,  # noqa: ARG003 - as in the library
    ) -> KeylessSigner:
        """The library's interface: the URI has no more parts, and the job determines the identity."""
        return cls()

    def sign(self, payload: bytes) -> Signature:
        """Sign with a new certificate; Sigstore's public log gets an entry.

        Raises:
            UnavailableError: Sigstore can't be reached or refused, or certified another identity.
        """
        from sigstore.models import ClientTrustConfig  # noqa: PLC0415 - optional, and slow to import
        from sigstore.sign import SigningContext  # noqa: PLC0415 - optional

        token = _token()  # a new one: a token is valid for minutes, and a build takes longer
        try:
            text = _config(self._trust_config)
            config = ClientTrustConfig.from_json(text) if text else ClientTrustConfig.production()
            with SigningContext.from_trust_config(config).signer(token) as signer:
                bundle = json.loads(signer.sign_artifact(payload).to_json())
        # The build has been made by now; whatever Sigstore's clients raise must end in one error with a hint.
        except Exception as error:  # the errors of Fulcio, Rekor, TUF and HTTP have no common base class
            raise UnavailableError(
                f"can't sign as {self._key}: {type(error).__name__}: {error}",
                hint="check whether fulcio.sigstore.dev and rekor.sigstore.dev can be reached, and try again",
            ) from error
        # DSSE envelopes of securesystemslib have hexadecimal signatures, Sigstore's bundles base64.
        signed = base64.b64decode(bundle["messageSignature"]["signature"]).hex()
        signature = Signature(self._key.keyid, signed, {BUNDLE: bundle})
        try:
            # The certificate may be for another identity than the token promised, for example after a renamed
            # workflow; no channel would trust it.
            self._key.verify_signature(signature, payload)
        except UnverifiedSignatureError as error:
            raise UnavailableError(f"Sigstore's answer is not a signature of {self._key}: {error}") from error
        return signature


def signer_name(signature: Signature) -> str:
    """The signer's name for messages, not verified: of the bundle's certificate, else the key's id."""
    try:
        material = signature.unrecognized_fields[BUNDLE]["verificationMaterial"]
        # Bundles before version 0.3 have a chain, later ones a single certificate (sigstore/protobuf-specs).
        rows = material.get("x509CertificateChain", {}).get("certificates") or [material["certificate"]]
        certificate = x509.load_der_x509_certificate(base64.b64decode(rows[0]["rawBytes"]))
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        [issuer] = [
            extension.value.value
            for extension in certificate.extensions
            if extension.oid.dotted_string == _ISSUER_OID
        ]
        return f"{', '.join(str(name.value) for name in names)} of {issuer.decode()}"
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, x509.ExtensionNotFound):
        return f"the key {signature.keyid}"


def _require_library() -> None:
    try:
        import sigstore  # noqa: F401, PLC0415 - optional
    except ImportError as error:
        raise UnavailableError(
            "found no Python package sigstore, which verifies OIDC identities",
            hint="pip install 'gpukiln[sigstore]'",
        ) from error
    # offline verification is wanted here; the library warns of it
    logging.getLogger("sigstore").setLevel(logging.ERROR)


def _config(file: Path | None) -> str:
    """The document that names an instance; an empty string: the public one."""
    try:
        return file.read_text() if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"can't read {file}: {error}", hint="wanted: Sigstore's ClientTrustConfig as JSON"
        ) from error


@cache
def _verifier(config: str) -> Any:
    from sigstore.errors import Error  # noqa: PLC0415 - optional, and slow to import
    from sigstore.models import ClientTrustConfig  # noqa: PLC0415 - optional
    from sigstore.verify import Verifier  # noqa: PLC0415 - optional

    if not config:
        return Verifier.production(offline=True)
    try:
        return Verifier(trusted_root=ClientTrustConfig.from_json(config).trusted_root)
    except (Error, ValueError) as error:
        raise UsageError(
            f"a channel's trust_config names no instance of Sigstore: {error}",
            hint="wanted: its ClientTrustConfig as JSON",
        ) from error


def _token() -> Any:
    """The identity token of the CI job that runs this.

    Raises:
        UnavailableError: This is no CI job, or CI gives it no token.
    """
    _require_library()
    from sigstore.oidc import IdentityError, IdentityToken, detect_credential  # noqa: PLC0415 - optional

    hint = (
        "GitHub Actions: give the job `permissions: {id-token: write}`; elsewhere sign with a file or AWS KMS"
    )
    try:
        credential = detect_credential()
        if credential is None:
            raise UnavailableError("found no identity of a CI job to sign as", hint=hint)
        return IdentityToken(credential)
    except IdentityError as error:
        raise UnavailableError(f"CI gives this job no identity: {error}", hint=hint) from error


def _identity(token: Any) -> str:
    """The name in the certificate: GitHub's workflow (Fulcio, docs/oidc.md), else the library's identity.

    Raises:
        UnavailableError: The token has no workflow.
    """
    if token.issuer != GITHUB:
        return str(token.identity)
    try:
        # The claims are the second part of a JWT (RFC 7519); base64url leaves out the padding (RFC 7515,
        # section 2).
        text = str(token).split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        return f"https://github.com/{claims['job_workflow_ref']}"
    except (LookupError, ValueError, binascii.Error) as error:
        raise UnavailableError(f"GitHub's token names no workflow: {error}") from error
