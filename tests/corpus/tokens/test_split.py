"""The split: the share asked for, stable, and one side for one group in every stage."""

from __future__ import annotations

import hashlib

import pytest

from corpus.documents.parts import is_heldout

GROUPS = [f"group {i}" for i in range(20_000)]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.5])
def test_share_is_what_was_asked_for(share):
    found = sum(is_heldout(group, share) for group in GROUPS) / len(GROUPS)
    assert abs(found - share) < 4 * (share * (1 - share) / len(GROUPS)) ** 0.5


def test_a_larger_share_only_adds():
    small = {group for group in GROUPS if is_heldout(group, 0.05)}
    assert small < {group for group in GROUPS if is_heldout(group, 0.1)}


def test_it_is_the_published_formula():
    number = int(hashlib.sha256(b"stemma-heldout:return the norm").hexdigest()[:16], 16)
    assert is_heldout("return the norm", number / 2**64 + 1e-9)
    assert not is_heldout("return the norm", number / 2**64 - 1e-9)
