"""Work by partition: the same results for any number of workers, continued after a crash, errors as they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from infra.errors import Cancelled, StageError, stage_error
from infra.launch.config import LaunchConfig
from infra.process.pace import Pace, read_reports, report, report_file
from infra.process.partitions import map_partitions, partition_folder
from infra.run import Run
from tests.support.programs.command import REPOSITORY, environment
from tests.support.programs.processes import gone, wait_until


def square(factor: int, item: int, out: Path) -> dict[str, int]:
    (out / "square.txt").write_text(str(factor * item * item))
    return {"square": factor * item * item, "process": os.getpid()}


def fail_from(first: int, item: int, out: Path) -> dict[str, int]:
    if item >= first:
        raise stage_error("broken_item", f"item:{item}", "cannot be done")
    return {}


def die(item: int, out: Path) -> dict[str, int]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def count_calls(log: Path, item: int, out: Path) -> dict[str, int]:
    with log.open("a") as file:
        file.write(f"{item}\n")
    return {"item": item}


def hang_at_last(log: Path, last: int, item: int, out: Path) -> dict[str, int]:
    """Hangs while a file says so, having left half a result, as a partition under way when its process is killed."""
    (out / "half").touch()
    if item == last and log.with_suffix(".hang").exists():
        log.with_suffix(".hanging").touch()
        signal.pause()
    return count_calls(log, item, out)


def run_with(folder: Path, workers: int, **kwargs: Any) -> Run:
    return Run(folder, LaunchConfig(workers=workers), **kwargs)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_come_in_item_order_whatever_the_workers(tmp_path, workers):
    run = run_with(tmp_path, workers)
    found = map_partitions(run, "squares", partial(square, 2), range(7))
    assert [summary["square"] for summary in found] == [0, 2, 8, 18, 32, 50, 72]
    texts = [(partition_folder(run, "squares", index) / "square.txt").read_text() for index in range(7)]
    assert texts == ["0", "2", "8", "18", "32", "50", "72"]
    assert (os.getpid() in {summary["process"] for summary in found}) == (workers == 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_error_of_the_first_failing_item_is_raised_as_it_is(tmp_path, workers):
    with pytest.raises(StageError) as caught:
        map_partitions(run_with(tmp_path, workers), "broken", partial(fail_from, 3), range(9))
    assert [problem.path for problem in caught.value.problems] == ["item:3"]


def test_what_was_done_before_an_error_is_not_done_again(tmp_path):
    log = tmp_path / "calls"
    run = run_with(tmp_path / "work", 1)
    first = map_partitions(run, "step", partial(count_calls, log), range(3))
    again = map_partitions(run, "step", partial(count_calls, log), range(5))
    assert log.read_text().split() == ["0", "1", "2", "3", "4"]
    assert again[:3] == first


def test_other_work_in_the_same_folder_is_not_taken_for_this(tmp_path):
    run = run_with(tmp_path, 1)
    map_partitions(run, "squares", partial(square, 1), range(2))
    assert [found["square"] for found in map_partitions(run, "squares", partial(square, 3), range(2))] == [0, 3]


def test_a_killed_worker_is_named(tmp_path):
    with pytest.raises(StageError, match="out of memory"):
        map_partitions(run_with(tmp_path, 2), "fatal", die, range(2))


def test_cancelling_stops_before_the_next_partition(tmp_path):
    log = tmp_path / "calls"
    run = run_with(tmp_path / "work", 1, is_cancelled=lambda: log.exists())
    with pytest.raises(Cancelled):
        map_partitions(run, "step", partial(count_calls, log), range(5))
    assert log.read_text().split() == ["0"]


def test_killed_work_continues_at_the_partition_and_leaves_no_process(tmp_path):
    log, work = tmp_path / "calls", tmp_path / "work"
    log.with_suffix(".hang").touch()
    script = tmp_path / "program.py"
    script.write_text(
        "import sys; from functools import partial; from pathlib import Path\n"
        "from infra.process.partitions import map_partitions\n"
        "from tests.infra.process.test_partitions import hang_at_last, run_with\n"
        "if __name__ == '__main__':\n"
        "    log, work = map(Path, sys.argv[1:])\n"
        "    map_partitions(run_with(work, 2), 'step', partial(hang_at_last, log, 4), range(5))\n"
    )
    process = subprocess.Popen([sys.executable, script, log, work], env=environment(), cwd=REPOSITORY)
    wait_until(lambda: log.with_suffix(".hanging").exists() and len(list((work / "step").glob("*/done.json"))) == 4)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    wait_until(lambda: all(map(gone, workers)))
    log.with_suffix(".hang").unlink()
    journal = StringIO()

    found = map_partitions(run_with(work, 2, journal=journal), "step", partial(hang_at_last, log, 4), range(5))

    assert [summary["item"] for summary in found] == [0, 1, 2, 3, 4]
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3", "4"]
    assert "continuing step: 4 of 5 partitions are done" in journal.getvalue()


@pytest.mark.parametrize("left", [b"", None])
def test_a_partition_that_a_power_cut_took_bytes_of_is_done_again(tmp_path: Path, left: bytes | None) -> None:
    run = run_with(tmp_path, 1)
    map_partitions(run, "step", partial(square, 2), range(3))
    lost = partition_folder(run, "step", 1) / "square.txt"
    lost.unlink()
    if left is not None:
        lost.write_bytes(left)
    journal = StringIO()
    map_partitions(run_with(tmp_path, 1, journal=journal), "step", partial(square, 2), range(3))
    assert lost.read_text() == "2"
    assert "continuing step: 2 of 3 partitions are done" in journal.getvalue()


def test_work_has_the_same_name_in_every_process():
    program = (
        "from functools import partial; from corpus.config import IngestConfig\n"
        "from corpus.ingest import read_partition; from infra.process.partitions import _keys\n"
        "config = IngestConfig(read=[{'kind': 'files', 'paths': ['a', 'b'], 'language': 'en', 'content': 'html'}])\n"
        "print(*_keys(partial(read_partition, config), [('item', 1)]))"
    )
    keys = {
        subprocess.check_output([sys.executable, "-c", program], env=environment(PYTHONHASHSEED=seed), cwd=REPOSITORY)
        for seed in ("1", "2", "3")
    }
    assert len(keys) == 1


def test_progress_counts_what_is_under_way(tmp_path):
    journal = StringIO()
    with Pace(Run(tmp_path, journal=journal), "documents", 100) as pace:
        pace.add(10, 2_000_000, documents=1234)
        out = tmp_path / "00001.unfinished"
        report(out, 15, 1_000_000)
        pace.watch(lambda: read_reports([report_file(out)]))
    [last] = [json.loads(line) for line in journal.getvalue().splitlines()][-1:]
    assert (last["done"], last["total"], last["unit"]) == (25, 100, "documents")
    assert last["note"] == "1,234 documents", "neither a rate nor a time left from less than a second"


def test_rates_and_times_left_are_reported_when_they_mean_something(tmp_path):
    """The clock begins with the first progress, not with the start of the workers."""
    pace = Pace(Run(tmp_path), "bytes", 1000)
    speed = pace._speed
    assert speed(100.0, 0, 0) == [] and speed(160.0, 1, 1e6) == [], "a minute of imports is no rate"
    assert speed(164.9, 50, 50e6) == []
    assert speed(170.0, 5, 21e6) == ["2.0 MB/s"], "too little is done to say when the rest will be"
    assert speed(170.0, 201, 21e6) == ["2.0 MB/s", "40 s left"]
    assert speed(260.0, 1000, 1e6 + 2e6) == ["20.0 kB/s"]
