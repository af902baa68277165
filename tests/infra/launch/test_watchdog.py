"""A rank that hangs is named with the place where it does, and all start again; real processes, real signals."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.infra.launch.launcher import launch

# Batches in step: each waits for the other in the "backward pass", as an all-reduce does. What is done is written down,
# as a checkpoint would, and a new start continues after it.
TRAINING = """
from infra.launch.heartbeat import Heartbeat
heart = Heartbeat(int(rank))
folder = Path(sys.argv[1])
other = str(1 - int(rank))

def meet(batch):
    (folder / f"met.{attempt}.{batch}.{rank}").touch()
    while not (folder / f"met.{attempt}.{batch}.{other}").exists():
        time.sleep(0.005)

def stuck_here():
    time.sleep(600)

attempt = len(list(folder.glob(f"attempt.*.{rank}")))
(folder / f"attempt.{attempt}.{rank}").touch()
done = len(list(folder.glob("done.*")))
if rank == "1":
    (folder / f"pid.{attempt}").write_text(str(os.getpid()))
for batch in range(done, 6):
    heart.beat(batch, "forward pass")
    if batch == 3 and rank == "1" and attempt < HANGS:
        HOW
    heart.beat(batch, "backward pass")
    meet(batch)
    (folder / f"done.{batch}").touch()
    heart.beat(batch, "between batches")
heart.beat(6, "not watched")
print("finished after", done, flush=True)
"""


def _program(how: str, hangs: int) -> str:
    return TRAINING.replace("HOW", how).replace("HANGS", str(hangs))


def test_a_rank_that_sleeps_is_named_with_its_line_and_all_start_again(tmp_path: Path) -> None:
    out, err = launch(tmp_path, _program("stuck_here()", hangs=1), hang_s=1.0).communicate(timeout=60)
    assert "rank 1 hangs in the forward pass of batch 4, at stuck_here" in out
    assert "starting all ranks again from the newest checkpoint (1 of 2)" in out
    assert "[Ended(rank=0, code=0), Ended(rank=1, code=0)]" in out
    assert err.count("finished after 3") == 2
    assert "stacks of rank 0:" in err and "in meet" in err, "the others' stacks too"
    assert "stacks of rank 1:" in err and "in stuck_here" in err


def test_a_stopped_rank_is_named_and_all_start_again(tmp_path: Path) -> None:
    """One that is stopped writes no stack until it is woken, and hears no SIGTERM."""
    stop = "os.kill(os.getpid(), signal.SIGSTOP); stuck_here()"
    launcher = launch(tmp_path, "import signal\n" + _program(stop, hangs=1), hang_s=1.0)
    out, err = launcher.communicate(timeout=60)
    assert "rank 1 hangs in the forward pass of batch 4 (its process was stopped)" in out
    assert err.count("finished after 3") == 2
    assert "stacks of rank 1:\nnone came" not in err


def test_a_rank_that_left_without_an_error_is_named_and_all_start_again(tmp_path: Path) -> None:
    """It has no stacks to write, and the stage ended with an error of its launcher."""
    out, err = launch(tmp_path, _program("os._exit(0)", hangs=1), hang_s=1.0).communicate(timeout=60)
    assert "rank 1 hangs in the forward pass of batch 4 (its process has ended)" in out
    assert "[Ended(rank=0, code=0), Ended(rank=1, code=0)]" in out
    assert "stacks of rank 0:" in err and "in meet" in err


def test_new_starts_are_bounded(tmp_path: Path) -> None:
    launcher = launch(tmp_path, _program("stuck_here()", hangs=9), hang_s=0.7, restarts=1)
    out, _ = launcher.communicate(timeout=60)
    assert out.count("starting all ranks again") == 1
    assert out.strip().splitlines()[-1].startswith("launch.hang_s: rank 1 hangs in the forward pass of batch 4")
    assert "after 1 new starts" in out
    assert not [pid for pid in tmp_path.glob("pid.*") if psutil.pid_exists(int(pid.read_text()))]
