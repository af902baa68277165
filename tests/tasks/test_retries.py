"""What a machine does to a stage is tried again, what config, code or data do is not: what libraries really raise."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed

from infra.errors import Problem, StageError
from infra.launch.config import LaunchConfig
from infra.launch.ranks import Ended
from infra.launch.training import run_ranks
from tasks.processes.child import ChildOutcome, Job, _all_ranks
from tasks.processes.failures import failure_of
from tasks.retries import worth_another_try
from tests.support.programs.command import REPOSITORY, Answer
from training.trainer.microbatch import out_of_memory

Run = Callable[..., Answer]

NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled system error (run with"
    " NCCL_DEBUG=INFO for details), NCCL version 2.26.2\nncclSystemError: System call (e.g. socket, malloc) failed."
)
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8, OpType=ALLREDUCE) ran for 600029"
    " milliseconds before timing out."
)
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:21930"
MESH = "Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"
LAUNCH_FAILURE = "CUDA error: unspecified launch failure\nCUDA kernel errors might be asynchronously reported"
ECC = "CUDA error: uncorrectable ECC error encountered"
ASSERT = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."


@pytest.mark.parametrize(
    ("error", "code", "again"),
    [
        (RuntimeError(ECC), "device_fault", True),
        (RuntimeError(LAUNCH_FAILURE), "device_fault", True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "device_fault", True),
        (torch.distributed.DistBackendError(NCCL), "ranks_disconnected", True),
        (torch.distributed.DistBackendError(WATCHDOG), "ranks_disconnected", True),
        (torch.distributed.DistNetworkError("The client socket has failed to connect"), "ranks_disconnected", True),
        (RuntimeError(GLOO), "ranks_disconnected", True),
        (RuntimeError(MESH), "ranks_disconnected", True),
        (MemoryError(), "out_of_memory", True),
        (RuntimeError("DataLoader worker (pid(s) 16830, 7) exited unexpectedly"), "killed", True),
        (RuntimeError("DataLoader worker (pid 16830) is killed by signal: Killed. "), "killed", True),
        (RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details…"), "crashed", False),
        (RuntimeError(ASSERT), "crashed", False),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), "crashed", False),
        (torch.distributed.DistBackendError("ncclInvalidUsage: usually reflects invalid usage"), "crashed", False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "device_out_of_memory", False),
        (RuntimeError("CUDA error: out of memory"), "device_out_of_memory", False),
        (AssertionError("shapes"), "crashed", False),
        (ValueError("the text says NCCL error"), "crashed", False),
    ],
)
def test_what_a_library_raises_is_told_by_whose_fault_it_is(error: Exception, code: str, again: bool) -> None:
    wrapped = RuntimeError("training failed")
    wrapped.__cause__ = error
    for one in (error, wrapped):
        failure = failure_of(one, "pretrain", Path("/store"))
        assert worth_another_try(failure) == again
        assert failure.problems[0].code == code
        assert failure.problems[0].fix


def test_memory_of_a_device_is_worth_another_try_only_with_a_smaller_microbatch() -> None:
    assert worth_another_try(out_of_memory(4, auto=True))
    assert not worth_another_try(out_of_memory(4, auto=False))
    assert not worth_another_try(out_of_memory(1, auto=True))


def test_a_hang_that_the_watchdog_found_is_worth_another_try(tmp_path: Path) -> None:
    hangs = "import os, time; from infra.launch.heartbeat import Heartbeat; h = Heartbeat(0); h.beat(1, 'forward pass')"
    launch = LaunchConfig(hang_s=0.2, restarts=0)
    with pytest.raises(StageError) as caught:
        command = [sys.executable, "-c", f"{hangs}; time.sleep(600)"]
        run_ranks(command, launch, tmp_path, lambda: False, lambda name, told: None)
    assert caught.value.problems[0].code == "hang"
    assert worth_another_try(caught.value)


def test_a_rank_that_stops_for_a_signal_from_elsewhere_is_worth_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(*_: object) -> list[Ended]:
        ChildOutcome("cancelled", {}, "", []).write(tmp_path / "outcome.rank1.json")
        return [Ended(1, 1)]

    monkeypatch.setattr("tasks.processes.child.run_ranks", run_ranks)
    job = Job("pretrain", "pretrain", {}, {"processes": 2, "device": "cpu"}, {}, "", str(tmp_path))
    outcome = _all_ranks(job, tmp_path / "job.json", lambda: False)
    assert outcome.status == "failed" and worth_another_try(StageError(Problem(**outcome.problems[0])))
    assert outcome.problems[0]["message"].startswith("rank 1: its process was killed by SIGTERM")
    assert _all_ranks(job, tmp_path / "job.json", lambda: True).status == "cancelled", "when the run itself stops it"


def faulty(run: Run, folder: Path, faults: list[str], *settings: str) -> Answer:
    """A run whose stage `tokenizer` fails with these, one a try."""
    told = json.dumps({"stage": "tokenizer", "done": str(folder / "done"), "raise": faults})
    path = os.pathsep.join([str(REPOSITORY / "tests" / "faults"), str(REPOSITORY)])
    options = ("--force", "tokenizer", "--set", "launch.retry_wait_s=0", *settings)
    return run(
        "run", folder / "config.yaml", "--root", folder / "store", *options, STEMMA_TEST_FAULTS=told, PYTHONPATH=path
    )


def test_faults_of_machines_are_tried_again_up_to_launch_retries(run: Run, data_pipeline: Path) -> None:
    shutil.rmtree(data_pipeline / "store" / "tokenizer")  # one of the same bytes would stay in place of the new
    faults = [f"RuntimeError({ECC!r})", "MemoryError()"]
    answer = faulty(run, data_pipeline, faults, "--set", "launch.retries=2")
    assert answer.code == 0, answer.document["errors"]
    assert answer.with_status("built") == {"tokenizer"}
    for told in ("uncorrectable ECC", "(retry 1 of 2)", "out of memory", "(retry 2 of 2)"):
        assert told in answer.stderr
    told = (Path(answer.rows()["tokenizer"]["path"]) / "aux" / "events.jsonl").read_text()
    first, second = (one["message"] for one in map(json.loads, told.splitlines()) if one["name"] == "failed")
    assert "uncorrectable ECC" in first and "out of memory" in second, "what was built tells of every try"


@pytest.mark.long
def test_a_stage_that_stops_for_a_signal_from_elsewhere_is_tried_again(run: Run, data_pipeline: Path) -> None:
    """SIGTERM to the process of a stage ended the whole run as cancelled, although no user had cancelled it."""
    os_module, errors = "__import__('os')", "__import__('infra.errors', fromlist=['errors'])"
    stops = f"{os_module}.kill({os_module}.getpid(), 15) or {errors}.Cancelled()"
    answer = faulty(run, data_pipeline, [stops])
    assert answer.code == 0, answer.document["errors"]
    assert "its process was killed by SIGTERM, sent from outside" in answer.stderr and "trying again" in answer.stderr


@pytest.mark.long
def test_an_error_of_use_is_said_at_once(run: Run, data_pipeline: Path) -> None:
    """The risk: a stage is tried again though its table of failures marks it as not worth it."""
    answer = faulty(run, data_pipeline, [f"RuntimeError({ASSERT!r})"])
    assert answer.code == 1
    (problem,) = answer.document["errors"]
    assert (problem["code"], problem["path"]) == ("crashed", "tokenizer")
    assert "device-side assert" in problem["message"]
    assert "trying again" not in answer.stderr


def test_output_that_has_no_room_is_a_full_disk_though_there_is_room_again(run: Run, data_pipeline: Path) -> None:
    """Python ends with 120 where it cannot write out what was printed."""
    answer = faulty(run, data_pipeline, ["SystemExit(120)"])
    (problem,) = answer.document["errors"]
    assert answer.code == 1 and problem["code"] == "disk_full" and "MB free" in problem["message"]


@pytest.mark.parametrize("left", [None, b"", b'{"status": "bui'])
def test_half_an_outcome_is_none(tmp_path: Path, left: bytes | None) -> None:
    """Its process was killed while it wrote, or the disk was full: what of the two is found out from elsewhere."""
    if left is not None:
        (tmp_path / "outcome.json").write_bytes(left)
    assert ChildOutcome.read(tmp_path / "outcome.json") is None
