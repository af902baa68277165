"""A pipeline whose sources are mixed while training, as the guide shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config.read import parse
from infra.errors import ConfigError
from tests.support.pipelines import SENTENCES
from tests.support.programs.command import REPOSITORY, Answer, write_config

Run = Callable[..., Answer]


def _shown() -> dict[str, Any]:
    """The config of the guide."""
    page = (REPOSITORY / "docs" / "training" / "data.md").read_text(encoding="utf8")
    block = re.search(r"<!-- mixture:begin -->\n```yaml\n(.*?)```", page, re.DOTALL)
    assert block
    found: dict[str, Any] = yaml.safe_load(block[1])
    return found


def _config(folder: Path, **changed: Any) -> dict[str, Any]:
    read = []
    for name, start in (("web", "On the page of"), ("letters", "Dear reader of")):
        texts = [f"{start} {n}: {SENTENCES[n % 5]} {SENTENCES[(n + 2) % 5]}" for n in range(120)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        read.append({"kind": "files", "name": name, "paths": [str(folder / f"{name}.jsonl")]})
    shown = _shown()
    shown["pretrain"] = {**shown["pretrain"], **changed}
    return {"name": "mixed", "ingest": {"read": read}, "tokenizer": {"vocab_size": 400}, **shown}


@pytest.mark.long
def test_another_mixture_tokenises_nothing_again(run: Run, tmp_path: Path) -> None:
    config, store = write_config(tmp_path / "mixed.yaml", _config(tmp_path)), tmp_path / "store"
    answer = run("run", config, "--root", store, "--set", "pretrain.duration=20 batches")
    assert answer.code == 0, (answer.document["errors"], answer.stderr)
    told = json.loads((Path(answer.rows()["pretrain"]["path"]) / "aux" / "mixture.json").read_text())
    # 320 sequences: 256 of them 6 to 4, then letters alone.
    read = {name: one["read"] for name, one in told["sources"].items()}
    assert sum(read.values()) == 320 and abs(read["web"] - 0.6 * 256) <= 4
    other = {"proportion": {"web": 1, "letters": 3}}
    again = write_config(tmp_path / "other.yaml", _config(tmp_path, mixture=other))
    rows = run("check", again, "--root", store).rows()
    assert {name: row["status"] for name, row in rows.items()} == {
        "ingest": "reuse",
        "tokenizer": "reuse",
        "shard": "reuse",
        "pretrain": "build",
        "measure_pretrain": "build",
    }


@pytest.mark.parametrize(
    ("changed", "shard", "expected"),
    [
        ({"mixture": {"proportion": {"web": 1, "leters": 1}}}, {}, "unknown_source pretrain.mixture.proportion.leters"),
        ({"mixture": {"repeat": {"web": 2}}}, {}, "unnamed_source pretrain.mixture.repeat"),
        ({}, {"by_source": False}, "not_by_source pretrain.mixture"),
        ({"mixture": {"proportion": {"web": 0, "letters": 0}}}, {}, "bad_value pretrain.mixture"),
        ({"mixture": {"proportion": {"web": 1}, "repeat": {"letters": 1}}}, {}, "bad_value pretrain.mixture"),
        (
            {
                "mixture": {
                    "proportion": {"web": 1},
                    "phases": [{"begins": f"{at} %", "repeat": {"letters": 1}} for at in (60, 40)],
                }
            },
            {},
            "bad_value pretrain.mixture",
        ),
        (
            {
                "mixture": {
                    "proportion": {"web": 1},
                    "phases": [
                        {"begins": at, "repeat": {"letters": 1}} for at in ("60 %", "10 batches", "50000 tokens")
                    ],
                }
            },
            {},
            "phase_order pretrain.mixture.phases.1.begins",
        ),
    ],
)
def test_a_wrong_mixture_is_named_before_anything_runs(
    changed: dict[str, Any], shard: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    config = _config(tmp_path, **changed)
    config["shard"] = {**config["shard"], **shard}
    with pytest.raises(ConfigError) as caught:
        parse(config)
    assert expected in [f"{problem.code} {problem.path}" for problem in caught.value.problems]
