"""What a folder from outside names, matches or links to is read in that folder, or refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from corpus.config import IngestConfig
from corpus.ingest import ingest
from corpus.readers.hub import check_dataset, dataset_files
from corpus.tokens.remote import checksums
from evaluation.config import lm_eval_files
from evaluation.mirror.local import mirrored
from evaluation.mirror.rows import find_files
from infra.errors import StageError
from infra.io.contained import contained, contained_glob, homes
from infra.io.sources import expand, files_below
from infra.run import Run
from tests.support.programs.command import stemma

SECRET = "the password is swordfish"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret" / "key.txt"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "dataset"
    folder.mkdir()
    (folder / "train.txt").write_text("A text of the dataset.\n")
    return folder


def card(folder: Path, configs: object) -> None:
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n# Data\n")


def state(folder: Path, filename: str) -> None:
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": filename}]}))


def splits(folder: Path, name: str) -> None:
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    (folder / "train").symlink_to(folder.parent / name, target_is_directory=True)


ATTACKS: dict[str, Callable[[Path, Path], object]] = {
    "pattern": lambda folder, _: card(folder, [{"config_name": "a", "data_files": "../secret/*"}]),
    "absolute pattern": lambda folder, secret: card(folder, [{"data_files": str(secret)}]),
    "pattern of a split": lambda folder, _: card(
        folder, [{"data_files": [{"split": "train", "path": ["../secret/*"]}]}]
    ),
    "pattern that matches a link": lambda folder, secret: (
        card(folder, [{"data_files": "*.md.txt"}]),
        (folder / "notes.md.txt").symlink_to(secret),
    ),
    "pattern through a link": lambda folder, secret: (
        card(folder, [{"data_files": "data/*.txt"}]),
        (folder / "data").symlink_to(secret.parent),
    ),
    "state": lambda folder, _: state(folder, "../secret/key.txt"),
    "absolute state": lambda folder, secret: state(folder, str(secret)),
    "linked state": lambda folder, secret: (state(folder, "a.txt"), (folder / "a.txt").symlink_to(secret)),
    "splits": lambda folder, _: splits(folder, "secret"),
    "link": lambda folder, secret: (folder / "more.txt").symlink_to(secret),
    "linked folder": lambda folder, secret: (folder / "more").symlink_to(secret.parent),
    "linked card": lambda folder, secret: (folder / "README.md").symlink_to(secret),
    "other people's blobs": lambda folder, secret: (folder / "a.txt").symlink_to("../../blobs/../secret/key.txt"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_dataset_that_leads_out_of_its_folder_is_refused(
    attack: str, dataset: Path, secret: Path, tmp_path: Path
) -> None:
    ATTACKS[attack](dataset, secret)
    with pytest.raises(StageError) as caught:
        config = IngestConfig(read=[{"kind": "huggingface", "dataset": str(dataset)}])
        ingest(config, {}, tmp_path / "out", Run(tmp_path / "work"))
    [problem] = caught.value.problems
    assert problem.code == "unsafe_file" and str(dataset) in str(problem)
    assert SECRET not in str(problem)


def test_the_command_refuses_it_before_anything_is_built(dataset: Path, secret: Path, tmp_path: Path) -> None:
    card(dataset, [{"data_files": "../secret/*"}])
    config = tmp_path / "pipeline.yaml"
    config.write_text("name: steal\ningest: {read: [{kind: huggingface, dataset: dataset}]}\n")
    answered = stemma("check", config, "--root", tmp_path / "store")
    assert answered.code in (1, 2)
    assert any("README.md: configs.0.data_files" in error["path"] for error in answered.document["errors"])
    assert not (tmp_path / "store" / "ingest").exists()


def test_a_snapshot_in_the_hub_cache_and_a_linked_folder_are_read(dataset: Path, tmp_path: Path) -> None:
    cache = tmp_path / "datasets--ada--letters"
    snapshot = cache / "snapshots" / "1a2b"
    (snapshot / "data").mkdir(parents=True)
    (cache / "blobs").mkdir()
    shutil.move(dataset / "train.txt", cache / "blobs" / "cafe")
    (snapshot / "data" / "train.txt").symlink_to("../../../blobs/cafe")
    card(snapshot, [{"data_files": "data/*.txt"}])
    (tmp_path / "mine").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "mine", snapshot / "data"):
        assert [path.read_text() for path in dataset_files(str(folder), None, "train", None)] == [
            "A text of the dataset.\n"
        ]
    check_dataset(tmp_path / "mine")
    # What lies beside the blobs is no part of a snapshot: the folder may have come as an archive with that name.
    (cache / "other.txt").write_text(SECRET)
    (snapshot / "data" / "more.txt").symlink_to("../../../other.txt")
    with pytest.raises(StageError, match="leads out"):
        dataset_files(str(snapshot), None, "train", None)


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "~/x", "..\\x", "https://x/y", "", "a\0b", 7, None, ["a"]])
def test_names_that_lead_out_or_are_none(name: object, dataset: Path) -> None:
    for function in (contained, contained_glob):
        with pytest.raises(StageError, match=r"index\.json: key"):
            function(dataset, name, "index.json: key")


@pytest.mark.parametrize("pattern", ["*" * 40, "**x", "x" * 300, "a[", "[!a-", "**/" * 12 + "*.txt"])
def test_patterns_that_are_none_or_cost_too_much_end_as_an_error_or_without_a_match(
    pattern: str, dataset: Path
) -> None:
    try:
        assert contained_glob(dataset, pattern, "card") in ([], [dataset / "train.txt"])
    except StageError as error:
        assert error.problems[0].code == "bad_index"


def test_globs_and_folders_of_a_config_keep_to_their_folder(dataset: Path, secret: Path) -> None:
    (dataset / "a.txt").symlink_to("train.txt")
    (dataset / "b.txt").symlink_to(secret)
    for pattern in (dataset, f"{dataset}/*.txt", f"{dataset}/**/b.*"):
        with pytest.raises(StageError, match=r"b\.txt is a link that leads out of .*key\.txt"):
            expand([str(pattern)])
        assert dataset / "b.txt" in expand([str(pattern)], follow_links=True)
    assert expand([str(dataset / "b.txt")]) == (dataset / "b.txt",)
    assert expand([f"{dataset}/a.*"]) == (dataset / "a.txt",)


def test_links_to_the_root_are_not_walked(dataset: Path) -> None:
    (dataset / "all").symlink_to("/")
    (dataset / "usr").symlink_to("/usr")
    with pytest.raises(StageError, match="leads out"):
        list(files_below(dataset))


def test_the_homes_of_a_folder_are_itself_and_its_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1a"
    snapshot.mkdir(parents=True)
    real = Path(tmp_path.resolve())
    assert homes(snapshot) == (real / "models--a--b/snapshots/1a", real / "models--a--b/blobs")
    assert homes(tmp_path) == (real,)


def test_a_mirror_that_leads_out_is_refused(secret: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mirror" / "ada" / "letters"
    folder.mkdir(parents=True)
    import datasets

    for configs, link in (([{"config_name": "default", "data_files": "../../../secret/*"}], ""), ([], "test.txt")):
        card(folder, configs)
        if link:
            (folder / link).symlink_to(secret)
        with mirrored(tmp_path / "mirror"), pytest.raises(StageError, match="leads out"):
            datasets.load_dataset("ada/letters")
    card(folder, [{"config_name": "default", "data_dir": "../../../secret"}])
    (folder / "test.txt").unlink()
    with mirrored(tmp_path / "mirror"), pytest.raises(StageError, match=r"configs\.0\.data_dir"):
        datasets.load_dataset("ada/letters")


TASK = "task: sums\ndataset_path: json\ntest_split: test\n"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (TASK + "dataset_kwargs: {data_files: {test: ../secret/key.txt}}\n", "dataset_kwargs.data_files"),
        (TASK + "dataset_kwargs: {data_files: SECRET}\n", "dataset_kwargs.data_files"),
        (TASK + "dataset_kwargs: {data_files: [../secret/*.txt]}\n", "dataset_kwargs.data_files"),
        (TASK + "dataset_kwargs: {data_files: ~/key.txt}\n", "dataset_kwargs.data_files"),
        (TASK + "dataset_kwargs: {data_files: link.txt}\n", "dataset_kwargs.data_files"),
        ("task: sums\ndataset_path: ../secret\n", "dataset_path"),
        ("include: ../secret/key.txt\n", "include"),
        ("include: [SECRET]\n", "include"),
        (TASK + "process_docs: !function SECRET.key\n", "process_docs"),
        (TASK + "metric_list: [{aggregation: !function ..secret.key.of}]\n", "aggregation"),
    ],
)
def test_a_task_of_lm_eval_that_leads_out_of_its_folder_is_refused(
    text: str, key: str, secret: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    is_link = "link.txt" in text
    if is_link:
        (folder / "link.txt").symlink_to(secret)
    (folder / "sums.yaml").write_text(text.replace("SECRET", str(secret)))
    for path in [folder / "sums.yaml", *([] if is_link else [folder])]:  # in a folder the link is refused first
        with pytest.raises(StageError) as caught:
            lm_eval_files(path)
        [problem] = caught.value.problems
        assert (problem.code, problem.path) == ("unsafe_file", f"{folder}/sums.yaml: {key}")
        assert SECRET not in str(problem)


@pytest.mark.parametrize("part", ["raw_data", "zip_data"])
def test_shards_on_s3_are_not_written_outside_of_their_folder(part: str) -> None:
    file = {"basename": "shard.00000.mds", "bytes": 1, "hashes": {"xxh3_64": "0"}}
    shard = {"raw_data": file, "zip_data": file}
    assert list(checksums([shard])) == ["shard.00000.mds"]
    with pytest.raises(StageError, match=rf"shards\.0\.{part}\.basename"):
        checksums([{**shard, part: {**file, "basename": "../../shard.mds"}}])


@pytest.mark.parametrize("name", ["test.jsonl", "deep"])
def test_questions_behind_a_link_that_leads_out_are_not_mirrored(name: str, secret: Path, tmp_path: Path) -> None:
    source = tmp_path / "questions"
    source.mkdir()
    (source / name).symlink_to(secret if "." in name else secret.parent)
    with pytest.raises(StageError, match="leads out"):
        find_files(source, "key", None, "test")


def _mutated(value: Any, drawn: random.Random) -> Any:
    """The value with one thing in it that is another, missing or too much."""
    strange = [None, 7, -1.5, "", "\0", "..", "x" * 5000, [], {}, [[]], {"a": []}, True, "/etc/passwd", "\ud800"]
    if isinstance(value, dict) and value and drawn.random() < 0.75:
        key = drawn.choice(list(value))
        if drawn.random() < 0.2:
            return {name: one for name, one in value.items() if name != key}
        return {name: _mutated(one, drawn) if name == key else one for name, one in value.items()}
    if isinstance(value, list) and value and drawn.random() < 0.75:
        place = drawn.randrange(len(value))
        return [_mutated(one, drawn) if number == place else one for number, one in enumerate(value)]
    return drawn.choice(strange)


def test_damaged_indices_of_a_dataset_end_in_errors_that_name_the_file(tmp_path: Path) -> None:
    """Of 84 mutations 48 ended in a traceback."""
    saved = tmp_path / "saved"
    rows = Dataset.from_dict({"text": ["a", "b"]})
    DatasetDict({"train": rows, "test": rows}).save_to_disk(saved)
    listed = tmp_path / "listed"
    listed.mkdir()
    (listed / "train.txt").write_text("a")
    facts = {"configs": [{"config_name": "a", "data_files": [{"split": "train", "path": ["train.txt", "*.txt"]}]}]}
    drawn = random.Random(20261127)
    damaged: list[tuple[Path, str]] = []
    for name in ("dataset_dict.json", "train/state.json"):
        whole = (saved / name).read_text()
        damaged += [(saved / name, whole[: drawn.randrange(len(whole))]) for _ in range(15)]
        damaged += [(saved / name, json.dumps(_mutated(json.loads(whole), drawn))) for _ in range(60)]
        damaged += [(saved / name, "[" * 100_000), (saved / name, "9" * 5000), (saved / name, '{"splits": NaN}')]
    damaged += [(listed / "README.md", f"---\n{json.dumps(_mutated(facts, drawn))}\n---\n") for _ in range(80)]
    bomb = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvw"))
    for text in (
        "a: [",
        bomb,
        "a: &a [*a]",
        "a: !!python/object:os.system x",
        "[" * 5000,
        "a: 1\na: 2",
        "\x00",
    ):
        damaged.append((listed / "README.md", f"---\n{text}\n---\n"))
    outcomes = {"read": 0, "refused": 0}
    for path, text in damaged:
        before = path.read_bytes() if path.exists() else None
        path.write_text(text, encoding="utf8", errors="surrogatepass")
        folder = saved if path.is_relative_to(saved) else listed
        try:
            found = dataset_files(str(folder), None, "train", None)
            assert all(one.resolve().is_relative_to(folder.resolve()) for one in found), text
            outcomes["read"] += 1
        except StageError as error:
            [problem] = error.problems
            assert problem.code in ("bad_index", "unsafe_file", "missing_source", "wrong_split"), text
            assert str(folder) in problem.path, text
            assert len(str(problem)) < 1000, text
            outcomes["refused"] += 1
        path.write_bytes(before) if before is not None else path.unlink()
    assert outcomes["refused"] > 100, outcomes
