"""The certificate authority of a cluster of this computer, and what it signs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from gpukiln.files import write_atomic

VALID = timedelta(days=30)  # a cluster ends with the server of the embedded cloud
EARLIER = timedelta(hours=1)  # the clock of a virtual machine may be behind
AUTHORITY = "gpukiln rehearsal"


@dataclass(frozen=True)
class CertificateAuthority:
    """An authority with its key.

    Args:
        folder: Has `ca.crt` and `ca.key`, and gets what it signs.
    """

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    def create(self) -> None:
        """Make a new key and certificate."""
        key = ec.generate_private_key(ec.SECP256R1())
        own = _certificate(AUTHORITY, (), key, issuer=_name(AUTHORITY, ()))
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self._write("ca", key, own.sign(key, hashes.SHA256()))

    def issue(
        self, file: str, user: str, *, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
    ) -> tuple[Path, Path]:
        """Sign a new key that serves and signs in.

        Args:
            file: Name of the two files.
            user: Kubernetes takes the user from the common name, and groups from the organizations
                (kubernetes.io, "Authenticating", X509 client certificates).
            hosts: Host names and addresses of a server.

        Returns:
            The files of the certificate and of its key, which only the owner can read.
        """
        authority = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        signer: Any = load_pem_private_key((self.folder / "ca.key").read_bytes(), None)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(user, groups, key, issuer=authority.subject)
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            certificate = certificate.add_extension(names, critical=False)
        return self._write(file, key, certificate.sign(signer, hashes.SHA256()))

    def _write(
        self, file: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
    ) -> tuple[Path, Path]:
        paths = self.folder / f"{file}.crt", self.folder / f"{file}.key"
        private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        write_atomic(paths[0], certificate.public_bytes(Encoding.PEM))
        write_atomic(paths[1], private)
        return paths


def _name(user: str, groups: tuple[str, ...]) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])


def _certificate(
    user: str, groups: tuple[str, ...], key: ec.EllipticCurvePrivateKey, *, issuer: x509.Name
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(user, groups))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + VALID)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
