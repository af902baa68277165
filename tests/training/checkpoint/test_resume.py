"""Stopped by a signal at some batch and started again, a training takes the same steps as one that never stopped.

Across epochs, with dropout, two loader workers, documents packed into sequences, and three sources that the mix stage
weighted and the shard stage mixed: training reads a mixture as one stream, in which every batch has all sources. A full
disk and a damaged checkpoint are in test_checkpoints.py, corrections in test_guard.py, ranks in test_ranks.py.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import infra.run
from infra.launch.config import LaunchConfig
from infra.run import Run, read_journal
from tests.support.points import points_of
from tests.support.programs.processes import wait_until
from tests.support.programs.ranked import training_process
from training.config import PretrainConfig
from training.data.node_storage import own_shared_memory
from training.data.packed_shards import PackedShards
from training.data.shard_index import Split
from training.pretrain import pretrain

Weights = Callable[[Path], dict[str, torch.Tensor]]
BATCHES = 120
SEQUENCES = 8
CHECKPOINT_EVERY = 7
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "duration": f"{BATCHES} batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2, "muon": {}},
    "evaluate_every": "1000 batches",
    "checkpoint_every": f"{CHECKPOINT_EVERY} batches",
}
LAUNCH: dict[str, Any] = {"device": "cpu", "threads": 1, "precision": "fp32", "loader_workers": 2}


def _losses(lines: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Step → loss; a step that was taken twice must have had the same loss both times."""
    found: dict[int, float] = {}
    for line in lines:
        if line["kind"] == "metric" and "train/loss" in line["values"]:
            assert found.setdefault(line["step"], line["values"]["train/loss"]) == line["values"]["train/loss"]
    return found


@pytest.fixture(scope="module")
def inputs(mixed_shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": mixed_shards_dir, "tokenizer": tokenizer_dir}


@pytest.fixture(scope="module")
def unbroken(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The model of a training that nobody stopped, and its losses."""
    folder = tmp_path_factory.mktemp("unbroken")
    with (folder / "journal.jsonl").open("w+") as journal:
        run = Run(folder / "work", LaunchConfig(**LAUNCH), journal=journal)
        pretrain(PretrainConfig.model_validate(SETTINGS), inputs, folder / "model", run)
        run.close()
    return folder / "model", _losses(read_journal(folder / "journal.jsonl"))


class Sources(PackedShards):
    """Gives the sources of each sequence's documents in place of its tokens."""

    def __getitem__(self, at: Any) -> Any:
        return set(self.sources(at).tolist())


def test_the_batches_mix_the_sources_of_several_shards(inputs: dict[str, Path], tmp_path: Path) -> None:
    folder = inputs["shards"] / "train"
    assert len(json.loads((folder / "index.json").read_text())["shards"]) > 3
    with own_shared_memory(tmp_path):
        order = list(Sources(Split.read(folder), tmp_path, SEQUENCES, seed=17, shuffle=True))
    assert len(order) * 2 < BATCHES * SEQUENCES, "more than two epochs"
    for batch in range(0, len(order), SEQUENCES):
        assert set.union(*order[batch : batch + SEQUENCES]) == {0, 1, 2}


@pytest.mark.parametrize(
    ("with_signal", "at"), [(signal.SIGTERM, 19), pytest.param(signal.SIGKILL, 40, marks=pytest.mark.long)]
)
def test_every_step_after_a_signal_is_the_one_that_would_have_been(
    with_signal: signal.Signals,
    at: int,
    inputs: dict[str, Path],
    unbroken: tuple[Path, dict[int, float]],
    tmp_path: Path,
    journal: Any,
    weights: Weights,
) -> None:
    model, expected = unbroken
    assert sorted(expected) == list(range(1, BATCHES + 1))
    told = _ended_by(with_signal, at, inputs, tmp_path)
    last = max(_losses(told))
    assert last < BATCHES
    assert not list((tmp_path / "broken").glob("*.safetensors"))
    saved = {int(path.name[2:]) for path in (tmp_path / "broken.work" / "checkpoints").glob("ba*")}
    assert with_signal == signal.SIGKILL or last in saved
    run = Run(tmp_path / "broken.work", LaunchConfig(**LAUNCH), journal=journal)
    pretrain(PretrainConfig.model_validate(SETTINGS), inputs, tmp_path / "broken", run)
    (said,) = [message for message in journal.events() if message.startswith("continuing")]
    begins = min(_losses(journal.lines))
    assert said == f"continuing pretrain at batch {begins - 1} of {BATCHES}"
    assert begins > at - CHECKPOINT_EVERY, "no more than what came after the last checkpoint is done again"
    assert _losses([*told, *journal.lines]) == expected
    ours, theirs = weights(tmp_path / "broken"), weights(model)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class Dies(Run):
    """Is killed at the batch `at`, or at the first checkpoint from there on, once its place in the journal is known."""

    def __init__(self, *given: Any, how: str, at: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self.how, self.at, self.batch = how, at, 0

    def metrics(self, values: Any, step: Any = None) -> None:
        super().metrics(values, step)
        self.batch = step
        if step == self.at and self.how != "at a checkpoint":
            if self.how == "written":
                self._journal.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    def place(self) -> Any:
        place = super().place()
        if self.how == "at a checkpoint" and self.batch >= self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return place


def _train_and_die(folder: Path, settings: dict[str, Any], inputs: dict[str, Path], how: str, at: int) -> None:
    """The forked process: trains on in the folder until it dies, if it is to."""
    infra.run.FLUSH_EVERY_S = 1e9  # what is not written down for a reason of its own is lost
    folder.mkdir(exist_ok=True)
    launch = LaunchConfig(**LAUNCH | {"loader_workers": 0})
    with infra.run.open_journal(folder / "journal.jsonl") as journal:
        run = Dies(folder / "work", launch, journal=journal, how=how, at=at)
        pretrain(PretrainConfig.model_validate(settings), inputs, folder / "model", run)


SHORT = 24
WAYS = ("lost", "written", "at a checkpoint")


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([("lost", 9), ("written", 12), ("at a checkpoint", 15), ("lost", 22)], id="awkward moments"),
        # The risk: a moment that nobody thought of.
        pytest.param([(how, at) for at in range(1, 22) for how in WAYS], id="each batch", marks=pytest.mark.long),
    ],
)
def test_each_point_is_told_once_whenever_it_is_killed(
    kills: list[tuple[str, int]], inputs: dict[str, Path], tmp_path: Path
) -> None:
    """lost: with lines that were not on the disk yet; written: with all on it; at a checkpoint: before it is there."""
    settings = SETTINGS | {"duration": f"{SHORT} batches", "evaluate_every": "5 batches", "sample_prompts": ["Sort"]}
    jobs = [("unbroken", "", 0), *(("broken", how, at) for how, at in kills), ("broken", "", 0)]
    for name, how, at in jobs:
        child = training_process(_train_and_die, tmp_path / name, settings, inputs, how, at)
        try:
            assert child.wait() == (-signal.SIGKILL if how else 0), (how, at)
        finally:
            child.kill()
    lines = {name: read_journal(tmp_path / name / "journal.jsonl") for name in ("broken", "unbroken")}
    assert points_of(lines["broken"]) == points_of(lines["unbroken"])
    assert [step for step, _ in points_of(lines["broken"])["train/loss"]] == list(range(1, SHORT + 1))
    samples = [(tmp_path / name / "work" / "training_samples.jsonl").read_text() for name in ("broken", "unbroken")]
    assert samples[0] == samples[1]
    assert [line["name"] for line in lines["broken"] if line["kind"] == "event"].count("continued") >= 2, "events stay"


def _as_a_program(words: list[str], log: Path) -> None:
    """The forked process: `python -m training.pretrain WORDS`, with its stderr in a file."""
    os.dup2(os.open(log, os.O_WRONLY), 2)
    sys.argv = ["training.pretrain", *words]
    runpy.run_module("training.pretrain", run_name="__main__", alter_sys=True)


def _ended_by(with_signal: signal.Signals, at: int, inputs: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """What a training in a process of its own told until it ended by a signal that was sent after batch `at`."""
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
    words = ["--config", str(folder / "config.yaml"), "--out", str(folder / "broken")]
    for name, path in inputs.items():
        words += ["--input", f"{name}={path}"]
    for name, value in LAUNCH.items():
        words += ["--launch", f"{name}={value}"]
    journal = folder / "broken.jsonl"
    journal.touch()
    process = training_process(_as_a_program, words, journal)
    try:
        wait_until(lambda: f'"step": {at},' in journal.read_text() or process.poll() is not None, timeout_s=300)
        assert process.poll() is None, journal.read_text()[-2000:]
        os.kill(process.pid, with_signal)
        process.wait(60)
    finally:
        process.kill()
    return [
        json.loads(line) for line in journal.read_text().splitlines() if line.startswith("{") and line.endswith("}")
    ]
