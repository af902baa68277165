"""Bad data and bad rewards of alignment through the command: put aside, counted, or a stop that names what is wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.evaluation.conftest import make_model
from tests.support.programs.command import Answer, write_config

LONG = "word " * 200
"""More than the 128 tokens of the model."""


def raising(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function, which the pipeline names by its import path."""
    raise KeyError("no such unit test")


def unknown(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    return [math.nan for _ in answers]


def _conversation(*texts: str, first: str = "human") -> dict[str, Any]:
    roles = (first, "gpt") if first != "gpt" else ("gpt", "human")
    return {"conversations": [{"from": roles[place % 2], "value": text} for place, text in enumerate(texts)]}


def _pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


INSTRUCTIONS = [
    *(_conversation(f"Say {n}.", f"It is {n}.") for n in range(30)),
    *(_conversation(f"{LONG} Say {n}.", f"It is {n}.") for n in range(30, 33)),
    _conversation("Go on.", LONG),
    _conversation("Yes.", "Why?", "So.", first="gpt"),
    _conversation("Why?", "So.", first="oracle"),
    _conversation("Why?", ""),
]
PREFERENCES = [
    *(_pair(f"Say {n}.", f"It is {n}.", "No.") for n in range(30)),
    *(_pair(f"{LONG} Say {n}.", f"It is {n}.", "No.") for n in range(30, 33)),
    _pair("Go on.", "Yes.", LONG),
    _pair("Why?", "Yes.", "Yes."),
    _pair("Why?", "Yes.", " "),
]


def _config(folder: Path) -> dict[str, Any]:
    """From an untrained model; what is too long for it is cut by one step and left out by the other."""
    for name, rows in (("said", INSTRUCTIONS), ("pairs", PREFERENCES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(name: str) -> dict[str, Any]:
        source = {"kind": "files", "paths": [str(folder / f"{name}.jsonl")]}
        return {"read": [source], "heldout_share": 0.3, "max_quarantine_share": 0.1}

    tuned = {"inputs": {"model": "base_model", "instructions": "instructions"}, "duration": "1 batches"}
    tuned |= {"uses": "sft", "answer_max_tokens": 4, "answers_limit": 2}
    paired = {"inputs": {"model": "base_model", "preferences": "preferences"}, "duration": "1 batches"}
    paired |= {"uses": "preference_tuning", "answer_max_tokens": 4}
    sampled = {"uses": "rlhf", "inputs": {"model": "base_model", "prompts": "instructions"}, "rollouts": 1}
    sampled |= {"rollout_prompts": 4, "minibatch_answers": 4, "answers_per_prompt": 2, "answer_max_tokens": 4}
    return {
        "name": "bad",
        "base_model": {"path": str(make_model(folder / "model", seed=1))},
        "instructions": read("said"),
        "preferences": read("pairs"),
        "steps": {
            "cut": tuned,
            "strict": paired | {"too_long": "drop"},
            "failing": sampled | {"reward_functions": {f"{__name__}:raising": 1.0}},
            "unsaid": sampled | {"reward_functions": {f"{__name__}:unknown": 1.0}},
        },
    }


def test_bad_data_is_counted_and_a_bad_reward_is_named(run: Callable[..., Answer], tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", _config(tmp_path))
    answer = run("run", config, "--root", tmp_path / "store")
    rows = answer.rows()
    assert answer.code == 1 and answer.with_status("failed") == {"failing", "unsaid"}, answer.document["errors"]

    def aside(stage: str) -> list[tuple[int, str]]:
        lines = (Path(rows[stage]["path"]) / "aux" / "quarantine.jsonl").read_text().splitlines()
        return [(one["line"], one["reason"]) for one in map(json.loads, lines)]

    assert aside("instructions") == [
        (35, "the conversation starts with the assistant"),
        (36, "unknown role: oracle"),
        (37, "no answer: an answer is empty"),
    ]
    assert aside("preferences") == [
        (35, "equal answers: chosen and rejected are the same"),
        (36, "no answer: rejected is empty"),
    ]

    def lost(stage: str) -> tuple[float, float]:
        steps = [Path(rows[step]["path"]) / "manifest.json" for step in (stage, f"measure_{stage}")]
        trained, measured = (json.loads(path.read_text())["result"]["figures"] for path in steps)
        return tuple(trained[name] + measured[f"heldout_{name}"] for name in ("prompts_cut", "pairs_dropped"))  # type: ignore[return-value]

    assert (lost("cut"), lost("strict")) == ((3, 1), (0, 4)), "the one answer that has no room is never cut"

    key = "reward_functions"
    told = {error["path"]: (error["code"], error["message"]) for error in answer.document["errors"]}
    assert told[f"steps.failing.{key}.{__name__}:raising"] == (
        "reward_function_failed", "it raised KeyError: 'no such unit test'"
    )  # fmt: skip
    code, said = told[f"steps.unsaid.{key}.{__name__}:unknown"]
    assert code == "reward_not_finite"
    assert said.startswith("expected a finite number or None, it gave nan for the answer")
