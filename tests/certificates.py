"""Certificates of an authority that only a test trusts."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NOW = dt.datetime.now(dt.timezone.utc)
DAY = dt.timedelta(days=1)


@dataclass
class Authority:
    """Certificates in a folder: `ca.pem`, and a key and a certificate for each name that was asked
    for."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(
        default_factory=lambda: ec.generate_private_key(ec.SECP256R1())
    )

    def __post_init__(self) -> None:
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test's authority")])
        certificate = self._certificate(
            self.name, self.key, self.key, NOW + DAY, x509.BasicConstraints(True, None)
        )
        (self.folder / "ca.pem").write_bytes(certificate)

    def _certificate(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        signer: ec.EllipticCurvePrivateKey,
        until: dt.datetime,
        *extensions: x509.ExtensionType,
    ) -> bytes:
        made = x509.CertificateBuilder(
            subject_name=subject,
            issuer_name=subject if key is signer else self.name,
            public_key=key.public_key(),
            serial_number=x509.random_serial_number(),
            not_valid_before=NOW - 3 * DAY,
            not_valid_after=until,
        )
        for extension in extensions:
            made = made.add_extension(
                extension, critical=isinstance(extension, x509.BasicConstraints)
            )
        return made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(
        self, file: str, name: str, *, until: dt.datetime = NOW + DAY, self_signed: bool = False
    ) -> Path:
        """A file with a certificate for a name or an address, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        try:
            alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            alternative = x509.DNSName(name)
        extension = x509.SubjectAlternativeName([alternative])
        certificate = self._certificate(
            subject, key, key if self_signed else self.key, until, extension
        )
        format_ = serialization.PrivateFormat.PKCS8
        secret = key.private_bytes(
            serialization.Encoding.PEM, format_, serialization.NoEncryption()
        )
        (self.folder / file).write_bytes(certificate + secret)
        return self.folder / file
