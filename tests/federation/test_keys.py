"""Keys, and the certificates of a federation's own authority."""

import datetime
import os
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from protofed.errors import BadInput

pytest.importorskip("cryptography", reason="keys need cryptography, which the extra flower brings")

from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from protofed.federation import certificates, keys


def test_a_private_key_is_in_a_file_of_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        key = keys.new_private_key(tmp_path / "site.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "site.key").stat().st_mode) == 0o600
    again = keys.read_private_key(tmp_path / "site.key")
    assert keys.public_text(again.public_key()) == keys.public_text(key.public_key())
    assert isinstance(again.curve, ec.SECP384R1)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o610])
def test_a_private_key_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    keys.new_private_key(tmp_path / "site.key")
    (tmp_path / "site.key").chmod(mode)
    with pytest.raises(BadInput, match="chmod 600"):
        keys.read_private_key(tmp_path / "site.key")


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can give a file to another user")
def test_a_private_key_of_another_user_is_refused(tmp_path: Path) -> None:
    keys.new_private_key(tmp_path / "site.key")
    os.chown(tmp_path / "site.key", 12345, 12345)
    with pytest.raises(BadInput, match="another user"):
        keys.read_private_key(tmp_path / "site.key")


def test_no_key_is_written_over_nor_through_a_link(tmp_path: Path) -> None:
    keys.new_private_key(tmp_path / "site.key")
    before = (tmp_path / "site.key").read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("site.key", "link"):
        with pytest.raises(BadInput, match="is there already"):
            keys.new_private_key(tmp_path / name)
    assert (tmp_path / "site.key").read_bytes() == before
    assert not (tmp_path / "elsewhere").exists()


def test_keys_of_other_kinds_are_refused(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1())
    edwards = ed25519.Ed25519PrivateKey.generate()
    for number, key in enumerate((other, edwards)):
        data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        keys.write_private(tmp_path / f"{number}.key", data)
        with pytest.raises(BadInput, match="P-384"):
            keys.read_private_key(tmp_path / f"{number}.key")
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(BadInput, match="P-384"):
            keys.public_key(public, "a file")


@pytest.mark.parametrize("data", [b"", b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", b"\xff" * 100])
def test_what_is_no_public_key_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput, match="not a public key"):
        keys.public_key(data, "a file")


def test_pipes_and_large_files_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 20_000)
    with pytest.raises(BadInput, match="not a file"):
        keys.read_file(tmp_path / "pipe")
    with pytest.raises(BadInput, match="larger"):
        keys.read_file(tmp_path / "large")
    with pytest.raises(BadInput, match="no such file"):
        keys.read_file(tmp_path / "missing")


def test_a_fingerprint_is_that_of_the_key_alone() -> None:
    one, other = (ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(2))
    again = keys.public_key(keys.public_text(one), "text")
    assert keys.fingerprint(one) == keys.fingerprint(again) != keys.fingerprint(other)
    assert len(keys.fingerprint(one).replace(" ", "")) == 30


def test_a_folder_that_others_can_open_is_refused(tmp_path: Path) -> None:
    keys.private_folder(tmp_path / "own")
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    (tmp_path / "own").chmod(0o750)
    with pytest.raises(BadInput, match="chmod 700"):
        keys.private_folder(tmp_path / "own")


# ---- certificates


def handshake(folder: Path, own: certificates.Certified, trusted: bytes, name: str) -> None:
    """A TLS connection to a server with this certificate, from a client that trusts that authority alone."""
    for suffix, data in zip(("crt", "key"), own, strict=True):
        (folder / f"own.{suffix}").write_bytes(data)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "own.crt", folder / "own.key")
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.load_verify_locations(cadata=trusted.decode())
    here, there = socket.socketpair()
    here.settimeout(10)
    there.settimeout(10)

    def serve() -> None:
        try:
            serving.wrap_socket(there, server_side=True).close()
        except OSError:
            there.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        asking.wrap_socket(here, server_hostname=name).close()
    finally:
        here.close()
        thread.join()


HOSTS = ["server.example.org", "192.0.2.7", "2001:db8::1", "localhost"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_server_is_trusted_under_each_of_its_names(tmp_path: Path, host: str) -> None:
    authority = certificates.authority("0" * 32)
    own = certificates.server(authority, HOSTS)
    handshake(tmp_path, own, authority.certificate, host)
    assert certificates.hosts(own.certificate) == HOSTS


def test_a_server_is_not_trusted_under_another_name(tmp_path: Path) -> None:
    authority = certificates.authority("0" * 32)
    with pytest.raises(ssl.SSLCertVerificationError, match="match"):
        handshake(tmp_path, certificates.server(authority, HOSTS), authority.certificate, "other.example.org")


def test_a_server_of_another_authority_of_the_same_name_is_not_trusted(tmp_path: Path) -> None:
    ours, theirs = certificates.authority("0" * 32), certificates.authority("0" * 32)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, certificates.server(theirs, HOSTS), ours.certificate, "localhost")


def test_a_server_s_certificate_vouches_for_no_other(tmp_path: Path) -> None:
    authority = certificates.authority("0" * 32)
    own = certificates.server(authority, HOSTS)
    forged = certificates.server(own, ["localhost"])
    chain = certificates.Certified(forged.certificate + own.certificate, forged.private_key)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, chain, authority.certificate, "localhost")


def test_certificates_end() -> None:
    authority = certificates.authority("0" * 32)
    now = datetime.datetime.now(datetime.UTC)
    assert certificates.days_left(authority.certificate, now) == pytest.approx(3650, abs=0.1)
    assert certificates.days_left(certificates.server(authority, HOSTS).certificate, now) == pytest.approx(730, abs=0.1)


@pytest.mark.parametrize("host", ["", "a b", "a/b", "-a.org", "a..b", "1.2.3", "ä.org", "a" * 300])
def test_what_names_no_machine_is_refused(host: str) -> None:
    with pytest.raises(BadInput, match="no name or address"):
        certificates.server(certificates.authority("0" * 32), [host])
