"""The time that `check` gives for a training: what it took on this machine, whatever a probe makes of its CPU."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.commands import stemma
from flows.config.graph import graph
from flows.config.read import load
from infra.store.store import Store
from tests.support.pipelines import full_config
from tests.support.programs.command import write_config
from training.planner.hardware import here


@pytest.fixture(autouse=True)
def _slow_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which the probe was taken beside a training."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(here, "_probe", lambda: 1e8)
    here.cpu.cache_clear()


def was_built(root: Path, config: Path, step: str, fingerprint: str, seconds: float, **about: Any) -> None:
    """Leave the manifest of an artifact of a step."""
    node = graph(load(config))[step]
    folder = root / node.folder / fingerprint
    folder.mkdir(parents=True)
    keys = {"stage": node.folder, "version": node.stage.version, "fingerprint": fingerprint, "digest": "d" * 64}
    empty = {"identity": {}, "inputs": {}, "requires": {}, "sources": [], "files": []}
    manifest = {
        "schema": 1,
        **keys,
        **empty,
        "build_id": fingerprint,
        "config": node.config.model_dump(mode="json"),
        "result": {"figures": {}, "headline": ""},
        "step": step,
        "host": socket.gethostname(),
        "seconds": seconds,
        "finished": f"2026-11-2{fingerprint[0]}T00:00:00+00:00",
        **about,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def plans(root: Path, config: Path, *settings: str) -> dict[str, Any]:
    words = ["check", str(config), "--root", str(root), "--json"]
    for setting in settings:
        words += ["--set", setting]
    answer = CliRunner().invoke(stemma, words)
    assert answer.exit_code == 0, answer.output
    return {row["stage"]: row["plan"] for row in json.loads(answer.stdout)["stages"] if row["plan"]}


def test_a_training_takes_what_it_took_here(tmp_path: Path) -> None:
    root, config = tmp_path / "store", write_config(tmp_path / "config.yaml", full_config())
    Store(root)
    by_sizes = plans(root, config)["rlhf"]
    was_built(root, config, "rlhf", "1" * 16, 90.0)
    was_built(root, config, "rlhf", "2" * 16, 110.0)
    was_built(root, config, "rlhf", "3" * 16, 120.0)
    was_built(root, config, "rlhf", "4" * 16, 9000.0, host="another")
    as_built = plans(root, config)["rlhf"]
    assert as_built["builds_here"] == 3 and as_built["hours"] * 3600 == pytest.approx(110)
    assert as_built["hours_low"] * 3600 == pytest.approx(72) and as_built["hours_high"] * 3600 == pytest.approx(150)
    assert by_sizes["builds_here"] == 0 and by_sizes["hours"] > 2 * as_built["hours"], "the probe is far off"
    # Twice as many rounds take twice as long.
    rounds = graph(load(config))["rlhf"].config.rollouts  # type: ignore[attr-defined]
    longer = plans(root, config, f"rlhf.rollouts={2 * rounds}")["rlhf"]
    assert longer["hours"] * 3600 == pytest.approx(220)
    assert plans(root, config)["pretrain"]["builds_here"] == 0


def test_a_probe_on_a_busy_machine_counts_the_time_of_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    wall, worked = 0.0, 0.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            nonlocal wall
            wall += 0.05
            return wall

        @staticmethod
        def thread_time() -> float:
            nonlocal worked
            worked += 0.001
            return worked

    monkeypatch.setattr(here, "time", Clock)
    assert here._probe() == pytest.approx(2 * here._PROBE_SIZE**3 / 0.001)
