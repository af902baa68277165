"""Sources that are mixed while training: their proportions and order, on any number of ranks, killed and continued."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from corpus.tokens.trained import TrainedSequences
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.ranked import RankFailed, pretrain_in_ranks
from training.config import PretrainConfig
from training.data.mixture import Mixture, Phase, Pool, _scattered
from training.pretrain import pretrain
from training.train_modules.mixed_text import text_examples

LENGTH, BATCH = 32, 8
Weights = Callable[[Path], dict[str, torch.Tensor]]


def _by_brute_force(mixture: Mixture, total: int, seed: int) -> list[int]:
    """The source of each of the first `total` places: all sequences of a phase sorted by their times."""
    labels: list[int] = []
    for number, phase in enumerate(mixture.phases):
        last = number + 1 == len(mixture.phases)
        end = total if last else min(total, mixture.phases[number + 1].begins)
        items = np.arange(total + 9)
        times = [
            [(time, source) for time in (items + _scattered(items, source, number, seed)) / weight]
            for source, weight in enumerate(phase.weights)
            if weight
        ]
        labels += [source for _, source in sorted(one for each in times for one in each)][: end - phase.begins]
    return labels


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.001, 0.999, 0.0), (1 / 3, 1 / 3, 1 / 3), (0.0, 0.0, 1.0)])
def test_every_stretch_has_the_weights_proportions(weights: tuple[float, ...]) -> None:
    pools = [Pool("a", 0, (30, 30, 7)), Pool("b", 67, (200,)), Pool("c", 267, (5, 6))]
    second = (0.1, 0.3, 0.6)
    mixture = Mixture(pools, [Phase(0, weights), Phase(777, second)], epoch=256)
    total = 6 * 256
    found = np.concatenate([mixture.order(epoch, seed=5) for epoch in (3, 0, 4, 1, 5, 2)])
    found = found.reshape(6, 256)[[1, 3, 5, 0, 2, 4]].ravel()
    labels = np.searchsorted([67, 267], found, "right")
    assert labels.tolist() == _by_brute_force(mixture, total, seed=5)
    for source, (pool, first, then) in enumerate(zip(pools, weights, second, strict=True)):
        counted = np.cumsum(labels == source)
        place = np.arange(1, total + 1)
        wanted = np.where(place <= 777, first * place, first * 777 + then * (place - 777))
        assert np.abs(counted - wanted).max() <= 2 * len(pools)
        assert mixture.read(total, seed=5)[source] == counted[-1] and mixture.read(500, 5)[source] == counted[499]
        read = found[labels == source] - pool.first
        for begin in range(0, len(read), pool.size):
            one = read[begin : begin + pool.size]
            assert len(set(one.tolist())) == len(one), "all of a source before any of it comes again"
    assert mixture.order(0, seed=6).tolist() != found[:256].tolist()


@pytest.fixture(scope="module")
def inputs(apart_shards_dir: Path, tokenizer_dir: Path) -> dict[str, Path]:
    return {"shards": apart_shards_dir, "tokenizer": tokenizer_dir}


MIXTURE: dict[str, Any] = {
    "proportion": {"letters": 6, "numbers": 3, "sentences": 1},
    "phases": [{"begins": "60 %", "proportion": {"sentences": 3, "numbers": 1}}],
}
SETTINGS: dict[str, Any] = {
    "model": {"family": "llama", "layers": 2, "width": 32, "heads": 2, "positions": 64, "dropout": 0.1},
    "duration": "40 batches",
    "global_batch_tokens": LENGTH * BATCH,
    "optimizer": {"learning_rate": 1.0e-2},
    "evaluate_every": "1000 batches",
    "checkpoint_every": "5 batches",
    "sample_prompts": [],
    "mixture": MIXTURE,
}
SEEN = "STEMMA_TEST_SEEN"
KILLED_AT = 33  # in the second phase, between two checkpoints


def _record(rank: int) -> None:
    """Writes down the sequences of each batch that this rank trains on."""
    from training import pretrain as module
    from training.core.callbacks import Callback
    from training.data import pretrain_data

    class Recorder(Callback):
        def after_dataloader(self, state: Any) -> None:
            with open(f"{os.environ[SEEN]}.rank{rank}", "a") as file:
                file.write(f"{state.clock.batch} {' '.join(map(str, state.batch.pop('numbers').tolist()))}\n")

    class Dies(Callback):
        def batch_end(self, state: Any) -> None:
            if state.clock.batch == KILLED_AT:
                os.killpg(os.getpgrp(), signal.SIGKILL)

    def packed_loader(shards: Any, batch_size: int, batch: Any, *given: Any, **named: Any) -> Any:
        def numbered(packed: Any) -> Any:
            return {**batch(packed), "numbers": torch.tensor([number for _, number in packed.draws])}

        return loader(shards, batch_size, numbered, *given, **named)

    fit, loader, pretrain_data.packed_loader = module.fit, pretrain_data.packed_loader, packed_loader
    mortal = [Dies()] if os.environ.get("STEMMA_TEST_DIES") else []
    module.fit = lambda *given, **named: fit(*given[:-1], [Recorder(), *given[-1], *mortal], **named)


def _seen(name: Path, ranks: int) -> list[frozenset[int]]:
    """The sequences of each batch over all ranks; of one that was done twice, the second time."""
    found: dict[int, set[int]] = {}
    for rank in range(ranks):
        mine: dict[int, set[int]] = {}
        for line in Path(f"{name}.rank{rank}").read_text().splitlines():
            batch, *numbers = map(int, line.split())
            mine[batch] = set(numbers)
        for batch, numbers in mine.items():
            found.setdefault(batch, set()).update(numbers)
    return [frozenset(found[batch]) for batch in sorted(found)]


@pytest.fixture
def train(inputs: dict[str, Path], tmp_path: Path) -> Callable[..., list[frozenset[int]]]:
    """Pretrains into `tmp_path`/name, and gives the sequences of each batch."""

    def train(name: str, ranks: int, *, dies: bool = False) -> list[frozenset[int]]:
        environment = {SEEN: str(tmp_path / f"{name}.seen"), **({"STEMMA_TEST_DIES": "1"} if dies else {})}
        launch = {"loader_workers": 2 if name == "killed" else 0}
        pretrain_in_ranks(
            ranks, SETTINGS, inputs, tmp_path / name, launch=launch, prepare=_record, environment=environment
        )
        return _seen(tmp_path / f"{name}.seen", ranks)

    return train


def _told_alike(one: Path, other: Path) -> None:
    for file in ("trained_sequences.json", "aux/mixture.json"):
        assert (one / file).read_text() == (other / file).read_text()


@pytest.mark.long
def test_two_ranks_read_what_one_reads(
    train: Callable[..., list[frozenset[int]]], inputs: dict[str, Path], tmp_path: Path
) -> None:
    whole = train("whole", 1)
    assert len(whole) == 40 and {len(batch) for batch in whole} == {BATCH}
    assert train("two", 2) == whole
    _holds_what_was_read(inputs["shards"], tmp_path / "whole", whole)
    _told_alike(tmp_path / "two", tmp_path / "whole")


@pytest.mark.long
def test_a_training_killed_in_its_second_phase_ends_with_the_same_weights(
    train: Callable[..., list[frozenset[int]]], tmp_path: Path, weights: Weights
) -> None:
    """The risk: what was read of each source is counted from the last phase's beginning, not from the training's. That
    a training goes on under other weights is in `make test`.
    """
    whole = train("whole", 1)
    with pytest.raises(RankFailed):
        train("killed", 1, dies=True)
    assert train("killed", 1) == whole
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    _told_alike(tmp_path / "killed", tmp_path / "whole")


def _holds_what_was_read(shards: Path, model: Path, batches: list[frozenset[int]]) -> None:
    """Proportions by phase, and what the model says that it was trained on, against the sequences of the batches."""
    sources = json.loads((shards / "meta.json").read_text())["sources"]
    trained = TrainedSequences.read(model)
    assert trained is not None
    assert set(np.flatnonzero(trained.seen).tolist()) == frozenset.union(*batches)
    told = json.loads((model / "aux" / "mixture.json").read_text())["sources"]
    for name, first, then in (("letters", 0.6, 0.0), ("numbers", 0.3, 0.25), ("sentences", 0.1, 0.75)):
        place = sources[name]["train"]
        mine = range(place["first_sequence"], place["first_sequence"] + place["sequences"])
        counts = np.array([sum(number in mine for number in batch) for batch in batches])
        assert abs(counts[:24].mean() / BATCH - first) < 0.02 and abs(counts[24:].mean() / BATCH - then) < 0.03
        assert told[name]["sequences"] == place["sequences"]
        assert told[name]["epochs"] == pytest.approx(counts.sum() / place["sequences"], abs=0.02)


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"proportion": {"letters": 1, "nummers": 1, "sentences": 1}}, "unknown_source"),
        ({"proportion": {"letters": 1, "numbers": 1}}, "unnamed_source"),
        ({**MIXTURE, "phases": [{"begins": "50 batches", "repeat": {"letters": 1}}]}, "phase_order"),
        ({**MIXTURE, "phases": [{"begins": f"{b} epochs", "repeat": {"letters": 1}} for b in (9, 10)]}, "phase_order"),
    ],
)
def test_a_mixture_that_does_not_fit_is_named(
    changed: dict[str, Any], code: str, inputs: dict[str, Path], tmp_path: Path, run: Run
) -> None:
    with pytest.raises(StageError) as error:
        pretrain(PretrainConfig.model_validate(SETTINGS | {"mixture": changed}), inputs, tmp_path, run)
    assert code in {problem.code for problem in error.value.problems}


def test_shards_that_mix_sources_in_their_sequences_are_refused(
    mixed_shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, run: Run
) -> None:
    inputs = {"shards": mixed_shards_dir, "tokenizer": tokenizer_dir}
    with pytest.raises(StageError, match="by_source"):
        pretrain(PretrainConfig.model_validate(SETTINGS), inputs, tmp_path, run)


def test_a_training_goes_on_under_other_weights_where_the_first_one_stopped(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """With the new weights as a phase that begins there it is the long training to the bit; all else is refused."""

    def train(name: str, mixture: dict[str, Any], state: Path | None = None, batches: int = 24) -> Path:
        settings = SETTINGS | {"duration": f"{batches} batches", "schedule": {"decay": "constant"}, "mixture": mixture}
        given = inputs | ({"state": state} if state else {})
        continues = {"continues": {"step": "first"}} if state else {}
        (tmp_path / name).mkdir()
        run = Run(tmp_path / f"{name}.work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
        pretrain(PretrainConfig.model_validate(settings | continues), given, tmp_path / name, run)
        return tmp_path / name

    before = {"proportion": MIXTURE["proportion"]}
    phases = {**before, "phases": [{"begins": "10 batches", "choose": {"numbers": 10, "sentences": 30}}]}
    whole, first = train("whole", phases), train("first", before, batches=10)
    branch = train("branch", phases, first)
    one, other = weights(whole), weights(branch)
    assert all(torch.equal(one[name], other[name]) for name in one)
    for file in ("trained_sequences.json", "aux/mixture.json"):
        assert (whole / file).read_text() == (branch / file).read_text()
    with pytest.raises(StageError) as error:
        train("other", {"proportion": {"letters": 1, "numbers": 1, "sentences": 1}}, first)
    assert [problem.code for problem in error.value.problems] == ["other_mixture"]


def test_a_training_whose_batches_grew_goes_on_behind_its_first_epoch(
    inputs: dict[str, Path], tmp_path: Path, weights: Weights
) -> None:
    """The first epoch leaves out what fills no batch, here 6 sequences of 48, and the second phase begins behind it."""
    settings = SETTINGS | {
        "batch_warmup": {"first_tokens": 2 * LENGTH, "over_tokens": 30 * LENGTH},
        "schedule": {"decay": "constant"},
        "mixture": {
            "choose": {"letters": 30, "numbers": 15, "sentences": 5},
            "phases": [{"begins": "14 batches", "choose": {"numbers": 10, "sentences": 30}}],
        },
    }

    def train(name: str, batches: int, state: Path | None = None) -> Path:
        given = inputs | ({"state": state} if state else {})
        continues = {"continues": {"step": "first"}} if state else {}
        config = PretrainConfig.model_validate(settings | {"duration": f"{batches} batches"} | continues)
        (tmp_path / name).mkdir()
        run = Run(tmp_path / f"{name}.work", LaunchConfig(device="cpu", threads=1, precision="fp32"))
        pretrain(config, given, tmp_path / name, run)
        return tmp_path / name

    whole = train("whole", 24)
    _, second = json.loads((whole / "aux/mixture.json").read_text())["phases"]
    # 11 batches fill the first epoch, then each reads 8: the second phase begins with its batch, not 6 early.
    assert second["begins_at_sequence"] == 48 + 3 * 8
    branch = train("branch", 24, train("first", 18))
    one, other = weights(whole), weights(branch)
    assert all(torch.equal(one[name], other[name]) for name in one)
    for file in ("trained_sequences.json", "aux/mixture.json"):
        assert (whole / file).read_text() == (branch / file).read_text()


def test_text_of_another_tokenizer_than_the_model_s_is_not_read(
    mixed_shards_dir: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    tokenizer, run = AutoTokenizer.from_pretrained(tokenizer_dir), Run(tmp_path / "work")
    assert len(text_examples(mixed_shards_dir, 4, 64, 7, run, key="sft.text_sources", tokenizer=tokenizer)) == 4
    tokenizer.add_tokens(["<|more|>"])
    with pytest.raises(StageError) as caught:
        text_examples(mixed_shards_dir, 4, 64, 7, run, key="sft.text_sources", tokenizer=tokenizer)
    assert [(one.code, one.path) for one in caught.value.problems] == [("other_tokenizer", "sft.inputs.shards")]


def test_only_text_of_the_sources_that_are_named_is_read_again(
    mixed_shards_dir: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)

    def texts(*sources: str) -> list[str]:
        read = text_examples(
            mixed_shards_dir, 40, 64, 7, Run(tmp_path / "work"), sources=sources, key="sft.text_sources"
        )
        return [tokenizer.decode([*one.prompt, *one.response], skip_special_tokens=True) for one in read]

    assert any(text.split()[0].isdigit() for text in texts())
    letters = texts("letters")
    assert len(letters) == 40 and all(set(text) <= set("abcdefgh") for text in letters)
    assert not any(text in letters for text in texts("numbers", "sentences"))
    with pytest.raises(StageError) as caught:
        texts("letters", "nombers")
    (problem,) = caught.value.problems
    assert (problem.code, problem.path, problem.fix) == ("unknown_source", "sft.text_sources", "did you mean numbers?")
