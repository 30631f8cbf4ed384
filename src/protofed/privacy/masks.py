"""What masks are made of: agreed keys, the stream of numbers that a key stands for, and shares of a secret.

Primitives are those of the library `cryptography`. Nothing here draws from a generator of torch, numpy or `random`:
keys and shares come from the operating system.
"""

import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

KEY_BYTES = 32
SIGNATURE_BYTES = 64
NONCE_BYTES = 12
TAG_BYTES = 16
PRIME = 2**256 - 189
"""The largest prime of 256 bits: secrets and shares are numbers below it."""

Words = NDArray[np.uint64]
"""Whole numbers modulo 2⁶⁴."""


class Forged(Exception):
    """A signature is not by whom it should be, or a message is not what was sealed."""


# ---- keys


def new_secret() -> bytes:
    """32 bytes that nobody can guess, as a number below the prime, so that it can be shared."""
    return secrets.randbelow(PRIME).to_bytes(KEY_BYTES, "big")


def public_key(private: bytes) -> bytes:
    return bytes(X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw())


def agreed_key(private: bytes, public: bytes, purpose: bytes) -> bytes:
    """What only the two who hold these keys know, for one purpose: HKDF-SHA256 of X25519, 256 bits."""
    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of small order, from which everybody agrees on zero
        raise Forged("a public key is none") from error
    return derived(shared, purpose)


def derived(secret: bytes, purpose: bytes) -> bytes:
    return bytes(HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret))


def framed(*parts: bytes) -> bytes:
    """The parts as one, each with its length: no other parts give the same."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


# ---- identities


def new_identity() -> bytes:
    """The private half of what a site signs with."""
    return bytes(Ed25519PrivateKey.generate().private_bytes_raw())


def identity_of(private: bytes) -> bytes:
    return bytes(Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw())


def signed(private: bytes, text: bytes) -> bytes:
    return bytes(Ed25519PrivateKey.from_private_bytes(private).sign(text))


def check_signature(identity: bytes, signature: bytes, text: bytes) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, text)
    except (InvalidSignature, ValueError) as error:
        raise Forged("a signature is not by whom it says") from error


# ---- streams


def stream(key: bytes, count: int) -> Words:
    """The numbers that a key stands for: AES-256 in counter mode. A key makes one stream only, so that it needs no
    nonce."""
    encryptor = Cipher(AES256(key), CTR(bytes(16))).encryptor()  # guard: sums-keys-of-256-bits
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


# ---- sealed messages


def sealed(key: bytes, text: bytes, about: bytes) -> bytes:
    """AES-256-GCM, under a random nonce; `about` is not hidden, but cannot be changed."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + bytes(AESGCM(key).encrypt(nonce, text, about))


def opened(key: bytes, message: bytes, about: bytes) -> bytes:
    try:
        return bytes(AESGCM(key).decrypt(message[:NONCE_BYTES], message[NONCE_BYTES:], about))
    except InvalidTag as error:
        raise Forged("a sealed message is not what was sealed, or not for this round") from error


# ---- shares


def shares_of(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """A share for each of the points 1 to `count`: any `threshold` of them give the secret, and fewer say nothing
    (Shamir 1979)."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    if coefficients[0] >= PRIME:
        raise ValueError("a secret is a number below the prime")
    return [_value(coefficients, x).to_bytes(KEY_BYTES, "big") for x in range(1, count + 1)]


def _value(coefficients: Sequence[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def secret_of(shares: Mapping[int, bytes]) -> bytes:
    """The secret behind shares, by their points."""
    return weighed(at_zero(list(shares)), list(shares.values()))


def at_zero(points: Sequence[int]) -> list[int]:
    """What shares at these points weigh in the value of their polynomial at 0, by Lagrange."""
    weights = []
    for x in points:
        above = below = 1
        for other in points:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return weights


def weighed(weights: Sequence[int], shares: Sequence[bytes]) -> bytes:
    """The secret behind shares that weigh so much."""
    values = (w * int.from_bytes(share, "big") for w, share in zip(weights, shares, strict=True))
    return (sum(values) % PRIME).to_bytes(KEY_BYTES, "big")
