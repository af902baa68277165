"""Pretrains a model on packed shards.

python -m training.pretrain --config pretrain.yaml --input shards=DIR --input tokenizer=DIR --out DIR
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from corpus.passes import write_json
from corpus.pretrained import load_pretrained_tokenizer
from corpus.remote import location_of
from corpus.tokens.chat_template import END_OF_TEXT
from corpus.trained import TrainedSequences
from evaluation.statistics import bootstrap_ratio
from infra.errors import StageError, stage_error
from infra.run import Result, Run
from infra.store.states import kept_states
from training import ranks
from training.attention import choose_attention
from training.balancing import ExpertLoad
from training.batch_size import BatchSizeRampup
from training.bigram_start import start_from_bigrams
from training.callbacks import Callback
from training.compiling import NO_PLAIN_PATHS, by_block, plain_compiler_paths, wants_compile
from training.config import PretrainConfig, batches
from training.evaluate import Validation, bits_per_byte, sides
from training.export import export
from training.families import expert_ranks_problem, sequences_problem
from training.fit import Fit, Plan, fit
from training.float8 import train_in_float8
from training.guard.stuck import Stuck
from training.hardware import prepare
from training.heldout import count_baselines, measure
from training.in_loop import InLoopEvaluator, keep_samples
from training.induction_start import start_induction, unused_width
from training.loaders import (
    PackedShards,
    count_sequences,
    open_in_order,
    packed_batches,
    packed_loader,
    read_packed,
    spread,
    trained_sequences,
    unpacked_bytes,
)
from training.mixed_shards import (
    MixedShards,
    epoch_sequences,
    mixed_fingerprint,
    mixed_sources,
    phases_of,
    repeated_often,
    told,
)
from training.mixture import Mixture, Pool
from training.models import LanguageModel, build, flops_per_token, hf_config
from training.new_tokens import CHAT_TOKENS, name_untrained
from training.ngram import Bigram, Unigram
from training.objectives import objective_of
from training.objectives.base import Objective
from training.pipeline_cut import pipeline_problem
from training.schedules import Schedule
from training.scratch import node_scratch
from training.shared_memory import own_shared_memory
from training.states import beginning, load_known, place_in

# Tokens whose frequencies a loss is held against.
_SAMPLE_TOKENS = 1 << 20
# Tokens whose bigrams a model may start from.
_BIGRAM_TOKENS = 1 << 24


def pretrain(config: PretrainConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Trains on `shards/train`, exports a Hugging Face folder, then measures on `shards/validation`.

    With an input `model` it goes on from the weights of that one, under a schedule of its own, instead of fresh ones.
    trained_sequences.json beside the weights says which sequences were trained on (corpus/trained.py).
    Figures: validation_loss (nats a token, with its bootstrap interval over sequences), validation_perplexity,
    unigram_loss of the same tokens, for the causal objective bigram_loss (both counted on at most
    `config.validation_tokens` training tokens) and bits_per_byte (of each source too), validation_tokens,
    tokens, batches, tokens_per_s, parameters, tflops, mfu where the device's peak is known, corrections and
    skipped_batches of the guard (see aux/corrections.json), and of a mixture epochs_<source>, how often its text was
    read (see aux/mixture.json). Raises StageError where batch, positions or vocabulary do
    not fit the shards or the attention kernel the objective, and where the guard gives up.
    """
    shards, tokenizer_dir = inputs["shards"], inputs["tokenizer"]
    meta = _meta(shards)
    length, vocab_size = int(meta["sequence_length"]), int(meta["vocab_size"])
    if problems := config.problems(length, vocab_size, continues="model" in inputs):
        raise StageError(*problems)
    batch_size = config.global_batch_tokens // length
    pools = mixed_sources(config.mixture, meta, shards / "train") if config.mixture else []
    train_sequences = count_sequences(shards / "train")
    if config.mixture:
        train_sequences = epoch_sequences(config.mixture, pools, batch_size)
    if train_sequences < batch_size:
        raise stage_error(
            "too_few_sequences",
            "pretrain.global_batch_tokens",
            f"expected at least one batch of {batch_size} sequences, the training split has {train_sequences}",
            "lower global_batch_tokens or give more text",
        )
    epoch_batches = train_sequences // batch_size
    scale: dict[str, Any] = {"batch_tokens": config.global_batch_tokens, "epoch_batches": epoch_batches}
    # What ranks cannot share is refused before they meet.
    ranks.share_examples(*run.launch.shares_of_examples)
    ranks.share_experts(run.launch.expert_parallel)
    rampup = _rampup(config, length, batch_size, epoch_batches)
    hardware = prepare(run.launch, shares_examples=True)
    tokenizer = load_pretrained_tokenizer(tokenizer_dir)
    if location_of(shards / "train"):
        _check_tokenizer(tokenizer, meta)
    known = load_known(inputs["model"], config, tokenizer, length) if "model" in inputs else None
    within = config.within_documents(known.config.model_type if known else "")
    objective = objective_of(config, tokenizer, length, within)
    masked = ("auto", "eager", "sdpa", *(["flex_attention"] if config.objective == "prefix" else []))
    if config.objective != "causal" and hardware.attention not in masked:
        raise stage_error(
            "no_such_attention",
            "launch.attention",
            f"expected one of {', '.join(masked)} with objective {config.objective}: {hardware.attention} has no such "
            "mask",
        )
    if objective.extends_tokenizer:
        vocab_size = max(vocab_size, len(tokenizer))
    network = known or _fresh(config, objective, tokenizer, vocab_size)
    if wrong := sequences_problem(
        run.launch.context_parallel,
        network.config.model_type,
        config.objective,
        length,
        network.config.to_dict(),
        run.launch.tensor_parallel,
    ):
        raise StageError(wrong)
    if wrong := expert_ranks_problem(run.launch.expert_parallel, network.config.model_type, network.config.to_dict()):
        raise StageError(wrong)
    if wrong := pipeline_problem(
        run.launch.pipeline_parallel,
        run.launch.pipeline_pieces,
        model_type=network.config.model_type,
        layers=network.config.num_hidden_layers,
        sequences=(rampup.first if rampup else batch_size) // ranks.data_ranks(),
        microbatch=run.launch.microbatch if isinstance(run.launch.microbatch, int) else None,
    ):
        raise StageError(wrong)
    choose_attention(
        network,
        hardware,
        length,
        causal=config.objective == "causal",
        documents=within or config.objective == "prefix",
    )
    if run.launch.precision == "fp8":
        layers_in_float8 = train_in_float8(network, hardware.device)
        emulated = ", emulated: slower than without, for trying a config" if hardware.device.type == "cpu" else ""
        run.event("float8", f"{layers_in_float8} linear layers train in FP8{emulated}")
    model = LanguageModel(network, hardware)
    # PaLM's formula is of models in which every token passes every layer.
    whole = not (network.config.is_encoder_decoder or hasattr(network.config, "router_aux_loss_coef"))
    flops = flops_per_token(network, length) if whole else 0.0
    parameters = sum(weight.numel() for weight in network.parameters())
    plan = Plan(
        batches(config.duration, **scale, rampup=rampup),
        batch_size,
        config.global_batch_tokens,
        epoch_batches,
        flops_per_token=flops,
        rampup=rampup,
    )
    mixture = _mixture(config, pools, plan, inputs, shards / "train", scale) if config.mixture else None
    layers = network.config.num_hidden_layers
    if wants_compile(run.launch, hardware, layers, flops * plan.examples(plan.batches) * length):
        if plain_compiler_paths():
            run.event("compiling", "compiling the model: the first batches take up to some minutes")
            model.compile_training(by_block=by_block(run.launch))
        else:
            run.event("not_compiled", NO_PLAIN_PATHS)
    every = batches(config.evaluate_every, **scale)
    causal = config.objective == "causal"
    bytes_per_token = float(meta["validation_bytes"]) / float(meta["validation_tokens"])

    limit = run.launch.shard_cache_gb
    with node_scratch(run, unpacked_bytes(shards, limit)) as cache, own_shared_memory(run.work_dir):
        if known is None and config.model.embedding_init == "bigram":
            counted = _first(meta, shards, mixture, config.seed, max(1, _BIGRAM_TOKENS // length))
            read = packed_batches(open_in_order(shards / "train", cache, limit), counted, 256)
            bigrams = Bigram(
                (packed.tokens for packed in read),
                vocab_size,
                len(counted) * (length - 1),
            )
            induction = config.model.attention_init == "induction"
            unused = unused_width(network) if induction else 0
            alone = start_from_bigrams(network, bigrams, hardware, config.seed, unused)
            if induction:
                start_induction(network, config.seed)
            run.event("started_from_bigrams", f"by bigrams alone the model starts at a loss of {alone:.3f}")
        sources = sides(meta) if causal else []
        held = count_sequences(shards / "validation")
        looked_at = spread(held, max(1, config.evaluate_tokens // length))
        watched = read_packed(shards / "validation", cache, looked_at, with_sources=bool(sources), limit_gb=limit)
        at_once = rampup.first if rampup else None
        watches: list[Callback] = [ExpertLoad(run)] if model.router else []
        if causal and config.guard.enabled:
            first = _first(meta, shards, mixture, config.seed, max(1, _SAMPLE_TOKENS // length))
            sample = read_packed(shards / "train", cache, first, limit_gb=limit).tokens
            warmup = Schedule.of(config.schedule, plan.batches, plan.batch_tokens, epoch_batches, rampup).warmup
            usual = float(Unigram([sample], vocab_size).losses(sample[:, 1:]).mean())
            watches.append(Stuck(usual, warmup, run))
        split = shards / "train"
        options: dict[str, Any] = {"read_at_once": at_once, "limit_gb": limit}
        train = (
            MixedShards(split, cache, batch_size, config.seed, mixture, **options)
            if mixture
            else PackedShards(
                split, cache, batch_size, config.seed, shuffle=True, shuffle_block=config.shuffle_block, **options
            )
        )
        done = fit(
            "pretrain",
            model,
            packed_loader(
                train,
                batch_size,
                objective.batch,
                objective.count,
                workers=hardware.loader_workers(run.launch),
                pin_memory=hardware.device.type == "cuda",
                rampup=rampup,
            ),
            plan,
            config,
            hardware,
            run,
            [
                *watches,
                Validation(
                    model,
                    watched,
                    every,
                    plan.batches,
                    run,
                    objective,
                    bytes_per_token=bytes_per_token if causal else 0.0,
                    sources=sources,
                ),
                *(
                    [InLoopEvaluator(network, tokenizer, config, every, hardware, run)]
                    if objective.continues_text
                    else []
                ),
            ],
            inputs=inputs,
        )
        # The model first: whatever happens while it is measured, it is there.
        if objective.extends_tokenizer and ranks.is_first():
            tokenizer.save_pretrained(out_dir)
        export(network, None if objective.extends_tokenizer else tokenizer_dir, out_dir)
        done.leave(out_dir)
        keep_samples(run.work_dir, out_dir)
        if ranks.is_first():
            _write_trained(train, done, batch_size, rampup, inputs, out_dir)
        limit = max(1, config.validation_tokens // length)
        training, validation = (open_in_order(shards / side, cache, limit) for side in ("train", "validation"))
        counted = _first(meta, shards, mixture, config.seed, limit)
        baselines = count_baselines(training, counted, vocab_size, objective)
        numbers = spread(held, limit)
        found = measure(model, validation, numbers, objective, baselines, run, sources)

    loss = bootstrap_ratio(found.losses, found.labels, config.seed)
    figures = {
        **loss.as_figures("validation_loss"),
        "validation_perplexity": math.exp(min(loss.value, 700.0)),
        **({"bits_per_byte": bits_per_byte(loss.value, bytes_per_token)} if causal else {}),
        **{
            f"bits_per_byte_{one.name}": bits_per_byte(found.by_source[one.name], one.bytes_per_token)
            for one in sources
            if one.name in found.by_source
        },
        **{f"{name}_loss": value for name, value in found.baselines.items()},
        **(_mixed(train, plan, done, inputs, out_dir, run) if isinstance(train, MixedShards) else {}),
        "validation_tokens": float(len(numbers) * length),
        "parameters": float(parameters),
        "batches": float(done.batches),
        **done.guard_figures(),
        "tokens": float(done.tokens),
        "tokens_per_s": done.tokens_per_s,
    }
    if flops:
        figures["tflops"] = done.tokens_per_s * flops / 1e12
    if done.mfu is not None:
        figures["mfu"] = done.mfu
    beside = ", ".join(f"{name} {value:.3f}" for name, value in sorted(found.baselines.items()))
    return Result(figures, done.headline(f"validation loss {loss.value:.3f} ({beside})"))


def _check_tokenizer(tokenizer: Any, meta: Mapping[str, Any]) -> None:
    """Raises StageError `other_tokenizer` for shards from elsewhere that this tokenizer did not make."""
    ours = max(tokenizer.get_vocab().values()) + 1, tokenizer.get_vocab().get(END_OF_TEXT)
    theirs = meta["vocab_size"], meta["end_of_text_id"]
    if ours != theirs:
        raise stage_error(
            "other_tokenizer",
            "pretrain.inputs.tokenizer",
            f"expected the tokenizer of the shards: {theirs[0]:,} ids with {END_OF_TEXT} at {theirs[1]}, this one has "
            f"{ours[0]:,} with it at {ours[1]}",
            "name the tokenizer that the shards were made with",
        )


def _mixture(
    config: PretrainConfig,
    pools: Sequence[Pool],
    plan: Plan,
    inputs: Mapping[str, Path],
    split: Path,
    scale: Mapping[str, Any],
) -> Mixture:
    """The mixture of a training, whose phases begin after batches that count from the beginning of the first training.

    Raises StageError `phase_order`.
    """
    assert config.mixture is not None
    epoch = plan.epoch_batches * plan.batch_size
    before = 0
    if begin := beginning(config, inputs, plan.batches):
        epochs, read = place_in(begin, mixed_fingerprint(split))
        before = plan.examples(begin.batch) - epochs * epoch - read
    phases = phases_of(
        config.mixture,
        pools,
        lambda begins: batches(begins, **scale, whole=plan.batches, rampup=plan.rampup),
        plan.batches,
        lambda batch: plan.examples(batch) - before,
    )
    return Mixture(pools, phases, epoch, config.shuffle_block)


def _first(
    meta: Mapping[str, Any], shards: Path, mixture: Mixture | None, seed: int, count: int
) -> Sequence[int] | NDArray[np.int64]:
    """The numbers of at most `count` training sequences that stand for what is read: those that a mixture reads first,
    else the first of the split, which lies in the order of the documents' hashes, or some of each source."""
    if mixture:
        return np.unique(mixture.order(0, seed)[:count])
    sequences = count_sequences(shards / "train")
    if any("first_sequence" in source["train"] for source in meta.get("sources", {}).values()):
        return spread(sequences, count)
    return range(min(sequences, count))


def _mixed(
    train: MixedShards, plan: Plan, done: Fit, inputs: Mapping[str, Path], out_dir: Path, run: Run
) -> dict[str, float]:
    """Tells what was read of each source, in aux/mixture.json and as figures."""
    epochs, read = place_in(done.begin, train.fingerprint) if done.begin else (0, 0)
    place = epochs * train.mixture.epoch + read
    place += plan.examples(done.batches) - plan.examples(done.begin.batch if done.begin else 0)
    found = told(train.mixture, place, train.shuffle_seed)
    for said in repeated_often(found):
        run.event("repeated_often", said)
    if ranks.is_first():
        write_json(out_dir / "aux" / "mixture.json", found)
    return {f"epochs_{name}": one["epochs"] for name, one in found["sources"].items()}


def _write_trained(
    train: PackedShards,
    done: Fit,
    batch_size: int,
    rampup: BatchSizeRampup | None,
    inputs: Mapping[str, Path],
    out_dir: Path,
) -> None:
    """Leaves with the model, and with each of its kept states, which sequences it was trained on until then."""
    skipped = {batch for one in done.corrections for batch in range(one.skip_first, one.skip_end)}
    before = TrainedSequences.read(inputs["model"]) if "model" in inputs else None
    first, place = 0, (0, 0)
    if begin := done.begin:
        # Of states that were kept before this was written down, what is known is what their whole training read.
        before = TrainedSequences.read(begin.folder) or TrainedSequences.read(inputs["state"])
        first, place = begin.batch, place_in(begin, train.fingerprint)
    for state in [*kept_states(out_dir), None]:
        batch = state.batch if state else done.batches
        seen = trained_sequences(train, batch, batch_size, rampup, skipped, first, place)
        before = TrainedSequences(train.text_fingerprint, seen).after(before)
        before.write(state.folder if state else out_dir)
        first, place = batch, place_in(state, train.fingerprint) if state else place


def _fresh(config: PretrainConfig, objective: Objective, tokenizer: Any, vocab_size: int) -> PreTrainedModel:
    """The model that the config describes, with fresh weights."""
    rows = math.ceil(vocab_size / config.model.vocab_multiple) * config.model.vocab_multiple
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    network = build(
        hf_config(config.model, rows, special),
        config.seed,
        config.model.init,
        config.model.init_std,
        objective.auto,
        zero_residual=config.model.residual_init == "zero",
        base_width=config.optimizer.mup_base_width,
    )
    chat_ids = [number for token in CHAT_TOKENS if (number := tokenizer.get_vocab().get(token)) is not None]
    name_untrained(network, chat_ids, vocab_size)
    return network


def _rampup(config: PretrainConfig, length: int, batch_size: int, epoch_batches: int) -> BatchSizeRampup | None:
    """The batch-size warm-up in sequences. Raises StageError where it is longer than an epoch, or ranks
    cannot share the first batch."""
    if config.batch_warmup is None:
        return None
    over = math.ceil(config.batch_warmup.over_tokens / length)
    if over > epoch_batches * batch_size:
        raise stage_error(
            "not_within_an_epoch",
            "pretrain.batch_warmup.over_tokens",
            f"expected no more than the {epoch_batches * batch_size * length:,} tokens of an epoch, not "
            f"{config.batch_warmup.over_tokens:,}",
            "shorten it, or give more text",
        )
    first = config.batch_warmup.first_tokens // length
    if first % ranks.data_ranks():
        raise stage_error(
            "not_divisible",
            "pretrain.batch_warmup.first_tokens",
            f"expected {ranks.data_ranks()} ranks to share the {first} sequences of the first batch",
            f"make it a multiple of {length * ranks.data_ranks():,} tokens, or start fewer processes",
        )
    return BatchSizeRampup(first, batch_size, over, epoch_batches * batch_size)


def _meta(shards: Path) -> dict[str, Any]:
    path = shards / "meta.json"
    if not path.exists():
        raise stage_error(
            "no_shards", str(shards), "expected the shard stage's folder with meta.json", "run the shard stage"
        )
    meta: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))
    return meta


if __name__ == "__main__":
    from infra.alone import main

    main(pretrain, PretrainConfig)
