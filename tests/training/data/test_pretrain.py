"""Pretraining: it learns, tells what it does, and evaluates without a trace. For signals see test_resume.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import PretrainConfig
from training.pretrain import pretrain

Weights = Callable[[Path], dict[str, torch.Tensor]]
SETTINGS: dict[str, Any] = {
    # Dropout, so that a resume with the wrong random state shows.
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "duration": "60 batches",
    "global_batch_tokens": 256,
    "optimizer": {"learning_rate": 1.0e-2},
    "schedule": {"warmup": "5 batches"},
    "evaluate_every": "20 batches",
    "checkpoint_every": "10 batches",
}


@pytest.fixture
def inputs(shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": shards_dir, "tokenizer": tokenizer_dir}


def _config(**changes: Any) -> PretrainConfig:
    return PretrainConfig.model_validate(SETTINGS | changes)


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _quiet(folder: Path, **launch: Any) -> Run:
    return Run(folder, LaunchConfig(device="cpu", threads=1, precision="fp32", **launch))


def test_training_beats_the_n_grams_and_tells_how_it_goes(
    inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any
) -> None:
    before = {path: path.stat().st_mtime_ns for path in inputs["shards"].rglob("*")}
    result = pretrain(_config(duration="160 batches"), inputs, tmp_path, run)
    figures = result.figures
    assert figures["validation_loss"] < figures["bigram_loss"] < figures["unigram_loss"]
    assert figures["validation_loss_low"] < figures["validation_loss"] < figures["validation_loss_high"]
    assert figures["batches"] == 160
    assert figures["tokens"] == 160 * 256
    assert len(journal.metric("train/loss")) == 160
    for name in ("validation/sample_loss", "validation/sample_bits_per_byte"):
        told = [line["step"] for line in journal.lines if name in line.get("values", {})]
        assert told == list(range(20, 161, 20)), "each step once, the last one too"
    assert journal.metric("train/lr")[4] == pytest.approx(1.0e-2)
    assert {path: path.stat().st_mtime_ns for path in inputs["shards"].rglob("*")} == before
    tokenizer_files = {path.name for path in inputs["tokenizer"].iterdir() if path.is_file()}
    assert {"chat_template.jinja", "tokenizer.json", "tokenizer_config.json"} <= tokenizer_files
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    ours = {"config.json", "generation_config.json", "model.safetensors", "trained_sequences.json"}
    assert written == ours | tokenizer_files


def test_how_it_runs_leaves_no_trace_in_the_weights(inputs: dict[str, Path], tmp_path: Path, weights: Weights) -> None:
    """Evaluation and checkpoints do not move the weights at all, microbatches only by rounding."""
    plain = {"model": SETTINGS["model"] | {"dropout": 0.0}, "duration": "12 batches"}
    dropped = {"duration": "12 batches", "evaluate_every": "100 batches", "sample_prompts": ()}
    looks = {
        "evaluate_every": "4 batches",
        "evaluate_tasks": ["minimal_pairs"],
        "evaluate_limit": 4,
        "sample_tokens": 8,
    }
    variants = {
        "whole": (_config(**plain), {}),
        "watched": (_config(**plain, evaluate_every="1 batches", checkpoint_every="2 batches"), {}),
        "unseen": (_config(**dropped), {}),
        "looked_at": (_config(**dropped | looks | {"sample_prompts": ["", "Sort the "]}), {}),
        "in_parts": (_config(**plain), {"microbatch": 3}),
    }
    found = {}
    for name, (config, launch) in variants.items():
        pretrain(config, inputs, tmp_path / name, _quiet(tmp_path / f"{name}.work", **launch))
        found[name] = weights(tmp_path / name)
    assert _same(found["whole"], found["watched"])
    assert _same(found["unseen"], found["looked_at"])
    samples = (tmp_path / "looked_at" / "aux" / "training_samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in samples] == [4, 4, 8, 8, 12, 12]
    assert json.loads(samples[1])["prompt"] == "Sort the "
    for name, tensor in found["whole"].items():
        torch.testing.assert_close(found["in_parts"][name], tensor, rtol=1e-3, atol=1e-4)


def test_a_cancelled_run_stops_at_the_next_batch(inputs: dict[str, Path], tmp_path: Path, journal: Any) -> None:
    def cancelled() -> bool:
        return len(journal.metric("train/loss")) >= 3

    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1), journal=journal, is_cancelled=cancelled)
    with pytest.raises(Cancelled):
        pretrain(_config(evaluate_every="1000 batches"), inputs, tmp_path / "out", run)
    assert len(journal.metric("train/loss")) == 3


@pytest.mark.parametrize(
    ("changes", "launch", "code"),
    [
        ({"global_batch_tokens": 100}, {}, "not_divisible"),
        ({"global_batch_tokens": 32 * 10_000}, {}, "too_few_sequences"),
        ({"model": {"transformers": {"model_type": "no_such_model"}}}, {}, "unproven_family"),
        ({"model": {"transformers": {"model_type": "no_such_model"}}, "attention": "sequence"}, {}, "bad_model"),
        ({"model": SETTINGS["model"] | {"positions": 16}}, {}, "too_few_positions"),
        ({"model": {"transformers": {"model_type": "llama", "vocab_size": 100}}}, {}, "vocabulary_too_small"),
    ],
)
def test_what_cannot_be_trained_is_said_before_the_first_step(
    inputs: dict[str, Path], tmp_path: Path, changes: dict[str, Any], launch: dict[str, Any], code: str
) -> None:
    with pytest.raises(StageError) as error:
        pretrain(_config(**changes), inputs, tmp_path / "out", _quiet(tmp_path / "work", **launch))
    (problem,) = error.value.problems
    assert problem.code == code
    assert problem.path.startswith("pretrain.") and problem.fix
    assert not list((tmp_path / "work").rglob("ba*"))


@pytest.mark.parametrize("gone", ["meta.json", "train/index.json", "validation/index.json"])
def test_missing_shards_are_named(gone: str, inputs: dict[str, Path], tmp_path: Path, run: Run, journal: Any) -> None:
    shutil.copytree(inputs["shards"], tmp_path / "shards")
    (tmp_path / "shards" / gone).unlink()
    with pytest.raises(StageError, match=gone.rpartition("/")[2].replace(".", r"\.")) as error:
        pretrain(_config(), inputs | {"shards": tmp_path / "shards"}, tmp_path / "out", run)
    assert error.value.problems[0].code == "no_shards" and "shard stage" in error.value.problems[0].fix
    assert not journal.metric("train/loss")


def test_compressed_shards_are_read_without_touching_the_artifact(
    inputs: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    import numpy as np
    from streaming import MDSWriter

    from training.data.open_shards import OpenShards

    rows = np.arange(128, dtype=np.uint16).reshape(4, 32)
    with MDSWriter(out=str(tmp_path / "train"), columns={"tokens": "ndarray:uint16:32"}, compression="zstd") as writer:
        for row in rows:
            writer.write({"tokens": row})
    (tmp_path / "meta.json").write_text('{"sequence_length": 32, "vocab_size": 128}')
    before = sorted(tmp_path.rglob("*"))
    with OpenShards(tmp_path, run) as shards:
        found = shards.read(shards.train, range(4)).tokens
    np.testing.assert_array_equal(found, rows)
    assert json.loads((tmp_path / "train" / "index.json").read_text())["shards"][0]["compression"] == "zstd"
    assert [path for path in sorted(tmp_path.rglob("*")) if run.work_dir not in path.parents] == before


def test_workers_that_read_ahead_change_nothing_also_after_an_interruption(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights, journal: Any
) -> None:
    config = _config(duration="30 batches", checkpoint_every="10 batches", evaluate_every="1000 batches")
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32", loader_workers=2)
    pretrain(config, inputs, tmp_path / "alone", _quiet(tmp_path / "alone.work"))

    def stopped() -> bool:
        return len(journal.metric("train/loss")) >= 13

    work = tmp_path / "ahead.work"
    with pytest.raises(Cancelled):
        pretrain(config, inputs, tmp_path / "ahead", Run(work, launch, journal=journal, is_cancelled=stopped))
    pretrain(config, inputs, tmp_path / "ahead", Run(work, launch))
    assert _same(weights(tmp_path / "ahead"), weights(tmp_path / "alone"))


def test_it_goes_on_from_the_weights_of_another_step(inputs: dict[str, Path], tmp_path: Path) -> None:
    """With a schedule of its own and the other's architecture, which the config does not name again."""
    first, again = tmp_path / "first", tmp_path / "again"
    for folder in (first, again):
        folder.mkdir()
    begun = pretrain(_config(duration="10 batches"), inputs, first, _quiet(tmp_path / "one"))
    of_other = {key: value for key, value in SETTINGS.items() if key != "model"}
    config = PretrainConfig.model_validate({**of_other, "duration": "10 batches", "seed": 5})
    gone_on = pretrain(config, {**inputs, "model": first}, again, _quiet(tmp_path / "two"))
    assert gone_on.figures["batches"] == 10
    assert gone_on.figures["parameters"] == begun.figures["parameters"]
    assert gone_on.figures["validation_loss"] < begun.figures["validation_loss"]
    seen = [json.loads((folder / "trained_sequences.json").read_text())["trained"] for folder in (first, again)]
    assert seen[1] > seen[0], "what both trainings saw can be memorised"


def test_a_model_of_another_tokenizer_is_not_gone_on_from(inputs: dict[str, Path], tmp_path: Path) -> None:
    """Its ids would mean other text."""
    first = tmp_path / "first"
    first.mkdir()
    pretrain(_config(duration="2 batches"), inputs, first, _quiet(tmp_path / "one"))
    path = first / "tokenizer.json"
    told = json.loads(path.read_text())
    vocabulary = told["model"]["vocab"]
    one, other = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(told))
    config = PretrainConfig.model_validate({key: value for key, value in SETTINGS.items() if key != "model"})
    with pytest.raises(StageError, match=r"expected the tokenizer of the model"):
        pretrain(config, {**inputs, "model": first}, tmp_path, _quiet(tmp_path / "two"))
