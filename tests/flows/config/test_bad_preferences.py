"""Preference files of every form through the command: read without being told, and what is no pair is put aside."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs.command import Answer, write_config

Run = Callable[..., Answer]


def _turn(role: str, text: str) -> dict[str, str]:
    return {"from": role, "value": text}


def _files(folder: Path) -> list[str]:
    """Three files of twenty pairs each, with their bad lines at the end."""
    dialogue = "\n\nHuman: Name {}.\n\nAssistant: {}"
    said = _turn("gpt", "Yes.")
    forms: dict[str, list[dict[str, Any]]] = {
        "sharegpt": [
            *(
                {"conversations": [_turn("human", f"Say {n}.")], "chosen": said, "rejected": _turn("gpt", f"No {n}.")}
                for n in range(20)
            ),
            {"conversations": [said, _turn("human", "Why?")], "chosen": said, "rejected": _turn("gpt", "No.")},
            {"conversations": [_turn("oracle", "Why?")], "chosen": said, "rejected": _turn("gpt", "No.")},
        ],
        "prompts": [
            *({"prompt": f"Spell {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(20)),
            {"prompt": "Why?", "chosen": "Yes.", "rejected": "Yes."},
            {"prompt": "Why?", "chosen": "Yes.", "rejected": ""},
        ],
        "dialogues": [
            *({"chosen": dialogue.format(n, "Yes."), "rejected": dialogue.format(n, "No.")} for n in range(20)),
            {"chosen": dialogue.format(1, "Yes."), "rejected": dialogue.format(2, "No.")},
        ],
    }
    paths = []
    for name, rows in forms.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(path))
    return paths


@pytest.mark.long
def test_three_forms_are_read_side_by_side_and_bad_pairs_are_told_by_file_and_line(run: Run, tmp_path: Path) -> None:
    """The risk: what the readers of single forms refuse, tested in corpus/, is lost on its way through a run."""
    read = [{"kind": "files", "paths": [path]} for path in _files(tmp_path)]
    settings: dict[str, Any] = {"read": read, "heldout_share": 0.3, "max_quarantine_share": 0.1}
    config = write_config(tmp_path / "config.yaml", {"name": "pairs", "preferences": settings})
    answer = run("run", config, "--root", tmp_path / "store")
    assert answer.code == 0, answer.document["errors"]
    out = Path(answer.rows()["preferences"]["path"])
    rows = [json.loads(line) for side in ("train", "heldout") for line in (out / f"{side}.jsonl").open()]
    assert {source: sum(row["source"] == source for row in rows) for source in {row["source"] for row in rows}} == {
        "sharegpt.jsonl": 20, "prompts.jsonl": 20, "dialogues.jsonl": 20,
    }  # fmt: skip
    assert all(row["chosen"] and row["rejected"] and row["chosen"] != row["rejected"] for row in rows)
    aside = [json.loads(line) for line in (out / "aux" / "quarantine.jsonl").open()]
    told = {(Path(one["file"]).name, one["line"]): one["reason"] for one in aside}
    for place, reason in {
        ("sharegpt.jsonl", 21): "starts with the assistant", ("sharegpt.jsonl", 22): "unknown role: oracle",
        ("prompts.jsonl", 21): "equal answers", ("prompts.jsonl", 22): "no answer",
        ("dialogues.jsonl", 21): "not two answers to the same dialogue",
    }.items():  # fmt: skip
        assert reason in told.pop(place)
    assert not told
    strict = run("run", config, "--root", tmp_path / "store", "--set", "preferences.max_quarantine_share=0.01")
    (error,) = strict.document["errors"]
    assert strict.code == 1 and "preferences.read.0" in json.dumps(error)
