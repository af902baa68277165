"""Slow ranks: found by who comes late where the others wait, and named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs.ranked import pretrain_in_ranks
from training.guard.liveness import lateness

SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64},
    "duration": "15 batches",
    "global_batch_tokens": 256,
    "evaluate_every": "1000 batches",
}


def test_lateness_counts_what_is_lost_between_points() -> None:
    usual = [0.0, 1.0, 2.0, 3.0]
    lag_that_stays = [0.0, 1.5, 2.5, 3.5]  # DDP: nobody waits
    lag_made_up = [0.0, 1.5, 2.0, 3.5]  # FSDP: the others wait at each point
    other_clock = [100.0, 101.0, 102.0, 103.0]
    assert lateness([usual, usual, usual, lag_that_stays]) == pytest.approx([0, 0, 0, 0.5])
    assert lateness([usual, usual, usual, lag_made_up]) == pytest.approx([0, 0, 0, 1.0])
    assert lateness([usual, usual, usual, other_clock]) == pytest.approx([0, 0, 0, 0])


def _slow_rank(rank: int) -> None:
    """Rank 1 takes 0.3 s longer for each forward pass, or more, so that it tells beside other work."""
    import time

    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    import training.guard.liveness

    training.guard.liveness._COMPARE_EVERY = 3
    forward, last = LlamaDecoderLayer.forward, time.monotonic()

    def slow(self: LlamaDecoderLayer, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        if rank == 1 and self.training:
            time.sleep(min(max(0.15, 0.5 * (time.monotonic() - last)), 2.0))
            last = time.monotonic()
        return forward(self, *args, **kwargs)

    LlamaDecoderLayer.forward = slow


@pytest.mark.parametrize("sharding", [pytest.param("ddp", marks=pytest.mark.long), "fsdp"])
def test_a_slow_rank_is_named(shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, sharding: str) -> None:
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    launch = {"sharding": sharding}
    told = pretrain_in_ranks(2, SETTINGS, inputs, tmp_path / "model", launch=launch, prepare=_slow_rank)
    events = [line for line in told if line.get("name") == "slow_rank"]
    assert {event["rank"] for event in events} == {1}
    assert len(events) <= 2, "named at every second of five looks"
    said = re.match(r"rank 1 is slow: the others wait (\d+\.\d\d) s of each ", events[0]["message"])
    assert said and float(said[1]) > 0.1
