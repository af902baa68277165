"""Answers of models to prompts, two per prompt, written for people to choose from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from corpus.readers.encodings import whole_characters
from evaluation.people import label_studio
from evaluation.people.page import judging_page
from evaluation.people.pairs import Export, blind, require_free
from infra.errors import stage_error
from infra.run import Run
from infra.store.manifest import Manifest
from infra.store.reference import opened
from infra.store.store import Store
from training.chat.base import Chat, read_rows
from training.core.hardware import prepare
from training.generation.sampling import sample
from training.model.models import limit_length, load


@dataclass(frozen=True)
class CandidateSampling:
    """Options of sampling. temperature: 0 takes the likeliest token, so that one model has no two answers."""

    temperature: float = 0.7
    max_new_tokens: int = 256
    seed: int = 17


def prompts_in(path: Path) -> Sequence[str]:
    """Return the prompts of a JSON lines file, each once, without those that continue a conversation; halves of
    surrogate pairs, which JSON can escape and no tokenizer accepts, are repaired. Raises StageError for a file without
    any."""
    rows = read_rows(path, ("prompt",), surrogates=True)
    return list(dict.fromkeys(whole_characters(row["prompt"]) for row in rows if not row.get("history")))


def held_out_prompts(root: Path) -> Sequence[str]:
    """Return the held-out prompts of the newest instructions, which no model of the pipeline learnt from. Raises
    ConfigError for none."""
    return prompts_in(opened(Store(root, reading=True), "instructions", ["instructions"])[0] / "heldout.jsonl")


def prompts_of_both_sides(root: Path) -> Sequence[str]:
    """Return all prompts of the newest instructions. Labels from files belong to the same side of the split as their
    prompt: labels of held-out prompts alone would all be held out, and nothing would be learnt from them. Raises
    ConfigError for none."""
    folder = opened(Store(root, reading=True), "instructions", ["instructions"])[0]
    found = [prompt for side in ("train", "heldout") for prompt in prompts_in(folder / f"{side}.jsonl")]
    return list(dict.fromkeys(found))


def write_export(
    models: Mapping[str, Path],
    prompts: Sequence[str],
    count: int,
    drawing: CandidateSampling,
    out: Path,
    run: Run,
    **noted: Any,
) -> Export:
    """Draw `answer_pairs` and write them with the page and the tasks to judge them by, see `evaluation.people`.

    noted: kept in the key, with the options of sampling. Raises StageError `folder_in_use` before anything is drawn.
    """
    require_free(out)
    pairs, given_by = blind(answer_pairs(models, prompts, count, drawing, run), drawing.seed)
    known = {name: _known_of(folder) for name, folder in models.items()}
    export = Export(pairs, given_by, known, {**asdict(drawing), **noted})
    pages = {
        "judge.html": judging_page(export, "Which answer is better?"),
        "tasks.json": json.dumps(label_studio.tasks(pairs.values(), export.id), indent=1, ensure_ascii=False),
        "labelling.xml": label_studio.LABELLING,
    }
    export.write(out, pages)
    return export


def _known_of(folder: Path) -> dict[str, str]:
    """Return a model's path, and for an artifact its name and digest."""
    try:
        manifest = Manifest.read(folder)
    except FileNotFoundError:
        return {"path": str(folder)}
    return {"path": str(folder), "artifact": f"{manifest.stage}/{manifest.fingerprint}", "digest": manifest.digest}


def answer_pairs(
    models: Mapping[str, Path], prompts: Sequence[str], count: int, drawing: CandidateSampling, run: Run
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return `count` of the given prompts, in an order that the seed decides, each with two (model, answer) that
    differ.

    models: folders by name. With one model both answers are its own; with several, each pair of models is compared
    equally often. There are fewer than `count` where prompts are short or answers alike. Raises StageError `no_pairs`
    where no two answers differ.
    """
    random = np.random.default_rng(drawing.seed)
    left = [prompts[number] for number in random.permutation(len(prompts))]
    names = list(models)
    meetings = list(combinations(names, 2)) or [(names[0], names[0])]
    found: list[tuple[str, list[tuple[str, str]]]] = []
    while left and len(found) < count:
        asked, left = left[: count - len(found)], left[count - len(found) :]
        wanted = [meetings[(len(found) + number) % len(meetings)] for number in range(len(asked))]
        answers: list[list[tuple[str, str]]] = [[] for _ in asked]
        for place, name in enumerate(names):
            for turn in (0, 1):
                mine = [number for number, two in enumerate(wanted) if two[turn] == name]
                seed = int(np.random.default_rng([drawing.seed, len(left), place, turn]).integers(2**31))
                said = _answers(models[name], [asked[number] for number in mine], drawing, seed, run, name)
                for number, text in zip(mine, said, strict=True):
                    answers[number].append((name, text))
        found += [(prompt, two) for prompt, two in zip(asked, answers, strict=True) if two[0][1] != two[1][1]]
    if not found:
        fix = "raise --temperature, or use other prompts or models"
        raise stage_error("no_pairs", ", ".join(names), "no prompt has two answers that differ", fix)
    return found


def _answers(
    folder: Path, prompts: Sequence[str], drawing: CandidateSampling, seed: int, run: Run, name: str
) -> list[str]:
    if not prompts:
        return []
    hardware = prepare(run.launch)
    chat = Chat.load(folder)
    model = load(folder).eval().to(hardware.device)
    positions = limit_length(model, 1_000_000)
    most = min(drawing.max_new_tokens, positions // 2)
    answers = sample(
        model,
        chat.prompts(prompts, positions - most),
        max_new_tokens=most,
        temperature=drawing.temperature,
        stops=chat.stops,
        hardware=hardware,
        seed=seed,
        on_batch=lambda done: run.progress(done, len(prompts), "answers", name),
    )
    return [chat.decode(answer) for answer in answers]
