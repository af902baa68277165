"""Random draws that hang on nothing but a document, what they are for, and the seed."""

from __future__ import annotations

import hashlib


def draw(identity: str, purpose: str, seed: int) -> float:
    """A number in [0, 1), the same whatever the order or number of workers."""
    digest = hashlib.blake2b(f"{seed}/{purpose}/{identity}".encode(), digest_size=8).digest()
    # Of 64 bits a float holds 53.
    return (int.from_bytes(digest, "big") >> 11) / 2**53
