"""A Sigstore instance on loopback: a CA like Fulcio, logs like Rekor (API v1) and CT, GitHub's tokens.

It signs what the `sigstore` package verifies: certificates with a timestamp of CT (RFC 6962), log entries
with proof, checkpoint and promise. Each entry has a log of its own. Unlike Fulcio it believes any token.
"""

import base64
import hashlib
import json
import struct
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

VALID = {"validFor": {"start": "2020-01-01T00:00:00Z"}}
USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
ISSUER = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")  # Fulcio, docs/oid-info.md
TIMESTAMPS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")  # RFC 6962, 3.3
NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "double")])


class Key:
    def __init__(self):
        self.private = ec.generate_private_key(ec.SECP256R1())
        self.der = self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        self.id = hashlib.sha256(self.der).digest()

    def sign(self, data):
        return self.private.sign(data, ec.ECDSA(SHA256()))


class SigstoreDouble:
    """`workflow` is what a token claims as job_workflow_ref, `issuer` who vouches for it."""

    def __init__(self):
        self.authority, self.log, self.ct = (Key() for _ in range(3))
        self.workflow = "example/gpukiln/.github/workflows/images.yml@refs/heads/main"
        self.issuer, self.url = "https://token.actions.githubusercontent.com", ""
        root = self._certificate(
            NAME, self.authority.private.public_key(), "key_cert_sign", timedelta(days=1)
        )
        root = root.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.root = root.sign(self.authority.private, SHA256())

    def _certificate(self, subject, key, usage, lasts):
        begins, by = datetime.now(UTC) - timedelta(minutes=1), self.authority.private.public_key()
        builder = x509.CertificateBuilder(
            NAME, subject, key, x509.random_serial_number(), begins, begins + lasts
        )
        for critical, extension in (
            (False, x509.SubjectKeyIdentifier.from_public_key(key)),
            (False, x509.AuthorityKeyIdentifier.from_issuer_public_key(by)),
            (True, x509.KeyUsage(**{name: name == usage for name in USAGES})),
        ):
            builder = builder.add_extension(extension, critical)
        return builder

    def certify(self, key, claims):
        """A certificate for what a token claims."""
        builder = self._certificate(x509.Name([]), key, "digital_signature", timedelta(minutes=10))
        names = [x509.UniformResourceIdentifier(f"https://github.com/{claims['job_workflow_ref']}")]
        for critical, extension in (
            (True, x509.SubjectAlternativeName(names)),
            (False, x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])),
            (False, x509.UnrecognizedExtension(ISSUER, claims["iss"].encode())),
        ):
            builder = builder.add_extension(extension, critical)
        body = builder.sign(self.authority.private, SHA256()).tbs_certificate_bytes
        when = struct.pack("!Q", int(datetime.now(UTC).timestamp() * 1000))
        entry = b"\0\1" + self.authority.id + len(body).to_bytes(3) + body + b"\0\0"
        signature = self.ct.sign(b"\0\0" + when + entry)
        listed = _sized(_sized(b"\0" + self.ct.id + when + b"\0\0\4\3" + _sized(signature)))
        octets = b"\4" + bytes([len(listed)]) + listed  # DER; it is shorter than 128
        builder = builder.add_extension(x509.UnrecognizedExtension(TIMESTAMPS, octets), critical=False)
        return builder.sign(self.authority.private, SHA256())

    def enter(self, proposed):
        """An entry of the log, as Rekor answers."""
        body = rfc8785.dumps(proposed)
        when, log = int(datetime.now(UTC).timestamp()), self.log.id.hex()
        promised = {"body": _b64(body), "integratedTime": when, "logID": log, "logIndex": 0}
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"double\n1\n{_b64(root)}\n"
        signed = _b64(self.log.id[:4] + self.log.sign(note.encode()))
        proof = {"hashes": [], "logIndex": 0, "rootHash": root.hex(), "treeSize": 1}
        proof["checkpoint"] = f"{note}\n\N{EM DASH} double {signed}\n"
        promise = _b64(self.log.sign(rfc8785.dumps(promised)))
        return {"0": {**promised, "verification": {"inclusionProof": proof, "signedEntryTimestamp": promise}}}

    def token(self):
        now = int(datetime.now(UTC).timestamp())
        claims = {"iss": self.issuer, "sub": "repo:example/gpukiln", "job_workflow_ref": self.workflow}
        claims |= {"aud": "sigstore", "iat": now, "exp": now + 300}
        parts = (json.dumps(part).encode() for part in ({"alg": "RS256"}, claims, {}))
        return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)

    def answer(self, path, body, authorization):
        if path.startswith("/token"):  # GitHub's docs, "OpenID Connect reference"
            return {"value": self.token()}
        if path == "/api/v1/log/entries":
            return self.enter(body)
        claims = json.loads(base64.urlsafe_b64decode(authorization.split(".")[1] + "=="))
        request = x509.load_pem_x509_csr(base64.b64decode(body["certificateSigningRequest"]))
        certificates = (self.certify(request.public_key(), claims), self.root)
        texts = [certificate.public_bytes(Encoding.PEM).decode() for certificate in certificates]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": texts}}}

    def trust_config(self):
        """The document that names the instance: ClientTrustConfig of sigstore/protobuf-specs."""
        form, service = (
            "application/vnd.dev.sigstore.",
            {"url": self.url, "majorApiVersion": 1, "operator": "d"},
        )
        logs = [
            {
                **{"baseUrl": self.url, "hashAlgorithm": "SHA2_256", "logId": {"keyId": _b64(key.id)}},
                "publicKey": {"rawBytes": _b64(key.der), "keyDetails": "PKIX_ECDSA_P256_SHA_256", **VALID},
            }
            for key in (self.log, self.ct)
        ]
        certificates = [{"rawBytes": _b64(self.root.public_bytes(Encoding.DER))}]
        authority = {"subject": {"organization": "d", "commonName": "d"}, "uri": self.url, **VALID}
        authority["certChain"] = {"certificates": certificates}
        root = {"mediaType": f"{form}trustedroot+json;version=0.1", "tlogs": logs[:1], "ctlogs": logs[1:]}
        root |= {"certificateAuthorities": [authority], "timestampAuthorities": []}
        urls = {name: [{**service, **VALID}] for name in ("caUrls", "rekorTlogUrls")}
        signing = {"mediaType": f"{form}signingconfig.v0.2+json", **urls, "oidcUrls": [], "tsaUrls": []}
        signing |= {"rekorTlogConfig": {"selector": "ANY"}, "tsaConfig": {"selector": "ANY"}}
        named = {"mediaType": f"{form}clienttrustconfig.v0.1+json", "trustedRoot": root}
        return json.dumps({**named, "signingConfig": signing})


def _b64(data):
    return base64.b64encode(data).decode()


def _sized(data):
    return struct.pack("!H", len(data)) + data


@contextmanager
def serve():
    """Start an instance on a free port."""
    double = SigstoreDouble()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            answer = double.answer(self.path, body, self.headers.get("Authorization", ""))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        do_GET = do_POST  # noqa: N815 - the name that the server calls

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    double.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield double
    server.shutdown()
    server.server_close()
