"""The needle test: is a number that a long text holds the likeliest answer to the question for it?

python -m evaluation.needle --config needle.yaml --input model=DIR --out DIR
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evaluation.config.needle import NeedleConfig
from evaluation.generation.language_model import LoadedModel, load_model, token_log_likelihoods
from evaluation.statistics.intervals import wilson
from infra.errors import stage_error
from infra.run import Result, Run


def needle(config: NeedleConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Ask for the number at each length and depth.

    Writes results.json: {"chance", "positions", "lengths": {length: {value, low, high, n, depths: {depth: {value, low,
    high, n}}}}}. Figures: needle_<length> with its interval (Wilson), needle_chance. Raises StageError `no_room` for a
    length without room for the sentences, `too_few_positions` for one that a model with learned positions cannot read.
    """
    lm = load_model(inputs["model"], run)
    positions = getattr(lm.model.config, "max_position_embeddings", None)
    is_rotary = bool(getattr(lm.model.config, "rope_parameters", None))
    longest = max(config.lengths)
    if isinstance(positions, int) and longest > positions and not is_rotary:
        message = f"expected lengths of at most the model's {positions:,} positions, not {longest:,}"
        raise stage_error("too_few_positions", "needle.lengths", message, "use shorter texts")
    results: dict[str, Any] = {"chance": 1 / config.choices, "positions": positions, "lengths": {}}
    figures = {"needle_chance": 1 / config.choices}
    for length in sorted(set(config.lengths)):
        hits = {depth: _hits(config, lm, length, depth, run) for depth in sorted(set(config.depths))}
        every = [hit for each in hits.values() for hit in each]
        interval = wilson(sum(every), len(every), config.confidence)
        figures |= interval.as_figures(f"needle_{length}")
        results["lengths"][str(length)] = {
            **interval.as_json(),
            "n": len(every),
            "depths": {
                f"{depth:g}": {**wilson(sum(each), len(each), config.confidence).as_json(), "n": len(each)}
                for depth, each in hits.items()
            },
        }
    (out_dir / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf8")
    run.metrics(figures)
    shares = ", ".join(f"{figures[f'needle_{length}']:.0%} at {length:,}" for length in sorted(set(config.lengths)))
    return Result(figures, f"the number is found in {shares} tokens (chance {1 / config.choices:.0%})")


def _hits(config: NeedleConfig, lm: LoadedModel, length: int, depth: float, run: Run) -> list[bool]:
    """Return for each question True if the right number is likelier than all others."""
    drawn = random.Random(f"{config.seed} {length} {depth}")
    smallest, count = 10 ** (config.digits - 1), config.choices
    sequences: list[list[int]] = []
    answers: list[int] = []
    for _ in range(config.items):
        numbers = drawn.sample(range(smallest, 10 * smallest), count)
        for number in numbers:
            ids, answer = _sequence(config, lm, length, depth, numbers[0], number)
            sequences.append(ids)
            answers.append(answer)
    scores = token_log_likelihoods(lm, sequences, run, f"numbers in {length:,} tokens at {depth:.0%}")
    sums = [float(each.double()[-answer:].sum()) for (each, _), answer in zip(scores, answers, strict=True)]
    rows = [sums[start : start + count] for start in range(0, len(sums), count)]
    return [row[0] > max(row[1:]) for row in rows]


def _sequence(
    config: NeedleConfig, lm: LoadedModel, length: int, depth: float, hidden: int, answered: int
) -> tuple[list[int], int]:
    """Return a text of `length` tokens that holds the number `hidden` and ends with the answer `answered`; and the
    number of the answer's tokens."""

    def encode(text: str) -> list[int]:
        return list(lm.tokenizer.encode(text, add_special_tokens=False))

    sentence, question = encode(config.needle.replace("{number}", str(hidden))), encode(config.question)
    answer = encode(f" {answered}")
    room = length - 1 - len(sentence) - len(question) - len(answer)
    if room < 0:
        message = f"expected room for the sentences, which take {length - room:,} tokens, in {length:,}"
        raise stage_error("no_room", "needle.lengths", message, "use longer texts, or shorten the sentences")
    before = round(depth * room)
    filler = _repeated(encode(config.filler), room)
    return [lm.start_token, *filler[:before], *sentence, *filler[before:], *question, *answer], len(answer)


def _repeated(ids: Sequence[int], count: int) -> list[int]:
    """The first `count` tokens of a text that repeats."""
    return (list(ids) * (count // len(ids) + 1))[:count]


if __name__ == "__main__":
    from infra.alone import main

    main(needle, NeedleConfig)
