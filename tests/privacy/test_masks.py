"""Keys, streams and shares, against what the standards say and by hand."""

import hashlib
import hmac
from itertools import combinations
from random import Random

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="secure sums need protofed[privacy]")

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB

from protofed.privacy import masks
from protofed.privacy.masks import PRIME, Forged, framed

KEY = bytes(range(32))


def test_a_stream_is_aes_256_in_counter_mode() -> None:
    """Each block of 16 bytes is the encrypted number of the block: SP 800-38A, 6.5."""
    encryptor = Cipher(AES256(KEY), ECB()).encryptor()  # noqa: S305, of numbers that differ
    expected = encryptor.update(b"".join(k.to_bytes(16, "big") for k in range(3)))
    assert masks.stream(KEY, 5).tolist() == np.frombuffer(expected[:40], dtype="<u8").tolist()


def test_every_bit_of_the_key_of_a_stream_counts() -> None:
    """T11: A key of 32 bits, as other libraries take, is found by trying."""
    streams = {masks.stream(bytes(b ^ (byte == k) << bit for byte, b in enumerate(KEY)), 4).tobytes()
               for k in range(32) for bit in (0, 7)}  # fmt: skip
    assert len(streams) == 64
    for short in (4, 16, 24, 31):
        with pytest.raises(ValueError, match="key"):
            masks.stream(KEY[:short], 1)


def test_two_agree_on_a_key_for_each_purpose() -> None:
    """RFC 5869 and RFC 7748, with the standard library's HMAC in the place of HKDF."""
    one, other, third = (masks.new_secret() for _ in range(3))
    key = masks.agreed_key(one, masks.public_key(other), b"purpose")
    assert key == masks.agreed_key(other, masks.public_key(one), b"purpose")
    assert key != masks.agreed_key(one, masks.public_key(other), b"another purpose")
    assert key != masks.agreed_key(one, masks.public_key(third), b"purpose")
    shared = X25519PrivateKey.from_private_bytes(one).exchange(
        X25519PublicKey.from_public_bytes(masks.public_key(other))
    )
    extracted = hmac.new(bytes(32), shared, hashlib.sha256).digest()
    assert key == hmac.new(extracted, b"purpose\x01", hashlib.sha256).digest()


def test_a_public_key_from_which_all_agree_on_the_same_is_refused() -> None:
    with pytest.raises(Forged):
        masks.agreed_key(masks.new_secret(), bytes(32), b"")


def test_framed_parts_cannot_be_taken_for_others() -> None:
    assert (
        len({framed(b"ab", b"c"), framed(b"a", b"bc"), framed(b"abc"), framed(b"abc", b""), framed(b"", b"abc")}) == 5
    )


def test_signatures_and_seals_are_checked() -> None:
    site = masks.new_identity()
    signature = masks.signed(site, b"text")
    masks.check_signature(masks.identity_of(site), signature, b"text")
    for identity, text in ((masks.identity_of(site), b"texts"), (masks.identity_of(masks.new_identity()), b"text")):
        with pytest.raises(Forged):
            masks.check_signature(identity, signature, text)
    sealed = masks.sealed(KEY, b"secret", b"to bob")
    assert masks.opened(KEY, sealed, b"to bob") == b"secret"
    assert masks.sealed(KEY, b"secret", b"to bob") != sealed, "a nonce came twice"
    for key, message, about in (
        (bytes(32), sealed, b"to bob"),
        (KEY, sealed[:-1] + bytes([sealed[-1] ^ 1]), b"to bob"),
        (KEY, sealed, b"to cyd"),
    ):
        with pytest.raises(Forged):
            masks.opened(key, message, about)


def test_as_many_shares_as_the_threshold_give_the_secret_and_fewer_another_number() -> None:
    secret = masks.new_secret()
    shares = dict(enumerate(masks.shares_of(secret, 4, 7), 1))
    for chosen in combinations(shares, 4):
        assert masks.secret_of({x: shares[x] for x in chosen}) == secret
    assert masks.secret_of(shares) == secret
    assert all(masks.secret_of({x: shares[x] for x in chosen}) != secret for chosen in combinations(shares, 3))


def test_shares_by_hand() -> None:
    """Of the line 5 + 3x modulo the prime: 8 at 1 and 14 at 3."""
    shares = {1: (8).to_bytes(32, "big"), 3: (14).to_bytes(32, "big")}
    assert int.from_bytes(masks.secret_of(shares), "big") == 5


def test_the_largest_secret_is_shared_and_a_larger_number_refused() -> None:
    largest = (PRIME - 1).to_bytes(32, "big")
    shares = masks.shares_of(largest, 2, 3)
    assert masks.secret_of({1: shares[0], 3: shares[2]}) == largest
    with pytest.raises(ValueError, match="prime"):
        masks.shares_of(PRIME.to_bytes(32, "big"), 2, 3)


def test_the_prime_is_one() -> None:
    """Miller and Rabin: a composite number passes one of these trials with a probability below ¼."""
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(40):
        x = pow(Random(_).randrange(2, PRIME - 1), odd, PRIME)
        squares = [pow(x, 2**k, PRIME) for k in range(twos)]
        assert x == 1 or PRIME - 1 in squares
