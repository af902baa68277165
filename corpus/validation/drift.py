"""Distribution of data over lengths, languages and sources, and its drift from that of an earlier time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infra.io.json import read_own_json

if TYPE_CHECKING:
    from pandas import DataFrame, Series

Profile = Mapping[str, Mapping[str, float]]

# What a class that one side lacks counts as, so that logarithms stay finite.
LEAST_SHARE = 1e-4
SOME, MUCH = 0.1, 0.25


@dataclass(frozen=True)
class Drift:
    """The drift of one distribution.

    psi: population stability index, the sum of (new - old) * ln(new / old) over classes: the symmetric Kullback-Leibler
        divergence (Jeffreys, 1946) in nats. By the usual rule (Siddiqi, 2006) under 0.1 is no change to speak of, over
        0.25 a large one.
    jensen_shannon: divergence in bits, 0 to 1 (Lin, 1991).
    moved: the class whose share changed most, with its shares before and now.
    """

    name: str
    psi: float
    jensen_shannon: float
    moved: tuple[str, float, float]

    @property
    def words(self) -> str:
        return "large" if self.psi > MUCH else "some" if self.psi > SOME else "none to speak of"


def profile(kind: str, rows: DataFrame, data: Path) -> dict[str, dict[str, float]]:
    """Distribution → class → count."""
    if kind == "shards":
        meta = read_own_json(data / "meta.json")
        by_source = {name: float(one["train"]["tokens"]) for name, one in meta["sources"].items()}
        return {"documents in a sequence": _lengths(rows["documents"]), "tokens by source": by_source}
    names = {
        "documents": ("text",),
        "clean": ("text",),
        "instructions": ("prompt", "response"),
        "preferences": ("prompt", "chosen", "rejected"),
    }[kind]
    found = {f"characters of {name}": _lengths(rows[name].fillna("").str.len()) for name in names}
    for name in ("source", "language"):
        if name in rows:
            found[name] = _counts(rows[name])
    return found


def compare(old: Profile | None, new: Profile) -> list[Drift]:
    """The drift of each distribution that both have; nothing without an old profile."""
    return [_drift(name, old[name], new[name]) for name in new if old and old.get(name) and new[name]]


def _drift(name: str, old: Mapping[str, float], new: Mapping[str, float]) -> Drift:
    classes = [*new, *(key for key in old if key not in new)]
    before, now = (np.array([one.get(key, 0) for key in classes], float) for one in (old, new))
    before, now = before / max(before.sum(), 1), now / max(now.sum(), 1)
    most = int(np.abs(now - before).argmax())
    middle = (before + now) / 2
    jensen_shannon = (_divergence(before, middle) + _divergence(now, middle)) / 2 / np.log(2)
    p, q = np.maximum(before, LEAST_SHARE), np.maximum(now, LEAST_SHARE)
    psi = float(((q - p) * np.log(q / p)).sum())
    return Drift(name, psi, float(max(0.0, jensen_shannon)), (classes[most], float(before[most]), float(now[most])))


def _divergence(p: np.ndarray, q: np.ndarray) -> float:
    held = p > 0
    return float((p[held] * np.log(p[held] / q[held])).sum())


def _lengths(lengths: Series[int]) -> dict[str, float]:
    """Counts in classes that double: 0, 1, 2 to 3, 4 to 7, …"""
    classes = np.frexp(lengths.to_numpy(float))[1]
    counted = np.bincount(classes, minlength=1)
    names = ["0", "1", *(f"{2 ** (i - 1):,} to {2**i - 1:,}" for i in range(2, len(counted)))]
    return {name: float(count) for name, count in zip(names, counted.tolist(), strict=False) if count}


def _counts(values: Series[str]) -> dict[str, float]:
    """Documents by class, the largest first."""
    return {
        str(name) or "unknown": float(count) for name, count in sorted(values.value_counts().items(), key=_by_count)
    }


def _by_count(item: tuple[object, int]) -> tuple[int, str]:
    return -item[1], str(item[0])
