"""Keys: one of the curve P-384 for each site and one for the server. A private key is made where it is used, lies in a
file that only its owner can read, and never travels; the others learn the public one from a file.

A site's key is also its identity as a node of Flower, which takes keys of such curves only.
"""

import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from protofed.errors import BadInput

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey

PRIVATE = 0o600
PRIVATE_FOLDER = 0o700
PUBLIC = 0o644
MAX_BYTES = 10_000
"""Of a key or certificate in a file. Ours have some hundred."""


def new_private_key(path: Path) -> PrivateKey:
    """A key that nobody else has, in a new file."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key


def read_private_key(path: Path) -> PrivateKey:
    data = read_private(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{path}: not a private key without a passphrase: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadInput(f"{path}: not a key of the curve P-384")
    return key


def public_text(key: PublicKey) -> str:
    """The key as a file that may go to anybody."""
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode("ascii")


def public_key(data: bytes | str, source: str) -> PublicKey:
    """The key in the text of a file, in whatever way it is broken into lines."""
    try:
        key = serialization.load_pem_public_key(data.encode("ascii") if isinstance(data, str) else data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{source}: not a public key: it begins with -----BEGIN PUBLIC KEY-----") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadInput(f"{source}: not a key of the curve P-384")  # guard: federation-keys-one-curve
    return key


def read_public_key(path: Path) -> PublicKey:
    return public_key(read_file(path), str(path))


def fingerprint(key: PublicKey) -> str:
    """A short name of a key, for two people to compare: the first 120 bits of its SHA-256, by five letters."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
    letters = digest.finalize().hex()[:30]
    return " ".join(letters[i : i + 5] for i in range(0, 30, 5))


def write_private(path: Path, data: bytes) -> None:
    """A new file that nobody else can read at any moment."""
    _write(path, data, PRIVATE)


def write_public(path: Path, text: str) -> None:
    _write(path, text.encode(), PUBLIC)


def read_private(path: Path) -> bytes:
    """The content of a file that only its owner can read. Any other is refused: its secret may be known."""
    data, facts = _read(path)
    if stat.S_IMODE(facts.st_mode) & 0o077:  # guard: private-files-of-one-user
        raise BadInput(
            f"{path}: others can open this file (mode {stat.S_IMODE(facts.st_mode):04o}). If they could not have done "
            f"so yet: chmod 600 {path}. Otherwise make a new key"
        )
    if facts.st_uid != os.geteuid():
        raise BadInput(f"{path}: belongs to another user")
    return data


def read_file(path: Path) -> bytes:
    """The content of a small file."""
    return _read(path)[0]


def private_folder(path: Path) -> None:
    """A folder that only its owner can open."""
    path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise BadInput(f"{path}: others can open this folder: chmod 700 {path}")


def _read(path: Path) -> tuple[bytes, os.stat_result]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        with open(handle, "rb") as file:
            facts = os.fstat(handle)
            if not stat.S_ISREG(facts.st_mode):
                raise BadInput(f"{path}: is not a file")
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise BadInput(f"{path}: there is no such file") from None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise BadInput(f"{path}: is larger than any key or certificate")
    return data, facts


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except FileExistsError:
        raise BadInput(f"{path}: is there already, and is not written over") from None
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)
