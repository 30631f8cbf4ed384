"""The certificates of a federation: an authority of its own, which signs the server's certificate and nothing else.

Sites trust this authority alone, so that no other one can vouch for a server. Nobody else is asked.
"""

import datetime
import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protofed.errors import BadInput

AUTHORITY_DAYS = 3650
SERVER_DAYS = 730
SLOW_CLOCKS = datetime.timedelta(hours=1)
"""A certificate is valid from so long before it was made, for sites whose clocks are slow."""


class Certified(NamedTuple):
    certificate: bytes
    private_key: bytes
    """Both as PEM."""


def authority(federation: str) -> Certified:
    """A new authority. Its own certificate is the only one that a site trusts."""
    key = ec.generate_private_key(ec.SECP384R1())
    name = _name(f"protofed authority {federation[:16]}")
    builder = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, key)


def server(issuer: Certified, hosts: Sequence[str]) -> Certified:
    """A new certificate for a server that sites reach under these names and addresses."""
    issuer_key, issuer_certificate = _loaded(issuer)
    key = ec.generate_private_key(ec.SECP384R1())
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    builder = (
        _builder(_name("protofed server"), issuer_certificate.subject, key.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(identifier, critical=False)
    )
    return _signed(builder, key, issuer_key)


def hosts(certificate: bytes) -> list[str]:
    """The names and addresses under which a server with this certificate may be reached."""
    names = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in names.value]


def days_left(certificate: bytes, now: datetime.datetime) -> float:
    """How long a certificate is still valid."""
    end = x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    return (end - now) / datetime.timedelta(days=1)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    words = host.split(".")
    is_name = host.isascii() and all(w.replace("-", "").isalnum() and w.strip("-") == w for w in words)
    if not is_name or len(host) > 253 or words[-1].isdigit():
        raise BadInput(f"{host!r} is no name or address of a machine")
    return x509.DNSName(host)


def _builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLOW_CLOCKS)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, issuer_key: ec.EllipticCurvePrivateKey
) -> Certified:
    certificate = builder.sign(issuer_key, hashes.SHA384())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Certified(certificate.public_bytes(Encoding.PEM), private)


def _loaded(issuer: Certified) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    key = load_pem_private_key(issuer.private_key, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise BadInput("the authority's key is none of ours")
    return key, x509.load_pem_x509_certificate(issuer.certificate)
