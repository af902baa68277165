"""Masked, prefix and span-corruption pretraining: what is drawn, what is seen, that they learn, and what comes out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from flows.config.read import parse
from infra.errors import Cancelled, ConfigError, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.checkpoint.export import export
from training.config import ModelConfig, PretrainConfig
from training.core.hardware import Hardware
from training.model.documents import Packed, within_documents
from training.model.loss import IGNORE
from training.model.models import build, hf_config
from training.objectives import objective_of
from training.objectives.base import Objective
from training.objectives.span_corruption import noise_mask
from training.pretrain import pretrain
from training.train_modules.language_model import LanguageModel

CPU = Hardware(torch.device("cpu"), bf16=False)
LENGTH = 32
SMALL = {"layers": 2, "width": 48, "heads": 2, "positions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "masked": {"family": "bert", **SMALL},
    "prefix": {"family": "llama", **SMALL},
    "span_corruption": {"family": "t5", **SMALL},
}
AUTO: dict[str, Any] = {
    "masked": AutoModelForMaskedLM,
    "prefix": AutoModelForCausalLM,
    "span_corruption": AutoModelForSeq2SeqLM,
}


def _config(objective: str, **changes: Any) -> PretrainConfig:
    settings = {
        "objective": objective,
        "model": MODELS[objective],
        "duration": "120 batches",
        "global_batch_tokens": 16 * LENGTH,
        "optimizer": {"learning_rate": 6.0e-3},
        "schedule": {"warmup": "10 batches"},
        "evaluate_every": "60 batches",
    }
    return PretrainConfig.model_validate(settings | changes)


def _objective(name: str, tokenizer_dir: Path, **changes: Any) -> tuple[Objective, Any]:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    return objective_of(_config(name, **changes), tokenizer, LENGTH), tokenizer


def _network(name: str, objective: Objective, tokenizer: Any) -> Any:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    return build(hf_config(ModelConfig(**MODELS[name]), len(tokenizer), special), 1, auto=objective.auto)


def _embedded(network: Any) -> list[torch.Tensor]:
    """Fills with what the network embeds, gradients kept: of an encoder-decoder the encoder's first."""
    seen: list[torch.Tensor] = []

    def keep(_: Any, __: Any, embedded: torch.Tensor) -> None:
        embedded.retain_grad()
        seen.append(embedded)

    sides = [network.encoder, network.decoder] if network.config.is_encoder_decoder else [network]
    # One module serves both sides in transformers 4; in 5 each has its own, with the same weights.
    for module in {side.get_input_embeddings() for side in sides}:
        module.register_forward_hook(keep)
    return seen


def _packed(count: int, first: int = 0) -> Packed:
    """Sequences of three documents of text tokens; each sequence's text follows its number."""
    rows = [np.random.default_rng(number).integers(5, 261, LENGTH) for number in range(first, first + count)]
    starts = tuple(np.array([0, 9, 20]) for _ in rows)
    return Packed(np.stack(rows), starts, draws=tuple((0, number) for number in range(first, first + count)))


@pytest.mark.parametrize("name", MODELS)
def test_what_is_drawn_follows_from_the_number_of_the_sequence_alone(name: str, tokenizer_dir: Path) -> None:
    objective, _ = _objective(name, tokenizer_dir)
    torch.manual_seed(1)
    whole = objective.batch(_packed(6))
    np.random.seed(2)
    torch.manual_seed(2)
    rest = objective.batch(_packed(3, first=3))
    assert all(torch.equal(whole[key][3:], rest[key]) for key in whole)
    later = _packed(6)
    later = Packed(later.tokens, later.starts, draws=tuple((1, number) for _, number in later.draws))
    assert not torch.equal(whole["labels"], objective.batch(later)["labels"])


def test_masking_hides_fifteen_per_cent_eighty_ten_ten(tokenizer_dir: Path) -> None:
    objective, tokenizer = _objective("masked", tokenizer_dir)
    packed = _packed(2000)
    packed.tokens[:, 8] = tokenizer.eos_token_id
    batch = objective.batch(packed)
    inputs, labels, text = batch["input_ids"], batch["labels"], torch.from_numpy(packed.tokens)
    hidden = labels != IGNORE
    assert torch.equal(hidden.sum(1), torch.full((2000,), round(0.15 * 31)))
    assert torch.equal(labels[hidden], text[hidden]) and torch.equal(inputs[~hidden], text[~hidden])
    assert not hidden[:, 8].any()
    share = hidden.float().mean(0)[torch.arange(LENGTH) != 8]
    assert float((share - 5 / 31).abs().max()) < 0.04
    shown, was = inputs[hidden], text[hidden]
    masked, kept = shown == tokenizer.mask_token_id, shown == was
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.015)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.015)
    assert not set(shown[~masked].tolist()) & set(tokenizer.all_special_ids)


def test_spans_are_cut_out_and_written_so_that_both_sides_give_the_text(tokenizer_dir: Path) -> None:
    objective, tokenizer = _objective("span_corruption", tokenizer_dir, attention="sequence")
    packed = _packed(50)
    batch = objective.batch(packed)
    sentinels = tokenizer.convert_tokens_to_ids(["<extra_id_0>", "<extra_id_1>"])
    for inputs, before, targets, text in zip(
        batch["input_ids"].tolist(), batch["decoder_input_ids"].tolist(), batch["labels"].tolist(), packed.tokens,
        strict=True,
    ):  # fmt: skip
        assert before == [tokenizer.pad_token_id, *targets[:-1]]
        assert inputs[-1] == targets[-1] == tokenizer.eos_token_id
        assert [token for token in inputs if token in sentinels] == sentinels
        second = targets.index(sentinels[1])
        spans = {sentinels[0]: targets[1:second], sentinels[1]: targets[second + 1 : -1]}
        assert sum(map(len, spans.values())) == round(0.15 * LENGTH) and all(spans.values())
        assert [word for token in inputs[:-1] for word in spans.get(token, [token])] == text.tolist()


def test_spans_are_three_tokens_long_on_average_and_lie_everywhere() -> None:
    masks = np.stack([noise_mask(512, 77, 26, np.random.default_rng(number)) for number in range(300)])
    begins = masks[:, 1:] & ~masks[:, :-1]
    assert (masks.sum(1) == 77).all() and (begins.sum(1) == 26).all() and not masks[:, 0].any()
    lengths = Counter(len(run) for run in "".join("x" if cut else " " for cut in masks.ravel()).split())
    assert lengths[1] > lengths[3] > lengths[6] > 0
    # Spans are as likely in every part of a sequence.
    assert masks.reshape(300, 4, 128).mean((0, 2)) == pytest.approx(77 / 512, abs=0.02)


@pytest.mark.parametrize("name", ["masked", "prefix"])
def test_no_label_can_be_seen_from_its_place_nor_another_document(name: str, tokenizer_dir: Path) -> None:
    """Gradients of each label's loss by the input embeddings say what the model saw."""
    objective, tokenizer = _objective(name, tokenizer_dir)
    network = _network(name, objective, tokenizer)
    model = LanguageModel(network, CPU).eval()
    seen = _embedded(network)
    batch = objective.batch(_packed(1))
    documents, places, in_prefix = (batch[key][0] for key in ("documents", "position_ids", "seen_by_all"))
    for place in (batch["labels"][0] != IGNORE).nonzero()[:, 0].tolist():
        only = torch.full_like(batch["labels"], IGNORE)
        only[0, place] = batch["labels"][0, place]
        seen.clear()
        model.loss(model({**batch, "labels": only}), {**batch, "labels": only}).backward()
        assert seen[0].grad is not None
        touched = seen[0].grad[0].abs().sum(-1) > 0
        visible = documents == documents[place]
        if name == "prefix":
            visible &= places <= places[place]
            next_in_document = place + 1 < LENGTH and documents[place + 1] == documents[place]
            assert not (next_in_document and in_prefix[place + 1])
        assert torch.equal(touched, visible)


def test_a_decoder_s_label_sees_its_document_alone_on_both_sides(tokenizer_dir: Path) -> None:
    """Gradients of each label's loss by the embeddings of both sides, where spans cross the ends of documents too."""
    objective, tokenizer = _objective("span_corruption", tokenizer_dir)
    network = _network("span_corruption", objective, tokenizer)
    model = LanguageModel(network, CPU).eval()
    seen = _embedded(network)
    crossing = 0
    for number in range(12):
        batch = objective.batch(_packed(1, first=number))
        read, written, labels = (batch[key][0] for key in ("documents", "decoder_documents", "labels"))
        crossing += int((written < 0).sum())
        assert torch.equal(labels == IGNORE, written < 0)
        for place in (labels != IGNORE).nonzero()[:, 0].tolist():
            only = torch.full_like(batch["labels"], IGNORE)
            only[0, place] = labels[place]
            seen.clear()
            model.loss(model({**batch, "labels": only}), {**batch, "labels": only}).backward()
            in_encoder, in_decoder = (one.grad[0].abs().sum(-1) > 0 for one in seen if one.grad is not None)
            assert torch.equal(in_encoder, read == written[place])
            before = torch.arange(len(written)) <= place
            assert torch.equal(in_decoder, (written == written[place]) & before)
            if place and written[place - 1] != written[place]:
                assert batch["decoder_input_ids"][0, place] == tokenizer.pad_token_id
    assert crossing, "no span crossed the end of a document"


def test_a_prefix_sees_itself_in_both_directions_and_bears_no_loss(tokenizer_dir: Path) -> None:
    objective, _ = _objective("prefix", tokenizer_dir)
    batch = objective.batch(_packed(400))
    documents, places, prefix = (batch[name] for name in ("documents", "position_ids", "seen_by_all"))
    lengths = torch.stack([(prefix & (documents == number)).sum(1) for number in range(3)])
    sizes = torch.stack([(documents == number).sum(1) for number in range(3)])
    assert bool((lengths >= 1).all()) and bool((lengths <= sizes).all())
    assert torch.equal(prefix, places < lengths.T.gather(1, documents.long()))
    assert float((lengths / sizes).mean()) == pytest.approx(0.55, abs=0.03)
    # A label is the token after its place: it is told where that token is in no prefix of the same document.
    told = batch["labels"] != IGNORE
    begins_next = documents[:, 1:] != documents[:, :-1]
    assert torch.equal(told[:, :-1], ~prefix[:, 1:] | begins_next) and not told[:, -1].any()
    mask = within_documents(documents, prefix)[:, 0]
    inside = (documents[:, :, None] == documents[:, None, :]) & prefix[:, :, None] & prefix[:, None, :]
    assert bool(mask[inside].all())


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_gives_the_trainer_s_logits_in_transformers(
    name: str, tokenizer_dir: Path, tmp_path: Path
) -> None:
    # A t5 in transformers takes no documents: there the two are compared over whole sequences.
    attention = "sequence" if name == "span_corruption" else "document"
    objective, tokenizer = _objective(name, tokenizer_dir, attention=attention)
    network = _network(name, objective, tokenizer)
    batch = objective.batch(_packed(3))
    with torch.no_grad():
        ours = LanguageModel(network, CPU).eval()(batch)
        if name == "prefix":
            ours = network.get_output_embeddings()(ours)
    export(network, tokenizer_dir, tmp_path)
    theirs = AUTO[name].from_pretrained(tmp_path, local_files_only=True).eval()
    inputs = {key: batch[key] for key in ("input_ids", "decoder_input_ids", "position_ids") if key in batch}
    if "documents" in batch:
        mask = within_documents(batch["documents"], batch["seen_by_all"])
        inputs["attention_mask"] = mask
    with torch.no_grad():
        torch.testing.assert_close(ours, theirs(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_each_objective_learns_and_its_model_is_one_of_transformers(
    name: str, shards_dir: Path, tokenizer_dir: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    figures = pretrain(_config(name), inputs, tmp_path, run).figures
    assert figures["validation_loss_high"] < 0.6 * figures["unigram_loss"], figures
    assert journal.metric("validation/sample_loss")[-1] == pytest.approx(figures["validation_loss"])
    assert len(journal.metric("train/activation_norm")) == 120
    assert "bits_per_byte" not in figures and "bigram_loss" not in figures
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    theirs = AUTO[name].from_pretrained(tmp_path, local_files_only=True).eval()
    assert theirs.config.vocab_size == len(tokenizer)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [type(theirs).__name__]


@pytest.mark.parametrize("name", ["masked", "span_corruption"])
def test_a_run_that_was_stopped_sees_the_same_draws_and_ends_with_the_same_weights(
    name: str,
    shards_dir: Path,
    tokenizer_dir: Path,
    tmp_path: Path,
    journal: Any,
    weights: Callable[[Path], dict[str, torch.Tensor]],
) -> None:
    """Stopped in the second epoch, whose draws are others than those of the first; with a worker that reads ahead."""
    inputs = {"shards": shards_dir, "tokenizer": tokenizer_dir}
    sequences = json.loads((shards_dir / "meta.json").read_text())["train_tokens"] // LENGTH
    config = _config(
        name,
        model=MODELS[name] | {"dropout": 0.1},
        duration="9 batches",
        checkpoint_every="5 batches",
        # Four batches an epoch.
        global_batch_tokens=sequences // 4 * LENGTH,
    )
    launch = LaunchConfig(device="cpu", threads=1, precision="fp32")
    pretrain(config, inputs, tmp_path / "unbroken", Run(tmp_path / "unbroken.work", launch))

    def stopped() -> bool:
        return len(journal.metric("train/loss")) >= 6

    work = tmp_path / "broken.work"
    ahead = launch.model_copy(update={"loader_workers": 1})
    with pytest.raises(Cancelled):
        pretrain(config, inputs, tmp_path / "broken", Run(work, ahead, journal=journal, is_cancelled=stopped))
    pretrain(config, inputs, tmp_path / "broken", Run(work, ahead))
    ours, theirs = weights(tmp_path / "broken"), weights(tmp_path / "unbroken")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"objective": "masked"}, "expected a bert model for the objective masked"),
        ({"objective": "causal", "model": {"preset": "t5-nano"}}, "expected objective: span_corruption with a t5"),
        ({"objective": "masked", "model": {"preset": "bert-nano"}, "evaluate_tasks": ["minimal_pairs"]}, "causal"),
        ({"objective": "span_corruption", "model": {"preset": "t5-nano", "init": "plain"}}, "a t5 has its own"),
    ],
)
def test_what_does_not_fit_an_objective_is_refused(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        PretrainConfig.model_validate(settings)


def test_stages_that_need_a_causal_model_are_refused_after_another_objective() -> None:
    stages: dict[str, Any] = {"name": "x", "ingest": {}, "tokenizer": {}, "shard": {"sequence_length": 128}}
    later: dict[str, Any] = {"instructions": {}, "sft": {}, "benchmarks": {}, "safety": {}}
    masked = {"objective": "masked", "model": {"preset": "bert-nano"}}
    with pytest.raises(ConfigError) as caught:
        parse(stages | later | {"pretrain": masked})
    refused = [problem for problem in caught.value.problems if problem.code == "not_causal"]
    assert [problem.path for problem in refused] == ["sft", "benchmarks", "safety"]
    assert all("pretrain.objective: masked" in problem.message for problem in refused)
    parse(stages | {"pretrain": masked})
    parse(stages | later | {"pretrain": {"objective": "prefix"}})


def test_a_kernel_that_trains_on_gpus_alone_is_refused_on_a_cpu(
    shards_dir: Path, tokenizer_dir: Path, tmp_path: Path
) -> None:
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, attention="flex_attention"))
    with pytest.raises(StageError, match="torch can train with it only on a GPU"):
        pretrain(_config("prefix"), {"shards": shards_dir, "tokenizer": tokenizer_dir}, tmp_path / "out", run)
