"""Notes on steps before anything runs: the changes that a step makes when it continues from the state of another, in
the
learning rate and in the order of the data, and the chat template that a model brings along."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from corpus.config import READS_RECORDS
from corpus.readers.config import FileDocuments
from corpus.readers.selected import left_out
from corpus.recognition.first_records import unread_files
from corpus.tokens.chat_template import has_other_template
from evaluation.config import BenchmarksConfig, SafetyConfig
from flows.config.graph import Graph
from flows.planning.plan import PlannedStage
from infra.errors import ConfigError, Problem, StageError
from infra.store.states import STATES, removed_state, state_at
from infra.store.store import Store
from tasks.stage import MEASURE, STATE, Node
from training.config import BaseModelConfig, ChatTrainerConfig, PretrainConfig, TrainerConfig
from training.config.duration import parse_duration

_SMALL = 0.01
"""Changes of the learning rate below this share are not reported: a schedule changes by about as much per batch."""
_ORDER = (
    "shuffle_block",
    "global_batch_tokens",
    "global_batch_examples",
    "global_batch_pairs",
    "group_by_length",
    "text_share",
)
"""Settings, in addition to the seed, that the order of an epoch depends on."""


def branch_notes(nodes: Graph, rows: Mapping[str, PlannedStage]) -> dict[str, str]:
    """A line or two for each step that goes on from a state of another step of the pipeline: the learning rate before
    the state and after it, and what changes the order of the data.

    Args:
        rows: of the plan, for what is built by now.
    """
    return {
        name: note
        for name, node in nodes.items()
        if isinstance(node.config, TrainerConfig) and node.config.continues and STATE in node.inputs
        if (note := "\n".join(filter(None, _notes(node, node.config, nodes[node.inputs[STATE]], rows))))
    }


def file_notes(nodes: Graph) -> dict[str, str]:
    """Lines for each step whose folders hold files that it leaves out: side files and those of other splits, and those
    that no reader reads where the source puts them aside."""
    return {
        name: "\n".join(notes)
        for name, node in nodes.items()
        if isinstance(node.config, READS_RECORDS)
        if (notes := [*(note for _, _, note in left_out(node.config.read, name)), *_put_aside(node.config.read, name)])
    }


def _put_aside(sources: Sequence[object], section: str) -> Iterator[str]:
    for index, source in enumerate(sources):
        if isinstance(source, FileDocuments) and source.broken_files == "quarantine":
            there = (file for file in source.places() if not isinstance(file, Path) or file.exists())
            for unread in unread_files(source, there):
                yield f"{section}.read.{index}: skipped, because no reader supports these files: {unread.note}"


def chat_notes(nodes: Graph) -> dict[str, str]:
    """A line for each base model from outside that keeps its own chat template: a short conversation as its tokens.

    Raises ConfigError for a template that tuning cannot use.
    """
    notes: dict[str, str] = {}
    for name, node in nodes.items():
        if not isinstance(node.config, BaseModelConfig | PretrainConfig):
            continue
        if not _keeps_template(node.config):
            for key, _ in _values_for(name, nodes):
                message = f"expected no values: the model of {name} has this project's chat template, which takes none"
                problem = Problem("unknown_template_value", f"{key}.chat_template_kwargs", message, "leave it out")
                raise ConfigError(problem)
            continue
        folder = Path(node.config.path)
        # Seconds of imports, for models with a template alone.
        from corpus.model_folders.pretrained import load_pretrained_tokenizer
        from training.chat.base import chat_of
        from training.chat.shown import shown_template

        try:
            tokenizer = load_pretrained_tokenizer(folder, f"{node.key}.path")
            chat = chat_of(tokenizer, folder)
            notes[name] = f"{name} keeps its own chat template: {shown_template(chat)}"
            for key, values in _values_for(name, nodes):
                chat_of(tokenizer, folder, values, key)
        except StageError as error:
            raise ConfigError(*error.problems) from error
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().splitlines()[0]
            message = f"transformers cannot read the tokenizer in {folder}: {reason}"
            raise ConfigError(Problem("bad_model", f"{node.key}.path", message)) from error
    return notes


def _keeps_template(config: BaseModelConfig | PretrainConfig) -> TypeGuard[BaseModelConfig]:
    """Return True if a step's model has a chat template other than this project's."""
    if not isinstance(config, BaseModelConfig) or config.chat_template != "model":
        return False
    return has_other_template(Path(config.path))


def _values_for(name: str, nodes: Graph) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The values for a chat template in the steps whose model descends from a step, with the key of each."""
    for node in nodes.values():
        config = node.config
        if not isinstance(config, ChatTrainerConfig | BenchmarksConfig | SafetyConfig):
            continue
        if not config.chat_template_kwargs:
            continue
        model = node.inputs.get("model")
        while model in nodes and model != name:
            model = nodes[model].inputs.get("model")
        if model == name:
            yield node.path or node.stage.name.removeprefix(MEASURE), config.chat_template_kwargs


def refuse_removed_states(nodes: Graph, rows: Mapping[str, PlannedStage], chosen: Iterable[str], store: Store) -> None:
    """Raise ConfigError `no_state` for chosen steps that would be built from a state which `stemma gc --states`
    removed: else the run ends there, after all that comes before was built."""
    problems: list[Problem] = []
    for name in chosen:
        node, first = nodes[name], rows.get(nodes[name].inputs.get(STATE, ""))
        if rows[name].status != "build" or first is None or first.status != "reuse":
            continue
        if first.manifest is None or first.path is None:
            continue
        step = first.node.id
        # On an object store the artifact may not be on this machine.
        artifact = store.peek(first.manifest, STATES, folder=first.path)
        state = state_at(artifact, step, node.key, node.continues_at())
        if not state.files(first.manifest):
            problems += (
                replace(problem, path=f"{node.key}.continues") for problem in removed_state(step, state).problems
            )
    if problems:
        raise ConfigError(*problems)


def _notes(node: Node, after: TrainerConfig, first: Node, rows: Mapping[str, PlannedStage]) -> tuple[str, str]:
    return _rate(node, after, first, rows), _order(node, after, first)


def _order(node: Node, after: TrainerConfig, first: Node) -> str:
    """A note if the data are the same, but the rest of the epoch comes in another order."""
    if not _same_data(node, first):
        return ""
    # Pretraining keeps the seed of the order that it began with.
    names = (*_ORDER, *(() if isinstance(after, PretrainConfig) else ("seed",)))
    changed = [name for name in names if getattr(after, name, None) != getattr(first.config, name, None)]
    if not changed:
        return ""
    keys, verb = " and ".join(changed), "is" if len(changed) == 1 else "are"
    return (
        f"{node.id}: {keys} {verb} not as in {first.id}: the rest of the epoch is read in a different order, so "
        "some of it may be read twice and some not at all"
    )


def _same_data(node: Node, first: Node) -> bool:
    return all(node.inputs.get(name) == source for name, source in first.inputs.items())


def _rate(node: Node, after: TrainerConfig, first: Node, rows: Mapping[str, PlannedStage]) -> str:
    before = first.config
    if not isinstance(before, TrainerConfig) or not hasattr(before, "duration"):  # that of PPO is a number of rollouts
        return ""
    manifest = rows[first.id].manifest
    trained = int(manifest.result["figures"].get("batches", 0)) if manifest else 0
    epoch = _epoch_batches(before, trained)
    total = trained or _batches(before.duration, before, epoch)
    batch = node.continues_at() or total
    rates = None
    if total and batch:
        was = _rates(before, total, epoch, batch)
        now = _rates(after, None, epoch if _same_data(node, first) else None, batch)
        rates = (was[0], was[1], now[1]) if was and now else None
    if rates is None:
        reason = "is built" if manifest is None else "and its data are read: lengths in epochs or tokens depend on them"
        return f"{node.id}: the learning rate where it continues from {first.id} is known once {first.id} {reason}"
    last, planned, following = rates
    where = f"{node.id}: after batch {batch:,} of {first.id} the learning rate"
    if abs(following - last) <= _SMALL * max(following, last) or following == planned:
        return f"{where} does not jump: {last:.4g}, then {following:.4g}"
    times = f"{following / last:.3g} times as high" if following > last else f"to {following / last:.1%} of it"
    return f"{where} jumps from {last:.4g} to {following:.4g}, {times}"


def _rates(section: TrainerConfig, total: int | None, epoch: int | None, batch: int) -> tuple[float, float] | None:
    """The learning rates of the batches before and after the first `batch`; None where lengths are not known yet."""
    from training.trainer.schedules import LearningRateSchedule  # imports torch, which most checks need not wait for

    total = total or _batches(section.duration, section, epoch)  # type: ignore[attr-defined]
    lengths = (section.schedule.warmup, section.schedule.decay_length)
    if total is None or any(_batches(length, section, epoch, total) is None for length in lengths):
        return None
    schedule = LearningRateSchedule.of(section.schedule, total, _batch_tokens(section) or 1, epoch or 1)
    peak = section.optimizer.learning_rate
    return peak * schedule.lr_multiplier(batch - 1), peak * schedule.lr_multiplier(batch)


def _epoch_batches(section: TrainerConfig, trained: int) -> int | None:
    """Return the batches of an epoch, from the length of a finished training of full epochs."""
    duration = parse_duration(section.duration)  # type: ignore[attr-defined]
    return int(trained / duration.value) if trained and duration.unit == "epochs" and duration.value % 1 == 0 else None


def _batch_tokens(section: TrainerConfig) -> int | None:
    """Tokens of every batch; None where batches differ."""
    return section.global_batch_tokens if isinstance(section, PretrainConfig) and not section.batch_warmup else None


def _batches(length: str, section: TrainerConfig, epoch: int | None, total: int = 0) -> int | None:
    """A length in batches; None for one in epochs or tokens where it is not known how many batches these are."""
    duration, tokens = parse_duration(length), _batch_tokens(section)
    if (duration.unit == "epochs" and epoch is None) or (duration.unit == "tokens" and tokens is None):
        return None
    return max(1, duration.batches(batch_tokens=tokens or 1, epoch_batches=epoch or 1, whole=total))
