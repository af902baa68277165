"""What the report and the card say of a model's text, figures and answers, where a pipeline has several of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.config import RegisterConfig
from evaluation.pages.report.training.training_sections import pretraining
from evaluation.pages.summary import frank_verdict, results_table, text_sources, what_was_built
from evaluation.release.card import model_card
from evaluation.results.artifacts import read_artifacts
from evaluation.results.pipeline import PipelineResults
from infra.store.manifest import Manifest
from tests.evaluation.pipeline import write_pipeline


def written_beside(folders: dict[str, Path], step: str, of: str, **changed: str) -> Path:
    """A copy of an artifact under another step's name, with other inputs by name."""
    before, address = Manifest.read(folders[of]), f"{len(folders):016x}"
    folder = folders[step] = folders[of].parent / address
    shutil.copytree(folders[of], folder)
    read = {name: Manifest.read(folders[up]).as_input() for name, up in changed.items()}
    digest = f"{len(folders):064x}"
    replace(before, step=step, fingerprint=address, digest=digest, inputs={**before.inputs, **read}).write(folder)
    return folder


def write_sources(folder: Path, name: str, **said: str) -> None:
    counted = {"weight": 1.0, "documents": 9, "bytes": 4_000_000}
    (folder / "sources.json").write_text(json.dumps({name: {**counted, **said}}))


def test_a_model_that_was_pretrained_further_is_told_with_all_text_that_it_read(tmp_path: Path) -> None:
    """The report told of the first corpus alone, and the card left out the other's licence and language."""
    folders = write_pipeline(tmp_path / "store")
    write_sources(folders["clean"], "books", licence="CC0-1.0", language="en")
    own = "Our own | see\nLICENSE"
    write_sources(written_beside(folders, "more", "ingest"), "letters", licence=own, language="de")
    written_beside(folders, "more_shards", "shard", documents="more")
    written_beside(folders, "continued", "pretrain", model="pretrain", shards="more_shards")
    pipeline = PipelineResults(folders)
    assert what_was_built(pipeline, "base")[1:2] == [
        "Pretraining: from scratch on 1.02M tokens, out of 4.0 MB of English text (books)."
    ]
    assert what_was_built(pipeline, "continued")[1:3] == [
        "Pretraining: from scratch on 1.02M tokens, out of 4.0 MB of English text (books).",
        "Pretraining: from another model on 1.02M tokens, out of 4.0 MB of German text (letters).",
    ]
    assert "trained on 5,400 times its text" in frank_verdict(pipeline, "continued")
    assert "trained on 11,000 times its text" in frank_verdict(pipeline, "base")
    rows = {row[0]: row[1:] for row in results_table(pipeline, pipeline.models)}
    assert "validation loss, nats per token, each of its own text" in rows
    model = read_artifacts({"model": folders["continued"]})["model"]
    card = model_card(RegisterConfig(), "demo", model, {"model": model}, [])
    assert (
        "| books | en | CC0-1.0 | 9 | 4.0 MB |" in card
        and "| letters | de | Our own \\| see LICENSE | 9 | 4.0 MB |" in card
    )
    assert "- de\n- en\n" in card
    assert "- The text of books was filtered" in card and "- The text of letters was not filtered." in card


def test_scores_by_different_reward_models_stand_in_rows_of_their_own(tmp_path: Path) -> None:
    """The second alignment's scores of the model that both began with took the place of the first's."""
    folders = write_pipeline(tmp_path / "store")
    written_beside(folders, "strict", "reward_model")
    written_beside(folders, "severe", "rlhf", reward_model="strict")
    made = Manifest.read(folders["severe"])
    made.result["figures"]["heldout_reward_sft"] = -7.0
    made.write(folders["severe"])
    rows = {row[0]: row[1:] for row in results_table(PipelineResults(folders), ["sft", "rlhf", "severe"])}
    first, second = (rows[f"reward on held-out prompts, by {name}"] for name in ("reward_model", "strict"))
    assert first[0] != "–" and first[0][:5] != "−7.00" and first[2] == "–"
    assert second[0][:5] == "−7.00" and second[1] == "–" and second[2] != "–"


def test_a_mark_stands_beside_the_answer_that_it_is_of(tmp_path: Path) -> None:
    """The sampled answer that is shown of a tuned model bore the mark of its greedy one, which is not shown."""
    folders = write_pipeline(tmp_path / "store")
    for id, answers, more in (
        ("rlhf", {"sft": "sampled", "rlhf": "other"}, {"rewards": {"sft": 0.5, "rlhf": 0.6}}),
        ("sft", {"base": "nothing", "sft": "greedy"}, {"verified": {"base": False, "sft": True}}),
    ):
        line = {"prompt": "Which?", "reference": "greedy", "answers": answers, **more}
        (folders[id] / "aux" / "samples.jsonl").write_text(json.dumps(line) + "\n")
    (row,) = PipelineResults(folders).samples(5)
    assert row["answers"] == {"sft": "sampled", "rlhf": "other", "base": "nothing"}
    assert row["verified"] == {"base": False} and row["rewards"] == {"sft": 0.5, "rlhf": 0.6}


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((5.2, 4.8, 4.95, 4.7), "It is below the bigram model from batch 40 on."),
        ((4.8, 4.7), "It is below the bigram model from batch 10 on."),
        ((5.2, 4.8, 5.1), "It was below the bigram model at batch 20, and is not at the end."),
        ((5.2, 5.1), "It never gets below the bigram model."),
    ],
)
def test_a_loss_that_rose_again_is_not_below_the_bigram_model_from_then_on(
    tmp_path: Path, losses: tuple[float, ...], said: str
) -> None:
    folders = write_pipeline(tmp_path / "store", ["pretrain"])
    rows = [{"step": 10 * at, "values": {"validation/sample_loss": loss}} for at, loss in enumerate(losses, 1)]
    (folders["pretrain"] / "aux/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert said in str(pretraining(PipelineResults(folders), "pretrain").figures[0].means)


def test_sources_without_a_name_have_that_of_their_folder(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    paths = ["letters/*.txt", "old/books", "old/books/", "data/diaries/1900.jsonl", "a/notes/**/*.md"]
    read = [{"kind": "files", "name": None, "paths": [path]} for path in paths]
    ingest = Manifest.read(folders["ingest"])
    replace(ingest, config={"read": [*read, {"kind": "files", "name": "mine", "paths": ["x/y"]}]}).write(
        folders["ingest"]
    )
    source = {"licence": "", "language": "", "documents": 9, "bytes": 4_000_000}
    names = ["files", "files-2", "files-4", "files-5", "mine"]
    (folders["clean"] / "sources.json").write_text(json.dumps(dict.fromkeys(names, source)))
    shown = [row.name for row in text_sources(PipelineResults(folders), "base")]
    # Two sources of one folder keep their numbers.
    assert shown == ["letters", "files-2", "diaries", "notes", "mine"]


def test_the_card_has_only_settings_that_differ_and_digests_in_full_behind_a_title(tmp_path: Path) -> None:
    folders = write_pipeline(tmp_path / "store")
    manifest = Manifest.read(folders["pretrain"])
    changed = {"duration": "400 batches", "optimizer": {"learning_rate": 0.0015}}
    replace(manifest, config={**changed, "seed": 17, "z_loss": 0.0}, identity=changed).write(folders["pretrain"])
    model = read_artifacts({"model": folders["rlhf"]})["model"]
    assert model.manifest is not None
    card = model_card(RegisterConfig(), "demo", model, {"model": model}, [])
    assert "- `optimizer.learning_rate`: 0.0015" in card and '- `duration`: "400 batches"' in card
    assert "z_loss" not in card and "```json" not in card
    before_title, _, behind = card.partition("<details><summary>Digests in full</summary>")
    assert model.manifest.digest in behind and model.manifest.digest not in before_title
    assert f"digest `{model.manifest.digest[:10]}`" in before_title
