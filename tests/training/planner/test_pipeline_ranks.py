"""What waits on the ranks of a pipeline, against the order in which torch's schedules pass microbatches."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from training.core.devices import DEVICES
from training.planner.architecture import of_preset
from training.planner.hardware.kernels import KERNELS
from training.planner.hardware.network import network_of
from training.planner.memory import memory, memory_of_rank
from training.planner.pipeline_ranks import part_of
from training.planner.step_time import RankLayout, Training


def order(ranks: int, pieces: int, rank: int, count: int) -> list[tuple[bool, int]]:
    """Of each pass of a rank whether it is a forward one, and through which of its pieces."""
    if pieces == 1:  # as Schedule1F1B goes: warm-up, one of each in turn, what is left
        ahead = min(count, ranks - rank)
        turns = [(False, 0), (True, 0)] * (count - ahead)
        return [(True, 0)] * ahead + turns + [(False, 0)] * ahead
    schedule: Any = object.__new__(ScheduleInterleaved1F1B)
    vars(schedule).update(
        n_local_stages=pieces, pp_group_size=ranks, _n_microbatches=count, microbatches_per_round=ranks
    )
    passes = [one for one in schedule._calculate_single_rank_operations(rank) if one is not None]
    return [(one.computation_type.name == "FORWARD", one.stage_index // ranks) for one in passes]


@pytest.mark.parametrize("pieces", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_what_waits_is_what_torchs_schedule_leaves_waiting(ranks: int, pieces: int, rounds: int) -> None:
    """Of all moments those stay that no other moment has more than, of gradients and of what waits."""
    for rank in range(ranks):
        waiting, left, seen = 0, set[int](), []
        for forward, piece in order(ranks, pieces, rank, rounds * ranks):
            if forward:
                waiting += 1
                continue
            seen.append((len(left) / pieces, float(waiting)))
            waiting -= 1
            left.add(piece)
        worst = {one for one in seen if not any(one != other and all(map(float.__le__, one, other)) for other in seen)}
        assert set(part_of(12, ranks, pieces, rank, rounds * ranks).fullest) >= worst
        assert set(part_of(12, ranks, pieces, rank, rounds * ranks).fullest) <= set(seen)


@pytest.mark.parametrize("pieces", [1, 2])
def test_the_fullest_rank_is_an_end(pieces: int) -> None:
    device = DEVICES["a100-80"]
    job = Training(of_preset("gpt-1.3b"), device, KERNELS["flash"], network_of(device), 2048, 64)
    for at in (
        RankLayout(pp=4, interleave=pieces),
        RankLayout(pp=4, interleave=pieces, microbatch=4, recompute="full"),
    ):
        by_rank = [memory_of_rank(job, at, rank).total for rank in range(4)]
        assert memory(job, at).total == max(by_rank)


def test_parts_make_up_a_model() -> None:
    parts = [part_of(10, 4, 2, rank, 8) for rank in range(4)]
    assert [one.layers for one in parts] == [4, 2, 2, 2]
    assert [one.first for one in parts] == [True, False, False, False]
    assert [one.last for one in parts] == [False, False, False, True]
