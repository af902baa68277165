"""What `stemma mirror` makes of files: splits, rows that are put aside for shots, and what a kill or damage leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.errors import StageError
from tests.evaluation.questions import ARC, write_rows


def test_rows_that_were_put_aside_are_put_aside_again_and_not_scored(tmp_path: Path) -> None:
    """A mirror that is filled twice, with a split of neither between."""
    from evaluation.harness.named_tasks import load_named
    from evaluation.mirror_writer import mirror_task

    source = write_rows(tmp_path / "arc_easy.jsonl", ARC)
    mirror = tmp_path / "mirror"
    first = mirror_task("arc_easy", source, mirror)
    mirror_task("arc_easy", None, mirror, {"validation": source})
    again = mirror_task("arc_easy", source, mirror)
    assert again.put_aside == first.put_aside == 6
    assert {split: again.splits[split] for split in first.splits} == first.splits == {"test": 18, "train": 6}
    (task,) = load_named(["arc_easy"], mirror)
    scored = {row["question"] for row in task.eval_docs}
    assert len(scored) == 18 and not scored & {row["question"] for row in task.dataset["train"]}
    everything = mirror_task("arc_easy", source, mirror, shots=0)
    assert everything.splits == {"test": 24, "validation": 24}
    trained = mirror_task("arc_easy", source, mirror, {"train": source})
    assert trained.splits["train"] == trained.splits["test"] == 24 and not trained.put_aside
    with pytest.raises(StageError, match="the split train already has 24 rows"):
        mirror_task("arc_easy", source, mirror, {"train": source}, shots=4)


def test_another_configuration_of_a_dataset_is_told_to_be_missing_before_a_run(tmp_path: Path) -> None:
    """Both ARCs lie in one folder: the files of one stood for the other until its turn came."""
    from evaluation.config import mirrored_files
    from evaluation.mirror_writer import mirror_task

    done = mirror_task("arc_easy", write_rows(tmp_path / "arc_easy.jsonl", ARC), tmp_path / "mirror")
    there, missing = (mirrored_files(tmp_path / "mirror", task) for task in ("arc_easy", "arc_challenge"))
    assert len(there) == 3 and all(path.is_file() for path in there)
    assert missing[1:] == (done.folder.resolve() / "ARC-Challenge",)


def test_rows_that_were_put_aside_are_scored_again_once_the_split_of_the_shots_is_there(tmp_path: Path) -> None:
    """As the error for more shots than rows says to do: `stemma mirror TASK FROM --split train=FILE`."""
    from evaluation.harness.named_tasks import load_named
    from evaluation.harness.tasks import own_cache
    from evaluation.mirror_writer import mirror_task

    source = write_rows(tmp_path / "test.jsonl", ARC)
    mirror_task("arc_easy", source, tmp_path / "mirror")
    train = write_rows(tmp_path / "train.jsonl", ARC[:5])
    done = mirror_task("arc_easy", None, tmp_path / "mirror", {"train": train})
    assert (done.splits, done.put_aside) == ({"train": 5, "test": 24}, 0)
    [record] = json.loads((done.folder / "mirror.json").read_text()).values()
    assert [(one["split"], one["file"]) for one in record["sources"]] == [("test", str(source)), ("train", str(train))]
    with own_cache(tmp_path / "cache"):
        (task,) = load_named(["arc_easy"], tmp_path / "mirror")
    assert [row["question"] for row in task.eval_docs] == [f"What is {n} plus one?" for n in range(24)]


@pytest.mark.parametrize("moment", ["disk full", "while files are copied", "before it counts", "between the renames"])
def test_a_mirror_that_is_written_again_is_the_old_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Half of it would score the rows that are put aside for shots, or could be read by nobody."""
    from evaluation.harness.named_tasks import load_named
    from evaluation.mirror_writer import mirror_task

    class Kill(BaseException):
        pass

    source, mirror = write_rows(tmp_path / "arc_easy.jsonl", ARC), tmp_path / "mirror"
    before = mirror_task("arc_easy", source, mirror)
    others, calls, copy, rename = ARC[:8], [0], shutil.copyfile, Path.rename

    def copyfile(from_: Any, to: Any, **how: Any) -> Any:
        if mirror in Path(to).parents and str(to).endswith("train.parquet"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if moment == "disk full" else Kill
        return copy(from_, to, **how)

    def moved(self: Path, to: Any) -> Path:
        calls[0] += 1
        if calls[0] == ("before it counts", "between the renames").index(moment) + 1:
            raise Kill
        return rename(self, to)

    with monkeypatch.context() as faults:
        if "renames" in moment or "counts" in moment:
            faults.setattr(Path, "rename", moved)
        else:
            faults.setattr(shutil, "copyfile", copyfile)
        with pytest.raises(StageError if moment == "disk full" else Kill) as error:
            mirror_task("arc_easy", write_rows(tmp_path / "other.jsonl", others), mirror)
    if moment == "disk full":
        assert error.value.problems[0].code == "disk_full"  # type: ignore[union-attr]
    if moment == "between the renames":  # the next one puts it back
        with pytest.raises(StageError):
            mirror_task("arc_easy", None, mirror, {"train": tmp_path / "no such file.jsonl"})
    (task,) = load_named(["arc_easy"], mirror)
    assert len(task.eval_docs) == before.splits["test"] == 18
    again = mirror_task("arc_easy", source, mirror, shots=0)
    assert again.splits == {"test": 24}
    hidden = [path.name for path in again.folder.parent.iterdir() if path.name.startswith(".")]
    assert hidden == [".ai2_arc.lock"]


@pytest.mark.parametrize("name", ["mirror.json", "ARC-Easy/train.parquet"])
def test_a_damaged_mirror_is_named(tmp_path: Path, name: str) -> None:
    from evaluation.mirror_writer import mirror_task

    source, mirror = write_rows(tmp_path / "arc_easy.jsonl", ARC), tmp_path / "mirror"
    damaged = mirror_task("arc_easy", source, mirror).folder / name
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(StageError, match="mirror its tasks again") as error:
        mirror_task("arc_easy", None, mirror, {"validation": source})
    assert error.value.problems[0].path == str(damaged)


def test_a_split_without_answers_takes_none_from_the_others(tmp_path: Path) -> None:
    """As HellaSwag's authors give their files: the first by name, hellaswag_test.jsonl, has no labels."""
    from evaluation.harness.named_tasks import load_named
    from evaluation.mirror_writer import mirror_task

    row = {"activity_label": "Cooking", "ctx_a": "A man is", "ctx_b": "he", "ctx": "A man is he", "ind": 0}
    endings = ["runs.", "sits.", "eats.", "sleeps."]
    (tmp_path / "data").mkdir()
    for split, label in (("test", {}), ("train", {"label": "1"}), ("val", {"label": "2"})):
        write_rows(tmp_path / "data" / f"hellaswag_{split}.jsonl", [{**row, "endings": endings, **label}] * 3)
    done = mirror_task("hellaswag", tmp_path / "data", tmp_path / "mirror")
    assert done.splits == {"test": 3, "train": 3, "validation": 3} and not done.put_aside
    (task,) = load_named(["hellaswag"], tmp_path / "mirror")
    assert [task.doc_to_target(doc) for doc in task.eval_docs] == [2, 2, 2]


@pytest.mark.parametrize("name", ["cut.json", "cut.jsonl.gz"])
def test_a_file_that_was_cut_off_is_named(name: str, tmp_path: Path) -> None:
    import gzip

    from evaluation.mirror.rows import read_rows

    path = tmp_path / name
    lines = "\n".join(json.dumps(row) for row in ARC)
    path.write_bytes(gzip.compress(lines.encode())[:-20] if name.endswith("gz") else b'[{"query": "a"},')
    with pytest.raises(StageError) as damaged:
        read_rows(path)
    (problem,) = damaged.value.problems
    place = str(path) if name.endswith("gz") else f"{path}:1"
    assert problem.code == "corrupt_file" and problem.path == place


def test_tables_are_read_as_those_who_wrote_them_meant_them(tmp_path: Path) -> None:
    """TSV files with quotes as mere characters, tables as Excel writes them, and a line of too many fields."""
    from evaluation.mirror.rows import read_rows

    def read(name: str, text: str) -> list[list[str]]:
        (tmp_path / name).write_bytes(text.encode())
        return [[row["de"], row["en"]] for row in read_rows(tmp_path / name)]

    spoken = [['"Ja, sagte er.', "Yes, he said."], ["Nein", "No"], ['"Doch" sagte sie.', 'Said "yes"'], ["Gut", "Good"]]
    assert read("plain.tsv", "".join("\t".join(row) + "\n" for row in [["de", "en"], *spoken])) == spoken
    assert read("excel.tsv", '\ufeffde\ten\r\n"a\tb"\t"say ""no"""\r\n') == [["a\tb", 'say "no"']]
    assert read("excel.csv", '\ufeffde,en\r\n"a\r\nb",c\r\n') == [["a\nb", "c"]]
    with pytest.raises(StageError, match="expected 2 fields as in the first line, found 3"):
        read("long.csv", "de,en\na,b\na,b,c\n")
