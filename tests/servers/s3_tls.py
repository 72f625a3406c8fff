"""Makes a certificate for 127.0.0.1 that signs itself: `.venv-servers/bin/python s3_tls.py CERTIFICATE KEY EXPIRED`.

In the environment of the servers, which has the library for it.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


def main(certificate: Path, key: Path, *, expired: bool) -> None:
    made = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    starts = datetime.now(UTC) - timedelta(days=400 if expired else 1)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(made.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(starts + timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(made, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), expired=sys.argv[3] == "1")
