"""A training stage's process with `launch.processes: 2`: it starts its ranks, and tells how they failed.

That they build one artifact, stop together and go on is in flows/test_crash.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import tests.support.programs.command
from infra.process.lifetime import signal_group
from infra.run import read_journal
from tasks.processes.child import OUTCOME, ChildOutcome, Job
from tests.support.programs.command import environment
from tests.support.programs.processes import gone, wait_until

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
        [sys.executable, "-m", "tasks.processes.child", str(job)],
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


@pytest.mark.long
def test_a_failing_rank_is_named_with_its_error(tmp_path: Path, shards_dir: Path, tokenizer_dir: Path) -> None:
    """The risk: the error of one rank among those that are only told to end. tests/infra/launch has it untrained."""
    with _running(_job(tmp_path, shards_dir, tokenizer_dir, global_batch_tokens=32 * 5)) as child:
        _, log = child.communicate(timeout=tests.support.programs.command.patience_s)
    outcome = ChildOutcome.read(tmp_path / "scratch" / OUTCOME)
    assert outcome is not None and child.returncode == 1, log
    (problem,) = outcome.problems
    assert problem["code"] == "not_divisible"
    assert problem["message"].startswith("rank ") and "2 ranks can share" in problem["message"]


@pytest.mark.long
def test_a_stopped_rank_is_named_and_all_start_again(tmp_path: Path, shards_dir: Path, tokenizer_dir: Path) -> None:
    """SIGSTOP to one, in the middle of training. The risk: a rank that hangs in a collective, for which a watchdog of
    tests/infra/launch has processes that only sleep."""
    changes = {"duration": "400 batches", "checkpoint_every": "50 batches", "evaluate_every": "1000 batches"}
    with _running(_job(tmp_path, shards_dir, tokenizer_dir, {"hang_s": 20.0}, **changes)) as child:
        wait_until(lambda: list((tmp_path / "scratch" / "checkpoints").glob("ba*")))
        (rank,) = [process for process in psutil.Process(child.pid).children() if process.environ().get("RANK") == "1"]
        rank.send_signal(signal.SIGSTOP)
        _, log = child.communicate(timeout=tests.support.programs.command.patience_s)
    outcome = ChildOutcome.read(tmp_path / "scratch" / OUTCOME)
    assert outcome is not None and outcome.status == "built" and outcome.figures["batches"] == 400, (outcome, log)
    (said,) = [line["message"] for line in _journal(tmp_path) if line.get("name") == "restarted"]
    assert "rank 1 hangs" in said and "was stopped" in said
    assert gone(rank)


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["composer", "native"])
def test_a_rank_whose_loader_is_lost_ends_at_once(
    tmp_path: Path, shards_dir: Path, tokenizer_dir: Path, trainer: str
) -> None:
    """The risk: a rank that, on its way out with an error, waits for the others, which wait for its gradients."""
    changes = {"duration": "4000 batches", "checkpoint_every": "50 batches", "evaluate_every": "10000 batches"}
    launch = {"loader_workers": 1, "trainer": trainer}
    with _running(_job(tmp_path, shards_dir, tokenizer_dir, launch, **changes)) as child:
        wait_until(lambda: list((tmp_path / "scratch" / "checkpoints").glob("ba*")))
        (rank,) = [process for process in psutil.Process(child.pid).children() if process.environ().get("RANK") == "1"]
        (worker,) = [process for process in rank.children() if process.name().startswith("pt_data_worker")]
        worker.send_signal(signal.SIGTERM)
        _, log = child.communicate(timeout=60)
    outcome = ChildOutcome.read(tmp_path / "scratch" / OUTCOME)
    assert outcome is not None and child.returncode == 1, log
    (problem,) = outcome.problems
    assert problem["code"] == "killed" and problem["message"].startswith("rank 1"), problem
