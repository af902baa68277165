"""Hugging Face datasets: saved to disk, as folders of data files, and from the hub's cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.errors import StageError
from tests.support.programs.command import Answer, write_config

TEXTS = {split: [f"{split} text {number}" for number in range(30)] for split in ("train", "test")}


def config(dataset: Path | str, **keys: object) -> IngestConfig:
    return IngestConfig(read=[{"kind": "huggingface", "dataset": str(dataset), **keys}])


def texts(out: Path) -> list[str]:
    return [document.text for document in read_documents(out)]


@pytest.fixture
def dataset() -> DatasetDict:
    return DatasetDict({split: Dataset.from_dict({"text": rows}) for split, rows in TEXTS.items()})


def test_datasets_saved_to_disk(build, dataset, tmp_path):
    dataset["train"].save_to_disk(tmp_path / "one", num_shards=3)
    dataset.save_to_disk(tmp_path / "two")
    assert texts(build(ingest, config(tmp_path / "one"))) == TEXTS["train"]
    assert texts(build(ingest, config(tmp_path / "two", split="test"))) == TEXTS["test"]
    with pytest.raises(StageError, match="expected the split validation, there are: test, train"):
        build(ingest, config(tmp_path / "two", split="validation"))


def test_a_selection_that_is_saved_holds_only_its_rows(build, dataset, tmp_path):
    dataset["train"].select([7, 3]).save_to_disk(tmp_path / "some")
    assert texts(build(ingest, config(tmp_path / "some"))) == [TEXTS["train"][7], TEXTS["train"][3]]


def test_folders_of_data_files_tell_splits_by_name(build, dataset, tmp_path):
    (tmp_path / "set" / "data").mkdir(parents=True)
    for split in TEXTS:
        dataset[split].to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    (tmp_path / "set" / "README.md").write_text("# no front matter")
    assert texts(build(ingest, config(tmp_path / "set", split="test"))) == TEXTS["test"]
    plain = tmp_path / "plain"
    plain.mkdir()
    dataset["train"].to_json(plain / "rows.jsonl")
    assert texts(build(ingest, config(plain))) == TEXTS["train"]


def test_the_readme_says_which_files_a_subset_has(build, dataset, tmp_path):
    (tmp_path / "en").mkdir()
    dataset["train"].to_parquet(tmp_path / "en" / "a.parquet")
    dataset["test"].to_parquet(tmp_path / "b.parquet")
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n- config_name: de\n  data_files: b.parquet\n- config_name: en\n  data_files:\n"
        "  - split: train\n    path: en/*.parquet\n---\n"
    )
    assert texts(build(ingest, config(tmp_path, subset="en"))) == TEXTS["train"]
    assert texts(build(ingest, config(tmp_path, subset="de"))) == TEXTS["test"]


DE = {"config_name": "de", "data_files": [{"path": "test.parquet"}]}
EN = {"config_name": "en", "data_files": "train.parquet"}


@pytest.mark.parametrize(
    ("configs", "split"),
    [
        ([EN, DE], "train"),
        ([DE, EN], "test"),
        ([DE, {**EN, "config_name": "default"}], "train"),
        ([DE, {**EN, "default": True}], "train"),
        (["en", "de"], "train"),
        ("none", "train"),
    ],
)
def test_without_a_subset_the_readme_says_which_is_meant(configs, split, build, dataset, tmp_path):
    for name in TEXTS:
        dataset[name].to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    assert texts(build(ingest, config(tmp_path))) == TEXTS[split]


def test_hub_names_are_read_from_the_cache_or_said_to_be_missing(build, dataset, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "datasets--owner--letters"
    data = repository / "snapshots" / commit / "data"
    data.mkdir(parents=True)
    dataset["train"].to_parquet(data / "train-00000-of-00001.parquet")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert texts(build(ingest, config("owner/letters"))) == TEXTS["train"]
    assert texts(build(ingest, config("owner/letters", revision=commit))) == TEXTS["train"]
    with pytest.raises(StageError, match=r"owner/other: .*fetch nothing.*hf download --repo-type dataset owner/other"):
        build(ingest, config("owner/other"))
    with pytest.raises(StageError, match="no such folder, and not the name of a dataset on the Hub"):
        build(ingest, config("./no/such/folder"))


def test_where_a_dataset_lies_does_not_bear_on_identity(dataset, tmp_path):
    from infra.fingerprint import canonical

    for place in ("here", "there"):
        dataset["train"].save_to_disk(tmp_path / place)
    one, two = (canonical(config(tmp_path / place)) for place in ("here", "there"))
    assert one == two and "dataset" not in json.dumps(one)


def test_an_index_that_leads_out_of_its_folder_is_named_once(run: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../../etc/passwd"}]}))
    read = [{"kind": "huggingface", "dataset": str(tmp_path / "set")}]
    config = write_config(tmp_path / "config.yaml", {"name": "foreign", "ingest": {"read": read}})
    answer = run("check", config, "--root", tmp_path / "store")
    [error] = answer.document["errors"]
    assert answer.code != 0 and "leads out of" in error["message"]
