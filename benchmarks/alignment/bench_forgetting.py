"""What tuning forgets: text, answers and pairs of sentences, by a base model and by models that were made of it.

python -m benchmarks.alignment.bench_forgetting --store .stemma base=pretrain/83fc8d4a sft=sft/c4e6dae5
    [rlhf=rlhf/9b8ad6d4] [--shares 0.3 0.5]

The first model is the one that the others are held against. --shares: the second one is measured with so much of the
first one's weights in it too, as `sft.start_share` does. Pairs are the benchmark's and those of `pair_templates`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.alignment.pair_templates import drawn
from evaluation.generation.language_model import LoadedModel, load_model, token_log_likelihoods
from evaluation.safety.packed_documents import PackedDocuments
from evaluation.statistics.intervals import difference_of_paired_proportions
from infra.run import Run
from tools.benchmark_data import minimal_pairs
from training.chat.base import Chat

WRITTEN = [(row["good"], row["bad"]) for row in minimal_pairs.rows()]
PAIRS = [*WRITTEN, *(pair for _, pair in drawn())]
LONGEST = 160
"""Tokens of a prompt with its answer, as `sft.max_length` of the quickstart."""


@dataclass(frozen=True)
class Measured:
    """text, answers: nats a token. right: of each pair, whether the good sentence is the likelier one."""

    text: float
    answers: float
    right: NDArray[np.bool_]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="NAME=STAGE/FINGERPRINT")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--shares", type=float, nargs="*", default=[])
    parser.add_argument("--sequences", type=int, default=100, help="of the validation text, the first")
    parser.add_argument("--answers", type=int, default=160, help="held-out instructions, the first")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as work:
        run = Run(Path(work))
        text = [
            tokens.tolist()
            for tokens, _ in PackedDocuments(_only(given.store, "shard") / "validation", Path(work)).read(
                np.arange(given.sequences)
            )
        ]
        lines = (_only(given.store, "instructions") / "heldout.jsonl").read_text(encoding="utf8").splitlines()
        asked = [json.loads(line) for line in lines[: given.answers]]
        base: Measured | None = None
        for name, lm, folder in _models(given.models, given.store, given.shares, run):
            found = _measure(lm, Chat.load(folder), text, asked, run)
            base = base or found
            print(f"{name:16} text {found.text:.4f}, answers {found.answers:.4f}, {_pairs(found, base)}", flush=True)


def _models(
    named: Sequence[str], store: Path, shares: Sequence[float], run: Run
) -> Iterator[tuple[str, LoadedModel, Path]]:
    folders = {name: _folder(store, place) for name, _, place in (one.partition("=") for one in named)}
    start: dict[str, torch.Tensor] = {}
    for number, (name, folder) in enumerate(folders.items()):
        lm = load_model(folder, run)
        learnt = {key: value.clone() for key, value in lm.model.state_dict().items()}
        yield name, lm, folder
        start = start or learnt
        for share in shares if number == 1 else ():
            lm.model.load_state_dict({key: torch.lerp(value, start[key], share) for key, value in learnt.items()})
            yield f"{name}, {share:g} of it", lm, folder


def _measure(lm: LoadedModel, chat: Chat, text: list[list[int]], asked: list[dict[str, Any]], run: Run) -> Measured:
    sentences = [
        [lm.start_token, *lm.tokenizer.encode(one, add_special_tokens=False)] for pair in PAIRS for one in pair
    ]
    likely = np.array([float(each.sum()) for each, _ in token_log_likelihoods(lm, sentences, run, "pairs")])
    good, bad = likely.reshape(-1, 2).T
    told = chat.conversations([row["prompt"] for row in asked], [row["response"] for row in asked])
    of_told = token_log_likelihoods(lm, [one.ids[:LONGEST] for one in told], run, "answers")
    answers = [each[len(one.prompt) - 1 :] for (each, _), one in zip(of_told, told, strict=True)]
    return Measured(
        _nats([each for each, _ in token_log_likelihoods(lm, text, run, "text")]), _nats(answers), good > bad
    )


def _nats(likelihoods: Sequence[torch.Tensor]) -> float:
    return -sum(float(one.sum()) for one in likelihoods) / sum(one.numel() for one in likelihoods)


def _pairs(found: Measured, base: Measured) -> str:
    """The shares of right pairs, of the benchmark's, of the others and of all; of all against the base's."""
    now, before = found.right, base.right
    both, neither = int((now & before).sum()), int((~now & ~before).sum())
    change = difference_of_paired_proportions(both, int((now & ~before).sum()), int((before & ~now).sum()), neither)
    parts = now[: len(WRITTEN)].mean(), now[len(WRITTEN) :].mean(), now.mean()
    points = ", ".join(f"{100 * value:+.1f}" for value in (change.value, change.low, change.high))
    return f"pairs {parts[0]:.1%}, {parts[1]:.1%}, {parts[2]:.1%} (against the first, points, low, high: {points})"


def _folder(store: Path, place: str) -> Path:
    """The folder of an artifact by its stage and the beginning of its fingerprint."""
    stage, _, beginning = place.partition("/")
    return _only(store, stage, beginning)


def _only(store: Path, stage: str, beginning: str = "") -> Path:
    found = sorted(path.parent for path in (store / stage).glob(f"{beginning}*/manifest.json"))
    if len(found) != 1:
        raise SystemExit(f"expected one {stage}/{beginning}… in {store}, found {len(found)}")
    return found[0]


if __name__ == "__main__":
    main()
