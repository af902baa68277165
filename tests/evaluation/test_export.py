"""An exported model is a folder that transformers loads, or it is not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evaluation.artifacts import Artifact
from evaluation.export import card_of, export
from infra.errors import StageError


@pytest.fixture
def artifact(model_dir: Path, tmp_path: Path) -> Artifact:
    folder = tmp_path / "sft" / "0123456789abcdef"
    shutil.copytree(model_dir, folder)
    (folder / "aux").mkdir(exist_ok=True)
    (folder / "aux" / "metrics.jsonl").write_text("{}")
    (folder / "trained_sequences.json").write_text("{}")
    return Artifact("sft", folder, None)


def test_what_is_exported_loads_and_has_its_card(
    artifact: Artifact, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card, card_from = card_of(artifact, None)
    loaded = export(artifact, card, tmp_path / "my hub")
    assert "not a valid Python identifier" not in capfd.readouterr().err
    assert (loaded.architecture, card_from) == ("LlamaForCausalLM", "") and loaded.tokens >= 1
    names = {path.name for path in (tmp_path / "my hub").rglob("*")}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert not {"aux", "trained_sequences.json"} & names
    assert (tmp_path / "my hub" / "README.md").read_text().startswith("---\n")


def test_an_empty_folder_that_is_there_is_filled_and_stays(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody is, say: `stemma export rlhf .`"""
    here = tmp_path / "here"
    (here / ".here.unfinished" / "of a kill").mkdir(parents=True)
    monkeypatch.chdir(here)
    before = here.stat().st_ino
    export(artifact, "# card", Path())
    assert here.stat().st_ino == before and (here / "README.md").read_text() == "# card"
    assert (here / "config.json").is_file() and not [path for path in here.iterdir() if path.name.startswith(".")]


def test_what_does_not_load_leaves_nothing(artifact: Artifact, tmp_path: Path) -> None:
    (artifact.folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(StageError) as caught:
        export(artifact, "# card", tmp_path / "hub")
    assert caught.value.problems[0].code == "not_loadable"
    assert [path.name for path in tmp_path.iterdir()] == ["sft"]


def test_a_folder_with_something_in_it_is_left_alone(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(StageError) as caught:
        export(artifact, "# card", tmp_path / "sft")
    assert caught.value.problems[0].code == "not_empty"
