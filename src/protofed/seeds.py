"""Seeds derived from a path, so that every draw depends on where it is made and on nothing else."""

import hashlib

import torch


def derive_seed(root: int, *path: str | int) -> int:
    """A 63-bit seed for this place: the same on every machine, unrelated between places."""
    text = "\0".join(f"{type(word).__name__}:{word!r}" for word in (root, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(root: int, *path: str | int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(root, *path))
