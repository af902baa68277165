"""A training stage's process with `launch.processes: 2`: it starts its ranks, and tells how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.process import signal_group
from infra.run import read_journal
from tasks.child import OUTCOME, Job, Outcome
from tests.command import environment
from tests.processes import gone, wait_until

CONFIG: dict[str, Any] = {
    "model": {"family": "llama", "layers": 1, "width": 16, "heads": 2, "positions": 64},
    "duration": "6 batches",
    "global_batch_tokens": 256,
}


def _job(folder: Path, shards: Path, tokenizer: Path, launch: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    scratch, out = folder / "scratch", folder / "artifact"
    scratch.mkdir()
    (out / "aux").mkdir(parents=True)
    launch = {"processes": 2, "device": "cpu", "threads": 1, **(launch or {})}
    inputs = {"shards": str(shards), "tokenizer": str(tokenizer)}
    Job("pretrain", "pretrain", CONFIG | changes, launch, inputs, str(out), str(scratch)).write(scratch / "job.json")
    return scratch / "job.json"


@contextmanager
def _running(job: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the stage, the head of a group that is gone afterwards."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tasks.child", str(job)],
        start_new_session=True,
        stderr=subprocess.PIPE,
        env=environment(OMP_NUM_THREADS="1"),
    )
    try:
        yield child
    finally:
        signal_group(child.pid, signal.SIGKILL)
        child.wait()


def _journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "scratch" / "journal.jsonl"
    return read_journal(path) if path.exists() else []


def _last_step(folder: Path) -> int:
    """The last batch that the journal tells of; 0 before the first."""
    return max((line["step"] for line in _journal(folder) if "train/loss" in line.get("values", {})), default=0)


def test_ranks_build_one_artifact_and_speak_once(tmp_path: Path, shards_dir: Path, tokenizer_dir: Path) -> None:
    with _running(_job(tmp_path, shards_dir, tokenizer_dir)) as child:
        _, log = child.communicate(timeout=240)
    outcome = Outcome.read(tmp_path / "scratch" / OUTCOME)
    assert outcome is not None and outcome.status == "built", (outcome, log)
    assert outcome.figures["batches"] == 6
    assert (tmp_path / "artifact" / "model.safetensors").exists()
    assert [line["step"] for line in _journal(tmp_path) if "train/loss" in line.get("values", {})] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_failing_rank_is_named_with_its_error(tmp_path: Path, shards_dir: Path, tokenizer_dir: Path) -> None:
    with _running(_job(tmp_path, shards_dir, tokenizer_dir, global_batch_tokens=32 * 5)) as child:
        _, log = child.communicate(timeout=240)
    outcome = Outcome.read(tmp_path / "scratch" / OUTCOME)
    assert outcome is not None and child.returncode == 1, log
    (problem,) = outcome.problems
    assert problem["code"] == "not_divisible"
    assert problem["message"].startswith("rank ") and "2 ranks can share" in problem["message"]


def test_ranks_told_to_stop_save_where_they_are_and_the_next_run_continues_there(
    tmp_path: Path, shards_dir: Path, tokenizer_dir: Path
) -> None:
    """SIGTERM to the whole group, as a scheduler sends it that takes the machine back; twice."""
    changes = {"duration": "9000 batches", "checkpoint_every": "9000 batches", "evaluate_every": "9000 batches"}
    job = _job(tmp_path, shards_dir, tokenizer_dir, **changes)
    saved_at = [0]
    for _ in range(2):
        with _running(job) as child:
            wait_until(lambda: _last_step(tmp_path) > saved_at[-1], timeout_s=240)
            ranks = psutil.Process(child.pid).children()
            os.killpg(child.pid, signal.SIGTERM)
            _, log = child.communicate(timeout=60)
        outcome = Outcome.read(tmp_path / "scratch" / OUTCOME)
        assert outcome is not None and outcome.status == "cancelled", (outcome, log)
        assert len(ranks) == 2 and all(map(gone, ranks))
        saved_at.append(_last_step(tmp_path))
    saved = {int(path.name[2:]) for path in (tmp_path / "scratch" / "checkpoints").glob("ba*")}
    assert saved == set(saved_at[1:])
    (continued,) = [line["message"] for line in _journal(tmp_path) if line.get("name") == "continued"]
    assert f"at batch {saved_at[1]:,} of" in continued


@pytest.mark.long
def test_a_stopped_rank_is_named_and_all_start_again(tmp_path: Path, shards_dir: Path, tokenizer_dir: Path) -> None:
    """SIGSTOP to one, in the middle of training."""
    changes = {"duration": "400 batches", "checkpoint_every": "50 batches", "evaluate_every": "1000 batches"}
    with _running(_job(tmp_path, shards_dir, tokenizer_dir, {"hang_s": 20.0}, **changes)) as child:
        wait_until(lambda: list((tmp_path / "scratch" / "checkpoints").glob("ba*")), timeout_s=240)
        (rank,) = [one for one in psutil.Process(child.pid).children() if one.environ().get("RANK") == "1"]
        rank.send_signal(signal.SIGSTOP)
        _, log = child.communicate(timeout=400)
    outcome = Outcome.read(tmp_path / "scratch" / OUTCOME)
    assert outcome is not None and outcome.status == "built" and outcome.figures["batches"] == 400, (outcome, log)
    (said,) = [line["message"] for line in _journal(tmp_path) if line.get("name") == "restarted"]
    assert "rank 1 hangs" in said and "was stopped" in said
    assert gone(rank)
