"""How often each source is to be seen: shares, an epoch cap, and what the others make up for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from corpus.mix.config import MixConfig
from corpus.sources import SourceFacts
from infra.errors import stage_error


@dataclass(frozen=True)
class Available:
    """Bytes of text of a source on the two sides of the held-out split."""

    train: int
    heldout: int

    @property
    def all(self) -> int:
        return self.train + self.heldout

    def capacity(self, max_epochs: float) -> float:
        """Bytes that the source can give: held-out documents once, the others `max_epochs` times."""
        return self.train * max_epochs + self.heldout * min(1.0, max_epochs)

    def epochs_for(self, wanted: float) -> float:
        """How often the training side is to be seen for `wanted` bytes; the held-out one at most once."""
        if wanted <= self.all or not self.train:
            return wanted / self.all if self.all else 0.0
        return (wanted - self.heldout) / self.train


def asked_shares(
    config: MixConfig, facts: Mapping[str, SourceFacts], available: Mapping[str, Available]
) -> dict[str, float]:
    """The share of the mixture that is asked for of each source; they add up to 1.

    Raises StageError: `unknown_source` for a name that no source has; `bad_shares` if there is nothing to take.
    """
    for key in ("shares", "weights"):
        if unknown := sorted(set(getattr(config, key)) - set(available) - set(facts)):
            names = ", ".join(available)
            raise stage_error(
                "unknown_source", f"mix.{key}.{unknown[0]}", f"no source has this name; expected of: {names}"
            )
    weights = {name: config.weights.get(name, facts.get(name, SourceFacts()).weight) for name in available}
    natural = {name: weights[name] * available[name].all for name in available if name not in config.shares}
    named = {name: config.shares[name] for name in available if name in config.shares}
    left = 1 - sum(named.values())
    total = sum(natural.values())
    asked = named | {name: left * part / total if total else 0.0 for name, part in natural.items()}
    whole = sum(asked.values())
    if not whole:
        raise stage_error("bad_shares", "mix", "expected a share or weight above zero for a source that has text")
    return {name: asked[name] / whole for name in available}


def planned_bytes(
    config: MixConfig, shares: Mapping[str, float], available: Mapping[str, Available]
) -> dict[str, float]:
    """Bytes to take of each source. What goes beyond a source's epoch cap is taken of the others, in proportion to
    their shares; the sum falls short of the target only where all are at their cap."""
    target = target_bytes(config, sum(one.all for one in available.values()))
    planned = dict.fromkeys(available, 0.0)
    open_ = {name for name in available if shares[name] > 0}
    while open_:
        left = target - sum(planned[name] for name in available if name not in open_)
        whole = sum(shares[name] for name in open_)
        wanted = {name: left * shares[name] / whole for name in open_}
        full = {name for name in open_ if wanted[name] > available[name].capacity(config.max_epochs)}
        for name in open_:
            planned[name] = available[name].capacity(config.max_epochs) if name in full else wanted[name]
        if not full:
            break
        open_ -= full
    return planned


def target_bytes(config: MixConfig, available: float) -> float:
    if config.target_mb is not None:
        return config.target_mb * 1e6
    if config.target_tokens is not None:
        return config.target_tokens * config.bytes_per_token
    return available * (config.target_share or 1.0)
