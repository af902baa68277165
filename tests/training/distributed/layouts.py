"""Trainings of one model in several layouts of ranks: what each must have told, weigh and go on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from training.checkpoint.snapshot import Snapshot, TensorPart

Weights = Callable[[Path], dict[str, torch.Tensor]]
Told = list[dict[str, Any]]
Train = Callable[[str, Path], Told]
"""Trains in a way of that name into a folder, from the newest checkpoint beside it, and returns what rank 0 told."""
BATCHES, LAST_CHECKPOINT, AGAIN = 12, "ba000000012", 4
"""Of the trainings that are compared: their batches, and how many are trained again without the last checkpoint."""


def values_of(told: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """The values of a metric in what rank 0 told."""
    return [float(line["values"][name]) for line in told if name in line.get("values", {})]


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """That two models have the same weights to rounding."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-4)


def assert_saved_alike(ours: Path, theirs: Path, *, numbers: bool = True) -> None:
    """That the last checkpoints of two trainings hold the same tensors, whole, to rounding: so any layout of which this
    is shown goes on from what any other wrote. numbers: whether what is in them is compared too."""
    found, expected = (
        Snapshot.open(out.with_name(f"{out.name}.work") / "checkpoints" / LAST_CHECKPOINT) for out in (ours, theirs)
    )
    assert found.shapes == expected.shapes
    for name, shape in expected.shapes.items() if numbers else ():
        one, other = (snapshot.read(name, TensorPart.of_shape(shape)) for snapshot in (found, expected))
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}")


def assert_goes_on(
    train: Train,
    way: str,
    other: str,
    one: tuple[Path, Told],
    out: Path,
    weights: Weights,
    metrics: Sequence[tuple[str, float]] = (("train/loss", 1e-4), ("train/grad_norm", 1e-3)),
) -> Told:
    """That a training in `way` tells and weighs what one process does; that without its last checkpoint it ends with
    the same bits again, and in layout `other` with the same figures. Returns what the first one told.

    one: the model of one process, and what it told. metrics: their names, and how close they must be.
    """
    whole, told = one
    found: dict[str, dict[str, torch.Tensor]] = {}
    first: Told = []
    for turn in ("begun", "again", "moved"):
        if turn == "again":
            assert_saved_alike(out, whole)
        if turn != "begun":
            shutil.rmtree(out.with_name(f"{out.name}.work") / "checkpoints" / LAST_CHECKPOINT)
        again = train(other if turn == "moved" else way, out)
        first = first or again
        steps = BATCHES if turn == "begun" else AGAIN
        for name, close in metrics:
            assert values_of(again, name) == pytest.approx(values_of(told, name)[-steps:], rel=close), (turn, name)
        found[turn] = weights(out)
        assert_close(found[turn], weights(whole))
    assert all(torch.equal(found["again"][name], weight) for name, weight in found["begun"].items())
    return first


def assert_alike(
    train: Callable[..., Told], way: str, folder: Path, weights: Weights, close: float = 2e-3, **more: Any
) -> Told:
    """That a training in `way` tells what one process does, and without its last checkpoint ends with the same bits
    again. Returns what it told.

    train: takes the name of a way, a folder, and `more`: what both have besides. close: of losses; 2e-3 is what half
    precision leaves of them.
    """
    told = {one_way: train(one_way, folder / one_way, **more) for one_way in ("one", way)}
    for metric, within in (("train/loss", close), ("validation/sample_loss", close), ("train/grad_norm", 20 * close)):
        ours, theirs = (values_of(told[name], metric) for name in (way, "one"))
        assert ours == pytest.approx(theirs, rel=within) and ours, metric
    begun = weights(folder / way)
    assert_saved_alike(folder / way, folder / "one", numbers=False)
    shutil.rmtree(folder / f"{way}.work" / "checkpoints" / LAST_CHECKPOINT)
    again = train(way, folder / way, **more)
    assert values_of(again, "train/loss") == values_of(told[way], "train/loss")[-AGAIN:]
    found = weights(folder / way)
    assert all(torch.equal(found[name], weight) for name, weight in begun.items())
    return told[way]


GROWING: dict[str, Any] = {"batch_warmup": {"first_tokens": 128, "over_tokens": 512}}
"""Settings with batches that grow."""
MIXED: dict[str, Any] = {
    "mixture": {
        "proportion": {"letters": 2, "numbers": 1, "sentences": 1},
        "phases": [{"begins": "50 %", "proportion": {"sentences": 3, "numbers": 1}}],
    }
}
"""Settings with a mixture of the sources of `apart_shards_dir`, in other shares after the sixth batch."""
