"""KMS Sign with MessageType=DIGEST, where moto signs the digest of the digest."""

import base64
import json
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed
from moto.kms.exceptions import ValidationException
from moto.kms.responses import KmsResponse

RAW_BYTES = 4096  # KMS API reference, Sign, Message


def extend_signing() -> None:
    """Extend moto. A second call does nothing."""
    if not hasattr(KmsResponse.sign, "takes_digests"):
        KmsResponse.sign = _of_digests(KmsResponse.sign)  # type: ignore[assignment,method-assign]


def _of_digests(moto_sign: Callable[[KmsResponse], str]) -> Callable[[KmsResponse], str]:
    def sign(self: KmsResponse) -> str:
        message, algorithm = self._get_param("Message"), self._get_param("SigningAlgorithm")
        if self._get_param("MessageType") != "DIGEST":
            if len(message) > RAW_BYTES:
                raise ValidationException(f"Member must have length less than or equal to {RAW_BYTES}")
            return moto_sign(self)
        answer = json.loads(moto_sign(self))  # moto's checks of the key and the algorithm
        digest: Any = getattr(hashes, f"SHA{algorithm[-3:]}")()
        if len(message) != digest.digest_size:
            raise ValidationException(f"Digest is invalid length for algorithm {algorithm}.")
        key: Any = self.kms_backend.describe_key(answer["KeyId"]).private_key
        # Signs the given digest as it is.
        known = Prehashed(digest)
        if algorithm.startswith("ECDSA"):
            signature = key.private_key.sign(message, ec.ECDSA(known))
        elif algorithm.startswith("RSASSA_PSS"):  # the salt has the digest's length (KMS developer guide)
            pss = padding.PSS(padding.MGF1(digest), digest.digest_size)
            signature = key.private_key.sign(message, pss, known)
        else:
            signature = key.private_key.sign(message, padding.PKCS1v15(), known)
        return json.dumps({**answer, "Signature": base64.b64encode(signature).decode()})

    sign.takes_digests = True  # type: ignore[attr-defined]
    return sign
