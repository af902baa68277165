"""Which folders a command takes for a store, and what it leaves there."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cli.common.output import as_json
from infra.errors import StageError
from infra.store.store import Store
from tests.support.programs.command import Answer
from tests.support.services.small_disk import fill, small_disk

Run = Callable[..., Answer]

READING = {
    "check": ["check", "CONFIG"],
    "status": ["status"],
    "status of a pipeline": ["status", "CONFIG"],
    "why": ["why", "CONFIG", "clean"],
    "logs": ["logs"],
    "lineage": ["lineage", "tokenizer"],
    "lineage --down": ["lineage", "--down", "tokenizer"],
    "verify": ["verify", "tokenizer"],
    "gc": ["gc"],
    "gc --yes": ["gc", "--yes"],
    "gc --pin": ["gc", "--pin", "tokenizer"],
    "chat": ["chat", "sft"],
    "down": ["down"],
}
WRITING = {
    "run": ["run", "CONFIG"],
    "adopt": ["adopt", "sft", "FOLDER"],
    "up": ["up"],
    "lineage --rebuild": ["lineage", "--rebuild"],
    "deploy": ["deploy", "CONFIG"],
    "schedule": ["schedule", "CONFIG"],
}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file with its content, every folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")
    }


def ask(run: Run, words: list[str], config: Path, root: Path) -> Answer:
    named = {"CONFIG": str(config), "FOLDER": str(config.parent)}
    return run(*(named.get(word, word) for word in words), "--root", root)


@pytest.mark.parametrize("command", READING)
def test_a_command_that_reads_makes_no_store(run: Run, built_data: Path, tmp_path: Path, command: str) -> None:
    answer = ask(run, READING[command], built_data / "config.yaml", tmp_path / "absent" / "store")
    assert answer.code in (0, 2), answer.document
    assert not any(error["code"] == "crashed" for error in answer.document["errors"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", READING | WRITING)
def test_a_folder_that_is_no_store_is_refused_and_left_alone(
    run: Run, built_data: Path, tmp_path: Path, command: str
) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "to-a-friend.txt").write_text("Dear friend")
    before = tree(tmp_path)
    answer = ask(run, (READING | WRITING)[command], built_data / "config.yaml", tmp_path)
    assert answer.code == 2
    (error,) = answer.document["errors"]
    assert (error["code"], error["path"]) == ("not_a_store", str(tmp_path))
    assert "letters" in error["message"]
    assert tree(tmp_path) == before


def test_a_store_that_is_read_stays_as_it_is(run: Run, built_data: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(built_data / "store", root, ignore=shutil.ignore_patterns(".state", "lineage", "mlflow", "servers"))
    before = tree(root)
    for command in ("check", "status of a pipeline", "why", "logs", "lineage", "verify", "gc"):
        answer = ask(run, READING[command], built_data / "config.yaml", root)
        assert answer.code == 0, (command, answer.document)
    assert tree(root) == before


@pytest.mark.parametrize("there", ["lost+found", "servers", "runs", ".state"])
def test_an_empty_disk_and_what_up_left_may_become_a_store(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir()
    store = Store(tmp_path)
    assert (tmp_path / "format").read_text() == "1\n"
    assert store.layout.stages() == []


def test_a_store_of_another_format_is_refused_by_all(run: Run, built_data: Path, tmp_path: Path) -> None:
    (tmp_path / "format").write_text("2\n")
    for words in ({**READING, **WRITING}["check"], WRITING["run"]):
        answer = ask(run, words, built_data / "config.yaml", tmp_path)
        assert (answer.code, answer.document["errors"][0]["code"]) == (2, "store_format")
    assert [path.name for path in tmp_path.iterdir()] == ["format"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "64k") as place:
        yield place


def test_a_full_disk_is_told_when_a_store_is_opened(run: Run, built_data: Path, disk: Path) -> None:
    fill(disk)
    answer = ask(run, WRITING["run"], built_data / "config.yaml", disk / "store")
    assert answer.code == 1
    assert [error["code"] for error in answer.document["errors"]] == ["disk_full"]


def test_a_full_disk_is_told_by_commands_without_a_store_and_leaves_no_part_of_a_file(
    run: Run, built_data: Path, disk: Path
) -> None:
    """What was half-written was in the way of the next `init`."""
    fill(disk)
    answer = run("init", built_data / "text.jsonl", "--to", disk / "pipeline.yaml")
    assert (answer.code, [error["code"] for error in answer.document["errors"]]) == (1, ["disk_full"])
    assert [path.name for path in disk.iterdir()] == ["filler"]


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EDQUOT, "the disk is full"),
        (errno.EROFS, "has no permission to read or write it"),
        (errno.EACCES, "has no permission to read or write it"),
        (errno.EIO, "the disk failed"),
    ],
)
def test_what_a_disk_or_its_rights_refuse_is_no_crash(number: int, message: str) -> None:
    @click.command()
    @as_json
    def command(as_json: bool) -> None:
        raise OSError(number, os.strerror(number), "/data/pins.json")

    found = CliRunner().invoke(command)
    assert found.exit_code == 1 and "/data/pins.json: " in found.stderr
    assert message in found.stderr


def test_a_disk_that_cannot_be_written_can_be_read_and_is_told_when_written(
    run: Run, built_data: Path, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(built_data / "store", root, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    bind = ["mount", "--bind", str(root), str(root)]
    if os.getuid() != 0 or subprocess.run(bind, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(root)], check=True)
        answer = ask(run, READING["check"], built_data / "config.yaml", root)
        assert (answer.code, answer.with_status("build")) == (0, set())
        answer = ask(run, WRITING["run"], built_data / "config.yaml", root)
        assert answer.code == 1
        assert [error["code"] for error in answer.document["errors"]] == ["unwritable"]
        absent = ask(run, WRITING["run"], built_data / "config.yaml", root / "new")
        assert [error["code"] for error in absent.document["errors"]] == ["unwritable"]
    finally:
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def test_a_store_cannot_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="expected a folder"):
        Store(tmp_path / "file")
    (tmp_path / "below").touch()
    with pytest.raises(StageError, match="cannot be written"):
        Store(tmp_path / "below" / "store")
