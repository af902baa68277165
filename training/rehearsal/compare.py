"""A rehearsal next to the plan: memory and what is sent, planned and recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from training.planner.hardware.network import Network
from training.planner.memory import FRAGMENTED, memory_of_rank
from training.planner.step_time import RankLayout, Training, step_time
from training.rehearsal.job import Collective, RankRecord

ALLOWED = 0.05
"""Relative difference between plan and rehearsal that is not reported."""
_BYTES = Network(link=1.0, network=1.0, node=1 << 20, start_s=0, far_start_s=0, reached=1.0, straggle=0)
"""One second per byte: times are bytes that a device sends."""
_NEGLIGIBLE = 1e-3
"""Share of all bytes sent below which a dimension is not compared: sums of single numbers, such as losses."""
_DIMENSIONS = ("tensor", "context", "experts", "pipeline", "data")


def comparison(job: Training, at: RankLayout, records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    """Return a row for each figure: {"what", "rank", "planned_gb", "rehearsed_gb", "ratio", "node_gb", "network_gb"}.

    Memory is compared rank by rank, without what an allocator wastes. Of what is sent, the rank that sends the most
    along a dimension counts; `node_gb` and `network_gb` are its bytes within the node and to others.

    Args:
        job: with the number of sequences of the rehearsed step.
        at: layout of the ranks.
        records: of ranks at different positions of a pipeline.
    """
    rows = []
    for record in records:
        planned = memory_of_rank(job, at, record.position)
        figures = (
            ("weights", planned.weights, record.weights),
            ("optimizer", planned.optimizer, record.optimizer),
            ("memory, peak", planned.total - planned.fragmentation, record.most),
        )
        rows += [_row(what, record.rank, size, rehearsed) for what, size, rehearsed in figures]
    return [*rows, *_sent(job, at, records)]


def off(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows whose plan and rehearsal differ by more than `ALLOWED`."""
    return [row for row in rows if row["ratio"] is None or abs(row["ratio"] - 1) > ALLOWED]


def on_device(record: RankRecord) -> float:
    """Bytes of a device at the fullest moment, with what its allocator wastes."""
    return record.most * (1 + FRAGMENTED)


def _sent(job: Training, at: RankLayout, records: Sequence[RankRecord]) -> list[dict[str, Any]]:
    alone = replace(job, kernels=replace(job.kernels, overlap=0.0), network=_BYTES)
    time = step_time(alone, at)
    planned = {dimension: float(getattr(time, dimension)) for dimension in _DIMENSIONS}
    if at.pp == 2:  # each rank is an end, and sends in one direction less
        planned["pipeline"] *= (2 * at.interleave - 1) / (2 * at.interleave)
    if at.dp == 1 and at.cp > 1:  # ranks that share sequences have all copies of the weights: the two share a group
        planned |= {"context": planned["context"] + planned["data"], "data": 0.0}
    total = sum(planned.values())
    rows = []
    for dimension in _DIMENSIONS:
        busiest: Counter[str] = Counter()
        rank = records[0].rank
        for record in records:
            sizes: Counter[str] = Counter()
            for collective in record.collectives:
                if _planned_as(collective) == dimension:
                    sizes[collective.link] += collective.sent_bytes
            if sizes.total() > busiest.total():
                busiest, rank = sizes, record.rank
        if max(planned[dimension], busiest.total()) > _NEGLIGIBLE * total:
            row = _row(f"sent, {dimension}", rank, planned[dimension], busiest.total())
            rows.append({**row, "node_gb": busiest["node"] / 1e9, "network_gb": busiest["network"] / 1e9})
    return rows


def _planned_as(collective: Collective) -> str:
    """Dimension as which the plan counts a collective: gradients that both ends of a pipeline have are `data`."""
    if collective.kind in ("send", "receive"):
        return "pipeline"
    names = collective.dimension.split("+")
    if "experts" in names:
        return "experts"
    if "data" in names or "pipeline" in names:
        return "data"
    return "context" if "context" in names else "tensor"


def _row(what: str, rank: int, planned: float, rehearsed: float) -> dict[str, Any]:
    ratio = rehearsed / planned if planned else None
    return {"what": what, "rank": rank, "planned_gb": planned / 1e9, "rehearsed_gb": rehearsed / 1e9, "ratio": ratio}
