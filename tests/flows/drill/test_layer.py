"""The layer between programs and this machine: what it refuses, what a power loss takes, and what it leaves alone."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from flows.drill.layer import BROKEN, FULL, READ_ONLY, FaultLayer, missing
from flows.drill.power import lose_power, notes_of
from tasks.processes import exits
from tasks.processes.exits import NO_ROOM
from tests.support.programs.command import REPOSITORY

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture
def layer(tmp_path: Path) -> FaultLayer:
    (tmp_path / "store").mkdir()
    return FaultLayer(tmp_path / "layer", tmp_path / "store")


def run(layer: FaultLayer, program: str) -> str:
    """Return the output of a program that works in the folder, under the layer."""
    env = {**os.environ, **layer.variables}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=layer.folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WRITES = """
for action in (lambda: open("new", "w"), lambda: open("old", "a").write("x"), lambda: __import__("os").mkdir("made"),
               lambda: __import__("os").rename("old", "other"), lambda: open("old").read()):
    try:
        action()
        print(0, end=" ")
    except OSError as error:
        print(error.errno, end=" ")
"""


@pytest.mark.parametrize(("error", "reads"), [(FULL, False), (READ_ONLY, False), (BROKEN, True)])
def test_a_disk_fails_below_the_folder_and_nowhere_else(
    layer: FaultLayer, error: int, reads: bool, tmp_path: Path
) -> None:
    (layer.folder / "old").write_text("old")
    layer.order(error, reads=reads)
    # A full disk has room for another name.
    renamed = error == FULL
    *writes, rename, read = map(int, run(layer, WRITES).split())
    assert (writes, rename) == ([error] * 3, 0 if renamed else error)
    assert read == (error if reads else errno.ENOENT if renamed else 0)
    assert [path.name for path in layer.folder.iterdir()] == ["other" if renamed else "old"]
    assert run(layer, f"open({str(tmp_path / 'elsewhere')!r}, 'w').write('x'); print('written')") == "written"
    room = "import shutil; print(shutil.disk_usage('.').free, shutil.disk_usage('/').free > 0)"
    free, elsewhere = run(layer, room).split()
    assert (free == "0", elsewhere) == (error == FULL, "True")
    layer.order()
    assert run(layer, WRITES).split()[0] == "0"


def test_the_clock_jumps_and_the_network_is_cut(layer: FaultLayer) -> None:
    program = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
try:
    socket.create_connection(server.getsockname()).send(b"x")
    print(0)
except OSError as error:
    print(error.errno)
print(int(time.time()))
"""
    reachable, now = map(int, run(layer, program).split())
    layer.order(cut=True, clock_s=7200)
    cut, later = map(int, run(layer, program).split())
    assert (reachable, cut) == (0, errno.ENETUNREACH)
    assert 7200 <= later - now < 8000


WORK = """
import os
def put(name, text, synced, mode="w"):
    with open(name, mode) as file:
        file.write(text)
        file.flush()
        if synced:
            os.fsync(file.fileno())
put("synced", "kept", True)
put("changed", "XX", False, "r+")
put("longer", " and more", False, "a")
put("emptied", "", False)
put("fresh.hidden", "whole", False)
os.rename("fresh.hidden", "fresh")
put("last", "kept", True)
os.unlink("removed")
os.mkdir("folder")
"""
BEFORE = {"changed": "abcd", "longer": "old", "emptied": "full", "removed": "there"}


def after_power_loss(layer: FaultLayer, seed: int) -> dict[str, str]:
    for path in layer.folder.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    for name, text in BEFORE.items():
        (layer.folder / name).write_text(text)
    layer.notes.unlink(missing_ok=True)
    layer.order(records=True)
    run(layer, WORK)
    layer.order()
    lose_power(notes_of(layer.notes), layer.folder, layer.graves, random.Random(seed))
    return {path.name: path.read_text() if path.is_file() else "a folder" for path in layer.folder.iterdir()}


def test_a_power_loss_takes_what_was_not_synced_and_nothing_else(layer: FaultLayer) -> None:
    left = [after_power_loss(layer, seed) for seed in range(12)]
    assert all(contents["synced"] == contents["last"] == "kept" for contents in left)
    # Bytes: each file has its old content or its new one, and both happen.
    for name, possible in {
        "changed": {"abcd", "XXcd"},
        "longer": {"old", "old and more"},
        "emptied": {"full", ""},
        # A file without an fsync under its final name, the fault that `rename` alone does not prevent.
        "fresh": {"", "whole"},
    }.items():
        assert {contents[name] for contents in left} == possible, name
    # Names after the last fsync: any number of them, in their order.
    assert {("removed" in contents, "folder" in contents) for contents in left} == {
        (True, False),
        (False, False),
        (False, True),
    }


def in_two_parts(layer: FaultLayer, first: str, second: str, error: int) -> list[str]:
    """Return the outputs of the two parts of a program, while the disk fails, and after that."""
    program = f"import sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n{first}\nsys.stdin.readline()\n{second}\n"
    env = {**os.environ, **layer.variables}
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=layer.folder, env=env, text=True, stdin=subprocess.PIPE, stdout=-1
    ) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        layer.order(error, reads=error == BROKEN)
        process.stdin.write("\n")
        process.stdin.flush()
        during = process.stdout.readline()
        layer.order()
        process.stdin.write("\n")
        process.stdin.flush()
        return [during.strip(), process.stdout.read().strip()]


def test_a_follower_reads_on_when_the_disk_works_again(layer: FaultLayer) -> None:
    """A run whose disk failed for a moment was not shown any more, and its follower printed a traceback."""
    (layer.folder / "journal").write_text("one\ntwo\n")
    begin = (
        "from pathlib import Path\nfrom infra.process.tail import Tail\ntail = Tail(Path('journal'))\nprint(flush=True)"
    )
    look = "print(len(tail.lines()), flush=True)"
    assert in_two_parts(layer, begin, f"{look}\nsys.stdin.readline()\n{look}", BROKEN) == ["0", "2"]


@pytest.mark.parametrize("error", [FULL, READ_ONLY, BROKEN])
def test_a_run_whose_journal_cannot_be_written_still_knows_how_it_ended(layer: FaultLayer, error: int) -> None:
    """A disk that failed or became read-only ended a run without a result, and without the reason; and the command,
    which reads it with another journal than the run's, reported the run as lost."""
    begin = """
from pathlib import Path
from flows.runs.journal import RunJournal, JournalRow
journal = RunJournal(Path("runs"), "run")
journal.begin(pipeline="pipeline")
print(flush=True)
"""
    end = """
journal.row(JournalRow("clean", "failed"))
journal.traceback("clean", "text")
journal.end({"status": "failed", "stages": [], "errors": []})
print(RunJournal(Path("runs"), "run").result()["status"], journal.rows["clean"].status, flush=True)
sys.stdin.readline()
journal.row(JournalRow("clean", "built", fingerprint="0" * 16, digest="0" * 64))
print(journal.read()[-1]["status"])
"""
    assert in_two_parts(layer, begin, end, error) == ["failed failed", "built"]


@pytest.mark.parametrize(("error", "code"), [(FULL, NO_ROOM), (READ_ONLY, exits.READ_ONLY), (BROKEN, exits.BROKEN)])
def test_a_stage_that_cannot_write_its_outcome_names_the_disk(layer: FaultLayer, error: int, code: int) -> None:
    """A disk that became read-only, or failed, while a stage worked was reported as a crash of the stage."""
    begin = """
from pathlib import Path
from tasks.processes import child
job = child.Job("clean", "clean", {}, {"device": "cpu"}, {}, "out", ".")
job.write(Path("job.json"))
child.Job.read = lambda path: job
print(flush=True)
"""
    end = "print(child.main('job.json'), flush=True)\nsys.stdin.readline()"
    assert in_two_parts(layer, begin, end, error)[0] == str(code)


@pytest.mark.parametrize("error", [FULL, READ_ONLY, BROKEN])
def test_a_message_to_lineage_that_cannot_be_written_ends_no_run(layer: FaultLayer, error: int) -> None:
    """A disk that became read-only ended a run as lost, when it recorded for MLflow how it had ended."""
    begin = """
from pathlib import Path
from types import SimpleNamespace
from infra.lineage.messages import StageFinished
from infra.lineage.outbox import Outbox
from tasks.building.context import BuildContext
outbox = Outbox(Path("."))
context = SimpleNamespace(outbox=outbox)
message = StageFinished("build", "FAILED", 1.0, {}, "", "")
print(flush=True)
"""
    end = "BuildContext.tell(context, message)\nprint('goes on', flush=True)\nsys.stdin.readline()"
    assert in_two_parts(
        layer, begin, f"{end}\nBuildContext.tell(context, message)\nprint(outbox.pending())", error
    ) == [
        "goes on",
        "1",
    ]
