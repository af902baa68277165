"""The ledger of runs whose stages are killed: every second is accounted for, and what was lost is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.command import finish, start, stemma, write_config
from tests.support.pipelines import trained_config
from tests.support.processes import progress_of, running_stage, wait_until

BATCHES = 400


def adds_up(account: dict[str, Any]) -> None:
    parts = sum(seconds for causes in account["parts"].values() for seconds in causes.values())
    assert parts == pytest.approx(account["device_s"], rel=0.01)


def test_a_killed_training_costs_what_it_lost_and_did_again(
    cold_env: dict[str, str], env: dict[str, str], tmp_path: Path
) -> None:
    config = write_config(tmp_path / "config.yaml", trained_config(tmp_path, BATCHES))
    store = tmp_path / "store"
    process = start("run", config, "--root", store, env=cold_env)
    wait_until(lambda: progress_of(store, "pretrain") > 50, command=process)
    child = running_stage(store, "pretrain")
    assert isinstance(child, psutil.Process)
    child.kill()
    answer = finish(process)
    assert answer.code == 0, answer.document["errors"]

    cost = stemma("cost", answer.document["run_id"], "--root", store, env=env).document
    account = cost["account"]
    adds_up(account)
    # One device, and no two stages of this chain at once: the device's time is the run's.
    assert account["device_s"] == pytest.approx(cost["wall_s"], rel=0.01)
    assert cost["wall_s"] == pytest.approx(answer.document["seconds"], abs=2.0)
    trained = cost["stages"]["pretrain"]
    assert trained["restarts"] == 1
    assert trained["faults"]["killed"]["count"] == 1
    assert trained["faults"]["killed"]["mttr_s"] > 0
    assert trained["parts"]["lost"]["killed"] > 0
    assert trained["recomputed_s"] > 0
    assert trained["tokens"] == BATCHES * 512
    assert 0 < account["ettr"] < 1
    assert account["is_estimated"]

    model = stemma("cost", "pretrain", "--root", store, env=env).document
    assert model["unknown"] == []
    adds_up(model["account"])
    built = {row["step"] for row in model["artifacts"]}
    assert {"ingest", "clean", "tokenizer", "shard", "pretrain"} <= built
