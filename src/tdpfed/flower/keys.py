"""Keys for a trial federation: a certificate authority, the server's certificate, the operator's key, nodes' key pairs.

Nodes trust the authority (``ca.pem``) and nothing else; the SuperLink trusts the node keys that were registered with
it. In a real federation certificates come from its own authority, and every node makes its own key.
"""

import ipaddress
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tdpfed.errors import TDPFedError
from tdpfed.files import write_folder

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def make_keys(folder: Path, nodes: int, hosts: Sequence[str] = (), days: int = 365) -> list[Path]:
    """Write all keys and certificates into a new folder; only their owner can read the private ones."""
    for field, value, most in (("--nodes", nodes, 10_000), ("--days", days, 3650)):
        if not 1 <= value <= most:
            raise TDPFedError(f"{field}: {value} given, must be at least 1 and at most {most}")
    files = certificates(hosts, days)
    files["operator.key"] = f"{secrets.token_hex(32)}\n".encode()
    for number in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files[f"node-{number}.key"] = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        files[f"node-{number}.pub"] = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        ) + b"\n"  # fmt: skip
    return write_folder(folder, files, field="DIR", mode=0o700, private=".key")


def certificates(hosts: Sequence[str], days: int) -> dict[str, bytes]:
    """Return a certificate authority and the certificate of a server on these hosts and loopback, by file name."""
    names = _names((*hosts, *LOOPBACK))
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tdpfed trial federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tdpfed trial SuperLink")])
    begin = datetime.now(UTC) - timedelta(minutes=5)  # clocks differ

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey, is_authority: bool) -> x509.CertificateBuilder:
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
             "decipher_only"), False,
        )  # fmt: skip
        return (
            x509.CertificateBuilder()
            .subject_name(name).issuer_name(issuer).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin).not_valid_after(begin + timedelta(days=days))
            .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
            .add_extension(
                x509.KeyUsage(digital_signature=True, key_cert_sign=is_authority, crl_sign=is_authority, **usage),
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
            )
        )  # fmt: skip

    root = certificate(issuer, authority, True).sign(authority, hashes.SHA384())
    leaf = (
        certificate(subject, server, False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority, hashes.SHA384())
    )
    made = {"ca.pem": root.public_bytes(serialization.Encoding.PEM)}
    made["server.pem"] = leaf.public_bytes(serialization.Encoding.PEM)
    for name, key in (("ca.key", authority), ("server.key", server)):
        made[name] = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    return made


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Return hosts as names of a certificate: IP addresses, or else valid host names."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
            continue
        except ValueError:
            pass
        labels = host.split(".")
        if not host.isascii() or len(host) > 253 or not all(0 < len(x) < 64 and _plain(x) for x in labels):
            raise TDPFedError(f"--host: {host!r} given, must be a host name or an IP address, without port")
        names.append(x509.DNSName(host))
    return names


def _plain(label: str) -> bool:
    return label.replace("-", "").isalnum() and label[0] != "-" != label[-1]
