"""Pretrains a model on packed shards, and measures it on those that it was not trained on.

python -m training.pretrain --config pretrain.yaml --input shards=DIR --input tokenizer=DIR --out DIR
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer
from evaluation.statistics.intervals import Interval, bootstrap_ratio
from infra.errors import StageError, stage_error
from infra.io.json import read_own_json
from infra.run import Result, Run
from infra.store.measurements import TRAINED
from training.checkpoint.export import export
from training.checkpoint.states import load_known
from training.config import PretrainConfig
from training.config.parallelism import SharedTraining, layout_problems
from training.core import ranks
from training.core.callbacks import Callback
from training.core.hardware import Hardware, prepare
from training.core.plan import Plan
from training.data.packed_batches import batches_of
from training.data.pretrain_data import PretrainData
from training.distributed.parallel import parallelize
from training.guard.finite import check_measured
from training.guard.stuck import Stuck
from training.model.attention import choose_attention
from training.model.balancing import ExpertLoad
from training.model.float8 import train_in_float8
from training.model.initial.bigrams import start_from_bigrams
from training.model.initial.induction import start_induction, unused_width
from training.model.models import build, flops_per_token, hf_config
from training.model.new_tokens import CHAT_TOKENS, name_untrained
from training.model.ngram import Bigram, Unigram
from training.objectives import objective_of
from training.objectives.base import Objective
from training.planner.measured import planned
from training.train_modules.language_model import LanguageModel
from training.trainer.compiling import NO_PLAIN_PATHS, plain_compiler_paths, wants_compile
from training.trainer.fit import fit
from training.trainer.schedules import LearningRateSchedule
from training.validation.evaluate import Side, Validation, bits_per_byte, sides
from training.validation.heldout import HeldOut, count_baselines, measure
from training.validation.in_loop import InLoopEvaluator, keep_samples

# Tokens whose frequencies a loss is compared with.
_SAMPLE_TOKENS = 1 << 20
# Tokens whose bigrams a model may start from.
_BIGRAM_TOKENS = 1 << 24


def pretrain(config: PretrainConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Train and measure: `train` and `measure_trained` in one, for callers that run this stage alone."""
    return train(config, inputs, out_dir, run).with_measurement(out_dir, run)


def train(config: PretrainConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Trains on `shards/train` and exports a Hugging Face folder.

    With an input `model` it starts from that model's weights, under a new schedule, instead of fresh ones.
    trained_sequences.json next to the weights lists the sequences that were trained on (corpus/tokens/trained.py).
    Figures: tokens, batches, tokens_per_s, parameters, tflops, mfu where the device's peak is known, corrections and
    skipped_batches of the guard (see aux/corrections.json), and of a mixture epochs_<source>, how often its text was
    read (see aux/mixture.json). Raises StageError where batch, positions or vocabulary do not fit the shards or the
    attention kernel the objective, and where the guard gives up.
    """
    # The data: shards are checked, and the training is planned. Settings that ranks cannot share raise before they
    # connect.
    ranks.share_examples(*run.launch.shares_of_examples)
    ranks.share_experts(run.launch.expert_parallel)
    data = PretrainData(config, inputs, run)
    hardware = prepare(run.launch, shares_examples=True, say=run.event)
    tokenizer = load_pretrained_tokenizer(inputs["tokenizer"])
    if data.train.location:
        data.check_tokenizer(tokenizer)

    # The model, fresh or that of another step, and the objective that it learns.
    known = load_known(inputs["model"], config, tokenizer, data.length) if "model" in inputs else None
    within = config.within_documents(known.config.model_type if known else "")
    objective = objective_of(config, tokenizer, data.length, within)
    _check_attention(config, hardware)
    vocab_size = _vocab_size(data, tokenizer, objective)
    network = known or _fresh(config, objective, tokenizer, vocab_size)
    _check_ranks(config, network, data, run)
    _choose_kernels(config, network, data.length, within, hardware, run)
    model = LanguageModel(network, hardware)
    parameters = sum(weight.numel() for weight in network.parameters())

    # The plan of the data, with FLOPs by PaLM's formula: of models in which every token passes every layer.
    is_dense = not (network.config.is_encoder_decoder or hasattr(network.config, "router_aux_loss_coef"))
    plan = replace(data.plan, flops_per_token=flops_per_token(network, data.length) if is_dense else 0.0)
    _compile(model, plan, data.length, hardware, run)
    causal = config.objective == "causal"

    with data:
        if known is None and config.model.embedding_init == "bigram":
            counted = data.training_numbers(_BIGRAM_TOKENS)
            read = batches_of(data.in_order(data.train), counted, 256)
            bigrams = Bigram((packed.tokens for packed in read), vocab_size, len(counted) * (data.length - 1))
            _start_from_bigrams(config, network, bigrams, hardware, run)

        # What is looked at during training: held-out loss, experts, a loss that does not fall, samples.
        every = plan.to_batches(config.evaluate_every)
        sources = sides(data.meta) if causal else []
        watched = data.validation_numbers(config.evaluate_tokens)
        validation = Validation(
            model,
            data.read(data.validation, watched, with_sources=bool(sources)),
            every,
            plan.batches,
            run,
            objective,
            bytes_per_token=data.bytes_per_token if causal else 0.0,
            sources=sources,
        )
        watches: list[Callback] = []
        if model.router:
            watches.append(ExpertLoad(model.expert_layers, model.experts_of_a_layer, run))
        if causal and config.guard.enabled:
            sample = data.read(data.train, data.training_numbers(_SAMPLE_TOKENS)).tokens
            watches.append(_stuck(config, sample, vocab_size, plan, run))
        watches.append(validation)
        if objective.continues_text:
            watches.append(InLoopEvaluator(network, tokenizer, config, every, hardware, run))

        # Train, and write the model with the record of the sequences that it has read.
        loader = data.loader(objective.batch, objective.count, hardware)
        estimate = planned(config, model, plan, run.launch, hardware.device, inputs)
        done = fit("pretrain", model, loader, plan, config, hardware, run, watches, inputs=inputs)
        if objective.extends_tokenizer and ranks.is_first():
            tokenizer.save_pretrained(out_dir)
        export(network, None if objective.extends_tokenizer else inputs["tokenizer"], out_dir)
        done.leave(out_dir, estimate)
        keep_samples(run.work_dir, out_dir)
        if ranks.is_first():
            data.write_trained(done, out_dir)

    figures = {
        **data.write_mixture(done, out_dir),
        "parameters": float(parameters),
        "batches": float(done.batches),
        **done.guard_figures(),
        "tokens": float(done.tokens),
        "tokens_per_s": done.tokens_per_s,
    }
    if plan.flops_per_token:
        figures["tflops"] = done.tokens_per_s * plan.flops_per_token / 1e12
    if done.mfu is not None:
        figures["mfu"] = done.mfu
    headline = f"{done.tokens:,} tokens in {done.batches:,} batches, {done.tokens_per_s:,.0f} tokens/s"

    def measure_now(measured_dir: Path, its_run: Run) -> Result:
        found = _measured(config, model, objective, vocab_size, _to_measure(config, inputs, its_run), its_run)
        return replace(found, headline=done.headline(found.headline))

    return Result(figures, done.headline(headline), measure_now)


def measure_trained(config: PretrainConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Measures the model `trained` on `shards/validation`.

    Figures: validation_loss (nats per token, with its bootstrap interval over sequences), validation_perplexity,
    unigram_loss of the same tokens, for the causal objective bigram_loss (both counted on at most
    `config.validation_tokens` training tokens) and bits_per_byte (of each source too), validation_tokens.
    """
    ranks.share_examples(*run.launch.shares_of_examples)
    ranks.share_experts(run.launch.expert_parallel)
    data = _to_measure(config, inputs, run)
    hardware = prepare(run.launch, shares_examples=True, say=run.event)
    tokenizer = load_pretrained_tokenizer(inputs["tokenizer"])
    within = config.within_documents(read_own_json(inputs[TRAINED] / "config.json")["model_type"])
    objective = objective_of(config, tokenizer, data.length, within)
    network = load_pretrained_model(objective.auto, inputs[TRAINED], dtype=torch.float32)
    _check_attention(config, hardware)
    _choose_kernels(config, network, data.length, within, hardware, run)
    model = LanguageModel(network, hardware)
    parallelize(model, run.launch, hardware)
    return _measured(config, model, objective, _vocab_size(data, tokenizer, objective), data, run)


def _to_measure(config: PretrainConfig, inputs: Mapping[str, Path], run: Run) -> PretrainData:
    """The data that a training from the beginning reads: the baselines count the first of it, whatever state this one
    went on from."""
    return PretrainData(config, {name: folder for name, folder in inputs.items() if name != "state"}, run)


def _measured(
    config: PretrainConfig, model: LanguageModel, objective: Objective, vocab_size: int, data: PretrainData, run: Run
) -> Result:
    """The figures of `measure_trained`. Every rank must call."""
    causal = config.objective == "causal"
    sources = sides(data.meta) if causal else []
    with data:
        in_order, heldout = (data.in_order(split) for split in (data.train, data.validation))
        counted = data.training_numbers(config.validation_tokens)
        baselines = count_baselines(in_order, counted, vocab_size, objective)
        numbers = data.validation_numbers(config.validation_tokens)
        found = measure(model, heldout, numbers, objective, baselines, run, sources)
    loss = bootstrap_ratio(found.losses, found.labels, config.seed)
    figures = {
        **_loss_figures(loss, found, sources, data.bytes_per_token if causal else 0.0),
        "validation_tokens": float(len(numbers) * data.length),
    }
    check_measured("pretrain", figures)
    beside = ", ".join(f"{name} {value:.3f}" for name, value in sorted(found.baselines.items()))
    return Result(figures, f"validation loss {loss.value:.3f} ({beside})")


def _vocab_size(data: PretrainData, tokenizer: Any, objective: Objective) -> int:
    return max(data.vocab_size, len(tokenizer)) if objective.extends_tokenizer else data.vocab_size


def _check_attention(config: PretrainConfig, hardware: Hardware) -> None:
    """Raises StageError `no_such_attention` where the chosen kernel has no mask as the objective needs one."""
    masked = ("auto", "eager", "sdpa", *(["flex_attention"] if config.objective == "prefix" else []))
    if config.objective != "causal" and hardware.attention not in masked:
        raise stage_error(
            "no_such_attention",
            "launch.attention",
            f"expected one of {', '.join(masked)} with objective {config.objective}: {hardware.attention} has no such "
            "mask",
        )


def _check_ranks(config: PretrainConfig, network: PreTrainedModel, data: PretrainData, run: Run) -> None:
    """Raises StageError where ranks cannot share the model's layers, experts or sequences as `launch` has it."""
    shared = SharedTraining(
        config.objective,
        model_type=network.config.model_type,
        values=network.config.to_dict(),
        length=data.length,
        sequences=data.plan.smallest_batch // ranks.data_ranks(),
        layers=network.config.num_hidden_layers,
    )
    if problems := list(layout_problems(run.launch, shared)):
        raise StageError(*problems)


def _choose_kernels(
    config: PretrainConfig, network: PreTrainedModel, length: int, within: bool, hardware: Hardware, run: Run
) -> None:
    """Attention's, and products in FP8 where `launch` has them. within: whether attention stays within documents."""
    choose_attention(
        network,
        hardware,
        length,
        causal=config.objective == "causal",
        documents=within or config.objective == "prefix",
    )
    if run.launch.precision == "fp8":
        layers = train_in_float8(network, hardware.device)
        emulated = ", emulated: slower than without, for trying a config" if hardware.device.type == "cpu" else ""
        run.event("float8", f"{layers} linear layers train in FP8{emulated}")


def _compile(model: LanguageModel, plan: Plan, length: int, hardware: Hardware, run: Run) -> None:
    """Has the model compiled where that pays and the compiler can do it."""
    flops = plan.flops_per_token * plan.examples(plan.batches) * length
    if not wants_compile(run.launch, hardware, flops):
        return
    if plain_compiler_paths():
        run.event("compiling", "compiling the model: the first batches may take some minutes")
        model.compiles_blocks = True
    else:
        run.event("not_compiled", NO_PLAIN_PATHS)


def _start_from_bigrams(
    config: PretrainConfig, network: PreTrainedModel, bigrams: Bigram, hardware: Hardware, run: Run
) -> None:
    """Fits fresh weights to the text's bigrams, and initialises heads as induction heads where the config asks for
    it."""
    induction = config.model.attention_init == "induction"
    unused = unused_width(network) if induction else 0
    alone = start_from_bigrams(network, bigrams, hardware, config.seed, unused)
    if induction:
        start_induction(network, config.seed)
    run.event("started_from_bigrams", f"initialised by bigrams, the model starts at a loss of {alone:.3f}")


def _stuck(config: PretrainConfig, sample: NDArray[Any], vocab_size: int, plan: Plan, run: Run) -> Stuck:
    """Return the check for a loss no lower than that of the tokens' frequencies. sample: training tokens (N, T)."""
    warmup = LearningRateSchedule.of(
        config.schedule, plan.batches, plan.batch_tokens, plan.epoch_batches, plan.rampup
    ).warmup
    return Stuck(float(Unigram([sample], vocab_size).losses(sample[:, 1:]).mean()), warmup, run)


def _loss_figures(loss: Interval, found: HeldOut, sources: Sequence[Side], bytes_per_token: float) -> dict[str, float]:
    """bytes_per_token: 0 of objectives whose loss is not of every token, which have no bits per byte."""
    return {
        **loss.as_figures("validation_loss"),
        "validation_perplexity": math.exp(min(loss.value, 700.0)),
        **({"bits_per_byte": bits_per_byte(loss.value, bytes_per_token)} if bytes_per_token else {}),
        **{
            f"bits_per_byte_{one.name}": bits_per_byte(found.by_source[one.name], one.bytes_per_token)
            for one in sources
            if one.name in found.by_source
        },
        **{f"{name}_loss": value for name, value in found.baselines.items()},
    }


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


if __name__ == "__main__":
    from infra.alone import main

    main(pretrain, PretrainConfig)
