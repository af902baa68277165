"""Averages the weights of several models, or of several checkpoints of one training.

python -m training.average --config average.yaml --input model=DIR [--input other=DIR …] [--input shards=DIR] --out DIR
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from corpus.model_folders.pretrained import load_pretrained_tokenizer
from evaluation.benchmarks import benchmarks
from infra.errors import Problem, StageError, stage_error
from infra.run import Result, Run
from infra.store.states import KeptState, kept_states
from training.chat.base import Chat
from training.checkpoint.export import export
from training.checkpoint.snapshot import WEIGHTS, Snapshot, TensorPart
from training.config.averaging import AverageConfig
from training.core.hardware import Hardware, prepare
from training.core.measuring import measuring
from training.data.open_shards import OpenShards, spread
from training.model.attention import choose_attention
from training.model.documents import Packed
from training.model.loss import IGNORE
from training.model.models import load
from training.objectives.causal import next_token_batch
from training.train_modules.language_model import LanguageModel

Weights = dict[str, Tensor]
_BATCH = 16
_NO_MODELS = ("shards",)


@dataclass(frozen=True)
class Member:
    """One model or checkpoint that may be part of the mean. read: returns its weights by the names of the model."""

    name: str
    read: Callable[[], Weights]


def average(config: AverageConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write the mean of the members as a model folder, with the tokenizer of `model`.

    Figures: members, averaged (members in the mean); with the input `shards` validation_loss_<member>,
    validation_loss_best and validation_loss (of the mean, nats per token of the same text), or with a benchmark
    score_<member>, score_best and score. Raises StageError `nothing_to_average` for one member, `other_shapes` and
    `other_tokenizer` for a model that has others than `model`, `no_measure` where greedy has nothing to choose by.
    """
    hardware = prepare(run.launch, say=run.event)
    network = load(inputs["model"])
    members = _states(config, inputs["model"], network) if config.states else _models(inputs, network)
    if len(members) < 2:
        message = "expected at least two models, but the only input is model"
        fix = "add more models as inputs under any names, or set states to average checkpoints of one run"
        raise stage_error("nothing_to_average", "average.inputs", message, fix)
    measure = _measure(config, inputs, network, hardware, run)
    if config.method == "greedy" and measure is None:
        message = "expected a criterion for greedy"
        fix = "add the input shards, or a benchmark with the figure to choose by"
        raise stage_error("no_measure", "average.method", message, fix)

    # Each member alone: the mean is compared with the best of them.
    measured: dict[str, float] = {}
    for number, member in enumerate(members if measure else ()):
        assert measure is not None
        run.progress(number, len(members), "models", "measuring")
        measured[member.name] = measure(member.read())
        run.event("member", f"{member.name}: {abs(measured[member.name]):.4f}")
    value: float | None
    if config.method == "greedy" and measure is not None:
        mean, kept, value = _soup(members, measured, measure, run)
    else:
        shares = [config.decay ** (len(members) - 1 - number) for number in range(len(members))]
        mean, kept = _mean(members, shares if config.method == "ema" else [1.0] * len(members)), len(members)
        value = measure(mean) if measure else None

    network.load_state_dict(mean)
    chat = Chat.load(inputs["model"]) if _has_chat(inputs["model"]) else None
    export(network, inputs["model"], out_dir, chat.stops if chat else ())
    figures = {"members": float(len(members)), "averaged": float(kept)}
    headline = f"{config.method} mean of {kept} of {len(members)} {'states' if config.states else 'models'}"
    if value is not None:
        sign, key = (1, "score") if config.figure else (-1, "validation_loss")
        best = max(measured.values())
        figures |= {f"{key}_{name}": sign * each for name, each in measured.items()}
        figures |= {f"{key}_best": sign * best, key: sign * value}
        word = config.figure or "validation loss"
        headline += f", {word} {sign * value:.4f} against {sign * best:.4f} of the best one"
    return Result(figures, headline)


def _has_chat(folder: Path) -> bool:
    return bool(load_pretrained_tokenizer(folder).chat_template)


def _models(inputs: Mapping[str, Path], network: PreTrainedModel) -> list[Member]:
    """The input models, `model` first, after a check of their tokenizers and shapes."""
    names = ["model", *sorted(name for name in inputs if name not in ("model", *_NO_MODELS))]
    vocabulary = load_pretrained_tokenizer(inputs["model"]).get_vocab()
    shapes = {name: tuple(weight.shape) for name, weight in network.state_dict().items()}
    problems = []
    for name in names[1:]:
        entries = len(load_pretrained_tokenizer(inputs[name]).get_vocab().items() ^ vocabulary.items())
        if entries:
            message = f"expected the tokenizer of the input model; {entries:,} entries differ"
            fix = "average models with the same tokenizer: embedding rows of different tokens cannot be averaged"
            problems.append(Problem("other_tokenizer", f"average.inputs.{name}", message, fix))
        other = {key: tuple(weight.shape) for key, weight in load(inputs[name]).state_dict().items()}
        if other != shapes:
            differing = sorted(key for key in {*shapes, *other} if shapes.get(key) != other.get(key))
            first = differing[0]
            message = (
                f"expected the weights of the input model; {len(differing):,} differ, such as {first}: "
                f"{other.get(first, 'none')} instead of {shapes.get(first, 'none')}"
            )
            problems.append(
                Problem("other_shapes", f"average.inputs.{name}", message, "average models of one architecture")
            )
    if problems:
        raise StageError(*problems)

    def reader(folder: Path) -> Callable[[], Weights]:
        return lambda: {name: weight.detach() for name, weight in load(folder).state_dict().items()}

    return [Member(name, reader(inputs[name])) for name in names]


def _states(config: AverageConfig, folder: Path, network: PreTrainedModel) -> list[Member]:
    """The last kept states of the training of a model, the earliest first."""
    assert config.states is not None
    states = [state for state in kept_states(folder) if state.is_there]
    if len(states) < config.states:
        kept = ", ".join(f"{state.batch:,}" for state in states) or "none"
        message = f"expected {config.states} kept states of the input model, found states after these batches: {kept}"
        fix = "set keep_state: {every: …} in the step that trains it, and build it again with --force"
        raise stage_error("no_state", "average.states", message, fix)

    def reader(state: KeptState) -> Callable[[], Weights]:
        return lambda: _weights_of(state, network)

    return [Member(f"batch_{state.batch}", reader(state)) for state in states[-config.states :]]


def _weights_of(state: KeptState, network: PreTrainedModel) -> Weights:
    """Read the weights of a model from a training state, whose names have the prefix of the module that trained."""
    snapshot = Snapshot.open(state.folder)
    names = [name for name, _ in network.named_parameters()]
    stored = [name for name in snapshot.shapes if name.startswith(WEIGHTS) and name.endswith(f".{names[0]}")]
    prefix = stored[0].removesuffix(names[0]) if stored else WEIGHTS
    if missing := [name for name in names if prefix + name not in snapshot.shapes]:
        message = f"the state after {state.batch:,} batches has no weight {missing[0]}"
        fix = "average states of runs without adapters, or the models themselves"
        raise stage_error("other_shapes", "average.states", message, fix)
    weights = {name: weight.detach().clone() for name, weight in network.state_dict().items()}
    of_state = {
        name: snapshot.read(prefix + name, TensorPart.of_shape(snapshot.shapes[prefix + name])) for name in names
    }
    # Tied weights have one name among the parameters and two in the model.
    names_at = {weight.data_ptr(): name for name, weight in network.named_parameters()}
    for name, weight in network.state_dict().items():
        if (known := names_at.get(weight.data_ptr())) is not None:
            weights[name] = of_state[known]
    return weights


def _mean(members: Sequence[Member], shares: Sequence[float]) -> Weights:
    """The weighted mean of all members, summed in fp64 one after the other; numbers that are no floats are the last
    member's."""
    sums: Weights = {}
    total = sum(shares)
    for member, share in zip(members, shares, strict=True):
        for name, weight in member.read().items():
            if weight.is_floating_point():
                part = weight.double() * (share / total)
                sums[name] = sums[name].add_(part) if name in sums else part
            else:
                sums[name] = weight
    return {name: weight.float() if weight.is_floating_point() else weight for name, weight in sums.items()}


def _soup(
    members: Sequence[Member], measured: Mapping[str, float], measure: Callable[[Weights], float], run: Run
) -> tuple[Weights, int, float]:
    """Return the greedy soup, its members and its measured value: the best member, and in descending order each one
    with which the mean is no worse."""
    order = sorted(members, key=lambda member: -measured[member.name])
    kept, value = [order[0]], measured[order[0].name]
    for candidate in order[1:]:
        run.stop_if_cancelled()
        tried = measure(_mean([*kept, candidate], [1.0] * (len(kept) + 1)))
        verdict = "kept" if tried >= value else "left out"
        run.event("candidate", f"with {candidate.name} {abs(tried):.4f} instead of {abs(value):.4f}: {verdict}")
        if tried >= value:
            kept, value = [*kept, candidate], tried
    return _mean(kept, [1.0] * len(kept)), len(kept), value


def _measure(
    config: AverageConfig, inputs: Mapping[str, Path], network: PreTrainedModel, hardware: Hardware, run: Run
) -> Callable[[Weights], float] | None:
    """Return a function that measures weights, the higher the better; None without shards and benchmark."""
    if config.benchmark is not None:
        return lambda weights: _score(config, inputs["model"], network, weights, run)
    if "shards" not in inputs:
        return None
    with OpenShards(inputs["shards"], run) as shards:
        if "end_of_text_id" in shards.meta:
            shards.check_tokenizer(
                load_pretrained_tokenizer(inputs["model"]), "average.inputs.shards", "give its own shards"
            )
        numbers = spread(shards.validation.sequences, config.validation_sequences)
        text = shards.read(shards.validation, numbers)
    choose_attention(network, hardware, shards.length)
    model = LanguageModel(network, hardware).to(hardware.device)

    def negative_loss(weights: Weights) -> float:
        network.load_state_dict(weights)
        return -_loss(model, text, hardware)

    return negative_loss


def _loss(model: LanguageModel, text: Packed, hardware: Hardware) -> float:
    """Nats per token."""
    total, count = 0.0, 0
    with measuring(model):
        for packed in text.batches(_BATCH):
            part = next_token_batch(packed.tokens, packed.starts)
            batch = {name: value.to(hardware.device) for name, value in part.items()}
            total += float(model.losses(batch).double().sum())
            count += int((batch["labels"] != IGNORE).sum())
    return total / count


def _score(config: AverageConfig, source: Path, network: PreTrainedModel, weights: Weights, run: Run) -> float:
    """The figure of the benchmarks of a model with these weights."""
    assert config.benchmark is not None
    folder, scores = run.work_dir / "candidate", run.work_dir / "scores"
    for path in (folder, scores):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    network.load_state_dict(weights)
    export(network, source, folder)
    silent = Run(run.work_dir, run.launch, is_cancelled=lambda: run.cancelled)
    figures = benchmarks(config.benchmark, {"model": folder}, scores, silent).figures
    if config.figure not in figures:
        message = f"expected a figure of the benchmark, not {config.figure}"
        raise stage_error("no_figure", "average.figure", message, f"use one of {', '.join(sorted(figures))}")
    return figures[config.figure]


if __name__ == "__main__":
    from infra.alone import main

    main(average, AverageConfig)
