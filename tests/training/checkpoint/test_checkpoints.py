"""Checkpoints: whole or passed over, of this data and this model, at home on any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import pretrain_in_ranks
from training.checkpoint.folder import checkpoints, damage, retain, whole_checkpoints
from training.checkpoint.folder import write as write_checkpoint
from training.config import PretrainConfig
from training.pretrain import pretrain

Weights = Callable[[Path], dict[str, torch.Tensor]]
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64},
    "duration": "12 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2},
    "evaluate_every": "1000 batches",
    "checkpoint_every": "4 batches",
}


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


class Stops:
    """A run's `is_cancelled` that says yes once so many batches are told."""

    def __init__(self, after: int, journal: Any) -> None:
        self._after = after
        self._journal = journal

    def __call__(self) -> bool:
        return len(self._journal.metric("train/loss")) >= self._after


def _train(folder: Path, inputs: dict[str, Path], journal: Any = None, **changes: Any) -> None:
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    run = Run(folder.parent / f"{folder.name}.work", launch, journal=journal)
    pretrain(PretrainConfig.model_validate(SETTINGS | changes), inputs, folder, run)


def _stopped(folder: Path, inputs: dict[str, Path], journal: Any, after: int = 6) -> list[Path]:
    """A training that was told to stop after so many batches; its checkpoints, newest first."""
    work = folder.parent / f"{folder.name}.work"
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    run = Run(work, launch, journal=journal, is_cancelled=Stops(after, journal))
    with pytest.raises(Cancelled):
        pretrain(PretrainConfig.model_validate(SETTINGS), inputs, folder, run)
    journal.lines.clear()
    return checkpoints(work / "checkpoints")


def test_a_run_told_to_stop_saves_at_once_and_continues_there(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, weights: Weights
) -> None:
    saved = _stopped(tmp_path / "model", inputs, journal, after=6)
    assert [path.name for path in saved] == ["ba000000006", "ba000000004"]
    _train(tmp_path / "model", inputs, journal)
    assert journal.events() == ["continuing pretrain at batch 6 of 12"]
    _train(tmp_path / "unbroken", inputs)
    ours, theirs = weights(tmp_path / "model"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("break_it", "name", "said"),
    [
        (_cut, "rank0.safetensors", "rank0.safetensors is truncated"),
        (_flip, "rank0.safetensors", "rank0.safetensors has changed since it was written"),
        (_flip, "state.json", "state.json has changed since it was written"),
        (Path.unlink, "rank0.json", "rank0.json is missing"),
        (Path.unlink, "manifest.json", "manifest.json is missing"),
        (_cut, "manifest.json", "manifest.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_found(tmp_path: Path, break_it: Callable[[Path], None], name: str, said: str) -> None:
    def files(folder: Path) -> list[Path]:
        for file in ("rank0.safetensors", "state.json", "rank0.json"):
            (folder / file).write_text(json.dumps({"file": file, "filler": "x" * 1000}))
        return sorted(folder.iterdir())

    older, newer = write_checkpoint(tmp_path, 4, files), write_checkpoint(tmp_path, 8, files)
    assert damage(newer) == ""
    break_it(newer / name)
    told: list[str] = []
    assert list(whole_checkpoints([tmp_path], told.append)) == [older]
    assert told == [f"passing over the checkpoint of batch 8: {said}"]


def test_training_passes_over_a_damaged_checkpoint_and_a_half_written_one(
    inputs: dict[str, Path], tmp_path: Path, journal: Any
) -> None:
    newest, _ = _stopped(tmp_path / "model", inputs, journal, after=6)
    _flip(newest / "rank0.safetensors")
    (newest.parent / "unfinished.ba000000009").mkdir()
    _train(tmp_path / "model", inputs, journal)
    assert journal.events() == [
        "passing over the checkpoint of batch 6: rank0.safetensors has changed since it was written",
        "continuing pretrain at batch 4 of 12",
    ]
    assert [path.name for path in sorted(newest.parent.iterdir())] == ["ba000000008", "ba000000012"]


def test_a_training_tells_that_it_goes_on_under_other_versions(
    inputs: dict[str, Path], tmp_path: Path, journal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = metadata.version
    with monkeypatch.context() as earlier:
        earlier.setattr(metadata, "version", lambda name: "2.7.0" if name == "torch" else installed(name))
        _stopped(tmp_path / "model", inputs, journal, after=6)
    _train(tmp_path / "model", inputs, journal)
    told, continuing = journal.events()
    assert told.startswith(
        f"the state after batch 6 was written by torch 2.7.0 (here: {installed('torch')}): training continues"
    )
    assert continuing == "continuing pretrain at batch 6 of 12"


def test_other_data_and_another_architecture_are_refused_before_the_first_step(
    inputs: dict[str, Path], tmp_path: Path, journal: Any
) -> None:
    _stopped(tmp_path / "model", inputs, journal)
    other = tmp_path / "shards"
    subprocess.run(["cp", "-r", inputs["shards"], other], check=True)
    shard = next((other / "train").glob("*.mds"))
    _flip(shard)
    with pytest.raises(StageError, match="another data set") as refused:
        _train(tmp_path / "model", inputs | {"shards": other}, journal)
    assert refused.value.problems[0].code == "other_data" and refused.value.problems[0].fix
    with pytest.raises(StageError, match=r"weight is \[319, 32\] there, \[319, 64\] in this model") as refused:
        _train(tmp_path / "model", inputs, journal, model=SETTINGS["model"] | {"width": 64})
    assert refused.value.problems[0].code == "other_architecture" and refused.value.problems[0].fix
    assert not journal.metric("train/loss")


def test_retention_by_count_and_by_age(tmp_path: Path) -> None:
    for batch in range(1, 6):
        write_checkpoint(tmp_path, batch, lambda folder: [])
    day = 24 * 3600
    for batch, age_days in ((1, 3), (2, 3), (3, 1), (4, 1), (5, 0)):
        moment = (tmp_path / f"ba{batch:09}").stat().st_mtime - age_days * day
        os.utime(tmp_path / f"ba{batch:09}", (moment, moment))
    retain(tmp_path, count=1, hours=48)
    assert [path.name for path in checkpoints(tmp_path)] == ["ba000000005", "ba000000004", "ba000000003"]
    retain(tmp_path, count=2, hours=0)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["ba000000004", "ba000000005"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for about three checkpoints of the small model."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_leaves_the_older_checkpoint_whole(
    inputs: dict[str, Path], tmp_path: Path, small_disk: Path, journal: Any, weights: Weights
) -> None:
    with pytest.raises(StageError, match="the disk is full") as refused:
        _train(small_disk / "model", inputs, journal, keep_checkpoints=9, checkpoint_every="1 batches")
    problem = refused.value.problems[0]
    assert problem.code == "disk_full" and "free some space" in problem.fix
    (folder,) = small_disk.glob("*.work/checkpoints")
    kept = checkpoints(folder)
    assert kept and not damage(kept[0]) and not list(folder.glob("unfinished*"))
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    journal.lines.clear()
    _train(small_disk / "model", inputs, journal)
    assert journal.events() == [f"continuing pretrain at batch {len(kept)} of 12"]
    _train(tmp_path / "unbroken", inputs)
    ours, theirs = weights(small_disk / "model"), weights(tmp_path / "unbroken")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_nothing_in_a_checkpoint_is_pickled(inputs: dict[str, Path], tmp_path: Path, journal: Any) -> None:
    newest, _ = _stopped(tmp_path / "model", inputs, journal)
    kinds = {path.suffix for path in newest.iterdir()}
    assert kinds == {".json", ".safetensors"}


WAYS = {"one": (1, {}), "ddp": (2, {}), "fsdp": (2, {"sharding": "fsdp"})}


@pytest.mark.parametrize(
    ("before", "after"), [("one", "fsdp"), ("fsdp", "ddp"), pytest.param("ddp", "one", marks=pytest.mark.long)]
)
def test_a_checkpoint_moves_between_rank_counts_and_shardings(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights, before: str, after: str, journal: Any
) -> None:
    settings = SETTINGS | {"duration": "8 batches"}
    _train(tmp_path / "unbroken", inputs, journal, duration="8 batches")
    count, launch = WAYS[before]
    pretrain_in_ranks(count, settings, inputs, tmp_path / "model", launch=launch)
    folder = tmp_path / "model.work" / "checkpoints"
    subprocess.run(["rm", "-r", folder / "ba000000008"], check=True)
    count, launch = WAYS[after]
    told = pretrain_in_ranks(count, settings, inputs, tmp_path / "model", launch=launch)
    losses = [line["values"]["train/loss"] for line in told if "train/loss" in line.get("values", {})]
    assert losses == pytest.approx(journal.metric("train/loss")[4:], rel=1e-4)
    for name, tensor in weights(tmp_path / "unbroken").items():
        torch.testing.assert_close(weights(tmp_path / "model")[name], tensor, rtol=1e-3, atol=1e-4)
