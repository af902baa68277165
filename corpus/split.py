"""The one split into training and held-out text, the same in every stage."""

from __future__ import annotations

import hashlib


def is_heldout(group: str, share: float) -> bool:
    """Whether a group lies on the held-out side; `share` in (0, 1) is the expected part of all groups that does.

    It depends on nothing but the two, so a group stays where it is as data is added, and a larger share only adds.
    """
    number = int.from_bytes(hashlib.sha256(f"stemma-heldout:{group}".encode()).digest()[:8], "big")
    return number < share * 2**64
