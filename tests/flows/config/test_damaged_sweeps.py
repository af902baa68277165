"""Records of sweeps in another form than `stemma sweep` leaves: each as small as fuzzing found it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.config.carried import FILE, take_over
from flows.config.read import parse
from infra.errors import ConfigError, Problem

KEY = "pretrain.optimizer.learning_rate"


def taken(runs: Any, folder: Path) -> Any:
    (folder / "s").mkdir()
    record = {"sweep": "s", "measure": "m", "maximise": False, "runs": runs}
    (folder / "s" / FILE).write_text(json.dumps(record))
    data: dict[str, Any] = {"pretrain": {"optimizer": {"learning_rate": "from sweep s"}}}
    return take_over(data, folder, lambda: folder, parse)["pretrain"]["optimizer"]["learning_rate"]


def run(value: Any = 3.0, **settings: Any) -> dict[str, Any]:
    return {"settings": {KEY: 1e-3, **settings}, "value": value, "parameters": 10, "tokens": 10}


@pytest.mark.parametrize(
    "runs", [3, [None], [{**run(), "settings": None}], [run(None)], [run("3")], [{**run(), "parameters": "x"}]], ids=str
)
def test_a_record_of_another_form_is_damaged_state(runs: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found.json is damaged"):
        taken(runs, tmp_path)


def test_runs_that_did_not_set_the_key_are_left_out(tmp_path: Path) -> None:
    assert taken([{**run(1.0), "settings": {}}, run(2.0)], tmp_path) == 1e-3


def test_a_message_can_be_written_to_any_stream() -> None:
    assert Problem("a", "\ud800", "b\udcffc").as_json()["message"] == "b\\udcffc"
