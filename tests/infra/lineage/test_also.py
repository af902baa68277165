"""Copies for other trackers: with stand-ins for their packages, and with the packages themselves where installed."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flows.config.read import load
from infra.errors import ConfigError
from infra.lineage.also.copies import copy_problems
from infra.lineage.outbox import Outbox
from infra.lineage.relay import Relay
from tests.infra.lineage.conftest import BEGIN, Story
from tests.support.pipelines import data_config
from tests.support.programs.command import write_config

TRACKERS = ("wandb", "trackio", "tensorboard")


def tell(story: Story, *also: str, offline: bool = True) -> None:
    """Deliver the story of a run whose config names these trackers."""
    started, *rest = story.beginning()
    lineage = {"also": list(also), "offline": offline}
    outbox = Outbox(story.root)
    for message in (replace(started, config={"seed": 17, "lineage": lineage}), *rest, *story.ending()):  # type: ignore[type-var]
        outbox.send(message)
    relay = Relay(story.root)
    assert relay.work()
    relay.close()
    assert outbox.pending() == 0 and not (story.root / "lineage" / "failed").exists()
    assert story.loss_history() == story.expected_history(30), "MLflow has it all"


class RunOfOther:
    """A run of the stand-ins for wandb and trackio. given: arguments of its start."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.logged: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.ended: dict[str, Any] | None = None

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(values if step is None else {"step": step, **values})

    def finish(self, **given: Any) -> None:
        self.ended = given


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> list[RunOfOther]:
    runs: list[RunOfOther] = []

    def init(**given: Any) -> RunOfOther:
        runs.append(RunOfOther(given))
        return runs[-1]

    module = ModuleType(name)
    module.__dict__["init"] = init
    monkeypatch.setitem(sys.modules, name, module)
    return runs


def test_wandb_and_trackio_get_metrics_settings_and_links(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "not-a-real-key")
    runs = {name: stand_in(name, monkeypatch) for name in ("wandb", "trackio")}
    tell(story, "wandb", "trackio")
    for name in ("wandb", "trackio"):
        shard, pretrain, safety = runs[name]
        assert pretrain.given["project"] == "quickstart" and pretrain.given["group"] == "p"
        settings = pretrain.given["config"]
        assert settings["model.width"] == "256" and settings["input.shards"] == "shard/aaaa"
        assert settings["commit"] == "c0ffee" and settings["mlflow_run"]
        losses = [(row["step"], row["train/loss"]) for row in pretrain.logged if "train/loss" in row]
        assert losses == [(step, value) for step, _, value in story.expected_history(30)]
        result = pretrain.summary if name == "wandb" else pretrain.logged[-1]
        assert result["validation_loss"] == 3.2 and result["link/artifact"] == str(story.model)
        assert result["link/report.html"] == str(story.report)
        assert all(run.ended is not None for run in (shard, pretrain, safety))
    wandb = runs["wandb"]
    assert [run.given["mode"] for run in wandb] == ["offline"] * 3, "although there is a key"
    assert [run.ended for run in wandb] == [{"exit_code": 0}, {"exit_code": 0}, {"exit_code": 1}]
    assert not copy_problems(story.root)


def test_wandb_without_a_key_stays_on_this_machine(
    story: Story, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    runs = stand_in("wandb", monkeypatch)
    tell(story, "wandb", offline=False)
    assert {run.given["mode"] for run in runs} == {"offline"}


def test_a_tracker_that_fails_takes_nothing_with_it_and_is_told_once(
    story: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("wandb")

    def init(**_: Any) -> None:
        raise SystemExit("api_key not configured (no-tty)")

    module.__dict__["init"] = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    others = stand_in("trackio", monkeypatch)
    tell(story, "wandb", "trackio")
    (problem,) = copy_problems(story.root, "p")
    assert problem["code"] == "not_copied" and "api_key not configured" in problem["message"]
    assert sum("api_key not configured" in record.getMessage() for record in caplog.records) == 1
    assert [run.ended for run in others] == [{}, {}, {}]
    assert not copy_problems(story.root, "another")


def test_a_tracker_that_is_not_installed_is_named_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "trackio" else object())
    settings = data_config(tmp_path) | {"lineage": {"also": ["tensorboard", "trackio"]}}
    with pytest.raises(ConfigError) as refused:
        load(write_config(tmp_path / "config.yaml", settings))
    (problem,) = refused.value.problems
    assert problem.path == "lineage.also.1" and "pip install trackio" in problem.fix
    with pytest.raises(ConfigError, match="expected 'wandb', 'trackio' or 'tensorboard'"):
        load(write_config(tmp_path / "config.yaml", data_config(tmp_path) | {"lineage": {"also": ["neptune"]}}))


class Kept:
    """A message of the stand-in for TensorBoard's protocol: its fields as attributes."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


def stand_in_tensorboard(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Kept]]:
    written: dict[str, list[Kept]] = {}

    class EventFileWriter:
        def __init__(self, folder: str) -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.events = written.setdefault(folder, [])

        def add_event(self, event: Kept) -> None:
            self.events.append(event)

        def flush(self) -> None: ...

        def close(self) -> None: ...

    summary = type("Summary", (Kept,), {"Value": Kept})
    modules: dict[str, dict[str, Any]] = {
        "summary.writer.event_file_writer": {"EventFileWriter": EventFileWriter},
        "compat.proto.event_pb2": {"Event": Kept},
        "compat.proto.summary_pb2": {
            "Summary": summary,
            "SummaryMetadata": type("SummaryMetadata", (Kept,), {"PluginData": Kept}),
        },
        "compat.proto.tensor_pb2": {"TensorProto": Kept},
        "compat.proto.tensor_shape_pb2": {"TensorShapeProto": type("TensorShapeProto", (Kept,), {"Dim": Kept})},
    }
    for name, content in modules.items():
        parts = f"tensorboard.{name}".split(".")
        for depth in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
        sys.modules[f"tensorboard.{name}"].__dict__.update(content)
    return written


def test_tensorboard_gets_event_files(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    written = stand_in_tensorboard(monkeypatch)
    tell(story, "tensorboard")
    events = written[str(story.root / "lineage" / "tensorboard" / "quickstart" / "p" / "pretrain")]
    values = [(event, event.summary.value[0]) for event in events]
    losses = [(event.step, value.simple_value) for event, value in values if value.tag == "train/loss"]
    assert losses == [(step, value) for step, _, value in story.expected_history(30)]
    texts = {value.tag: value.tensor.string_val[0].decode() for _, value in values if hasattr(value, "tensor")}
    assert "| model.width | 256 |" in texts["settings/text_summary"]
    assert str(story.model) in texts["result/text_summary"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_what_was_written(story: Story) -> None:
    tell(story, "tensorboard")
    accumulators: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    folder = story.root / "lineage" / "tensorboard" / "quickstart" / "p" / "pretrain"
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    losses = [(event.step, event.value, event.wall_time) for event in events.Scalars("train/loss")]
    assert losses == [
        (step, pytest.approx(value), pytest.approx(BEGIN + step / 10)) for step, _, value in story.expected_history(30)
    ]
    assert events.Scalars("validation_loss")[0].value == pytest.approx(3.2)
    (settings,) = events.Tensors("settings/text_summary")
    assert b"| model.width | 256 |" in settings.tensor_proto.string_val[0]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_the_tracker_itself_takes_a_run_offline(name: str, story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("TRACKIO_DIR", str(story.root / "lineage" / "trackio"))
    tell(story, name)
    assert not copy_problems(story.root)
    files = [path for path in (story.root / "lineage" / name).rglob("*") if path.is_file() and path.stat().st_size]
    suffix = ".wandb" if name == "wandb" else ".db"
    assert any(path.suffix == suffix for path in files), files
