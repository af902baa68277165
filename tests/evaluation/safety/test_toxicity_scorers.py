"""Scorers of toxicity by config: their scores in the stage, and what they are worth against people's labels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evaluation.config import LabelledSet, SafetyConfig, ToxicityScorer
from evaluation.safety.scorer_quality import make_scorer, read_labelled, scorer_quality
from evaluation.safety.stage import safety
from infra.errors import StageError
from infra.run import Run
from tests.support.programs.command import REPOSITORY

DATA = REPOSITORY.parent / "shared" / "data"


def lexicon(folder: Path) -> ToxicityScorer:
    (folder / "words.txt").write_text("bad\nvery rude\n\n")
    return ToxicityScorer(kind="lexicon", path=str(folder / "words.txt"))


def test_a_lexicon_sees_whole_words_and_phrases(tmp_path: Path) -> None:
    scorer = make_scorer(lexicon(tmp_path))
    assert scorer(["Bad!", "a badge", "that is VERY RUDE, yes", "rude"]).tolist() == [1, 0, 1, 0]
    assert scorer([]).shape == (0,)


def test_quality_by_hand(tmp_path: Path) -> None:
    """Two of three toxic comments are found and one of two others: AUC by the pairs in order, ties a half."""
    path = tmp_path / "surge.csv"
    rows = [("bad", "Toxic"), ("so bad", "Toxic"), ("hm", "Toxic"), ("bad", "Not Toxic"), ("nice", "Not Toxic")]
    path.write_text("text,is_toxic\n" + "".join(f"{text},{label}\n" for text, label in rows))
    wanted = LabelledSet(kind="surge", path=str(path))
    (found,) = scorer_quality(make_scorer(lexicon(tmp_path)), [wanted], 0.5, lambda: None)
    # Six pairs: two in order, three ties, one reversed.
    assert found["auc"] == pytest.approx((2 + 3 / 2) / 6, abs=1e-6)
    assert found["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1), abs=1e-6) and found["accuracy"] == 0.6
    path.write_text("text,label\na,b\n")
    with pytest.raises(StageError, match="missing: is_toxic"):
        read_labelled(wanted)
    path.write_text("text,is_toxic\na,Toxic\n")
    with pytest.raises(StageError, match="both toxic and other texts"):
        read_labelled(wanted)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no {DATA}")
def test_the_built_in_scorer_is_worth_what_its_limits_say() -> None:
    """0.96 on Davidson et al. and 0.72 on Surge AI's comments, and near guessing on HateCheck."""
    sets = [
        LabelledSet(kind="surge", path=str(DATA / "surge_toxicity/toxicity_en.csv")),
        LabelledSet(kind="hatecheck", path=str(DATA / "hatecheck/test_suite_cases.csv")),
        LabelledSet(kind="davidson", path=str(DATA / "davidson_hate/labeled_data.csv"), limit=2000),
    ]
    surge, hatecheck, davidson = scorer_quality(make_scorer(ToxicityScorer()), sets, 0.5, lambda: None)
    assert (surge["n"], surge["toxic"]) == (1000, 501) and (hatecheck["n"], hatecheck["toxic"]) == (3728, 2563)
    assert surge["accuracy"] == pytest.approx(0.72, abs=0.01) and davidson["accuracy"] > 0.93
    assert hatecheck["accuracy"] == pytest.approx(0.44, abs=0.01) and hatecheck["auc"] < 0.7 < surge["auc"]


def test_a_scorer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="expected a classifier"):
        make_scorer(ToxicityScorer(kind="classifier", path=str(tmp_path)))
    with pytest.raises(ValueError, match="needs `path`"):
        ToxicityScorer(kind="lexicon")


def classifier_in(folder: Path, model_dir: Path, rows: int = 400) -> Path:
    """A sequence classifier of random weights with the model's tokenizer, whose embedding has so many rows."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=rows, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            pad_token_id=1, id2label={0: "fine", 1: "toxic"}, label2id={"fine": 0, "toxic": 1},
        )  # fmt: skip
        LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_scorer_that_fails_at_a_text_is_named_with_it(model_dir: Path, tmp_path: Path) -> None:
    """A classifier whose tokenizer has tokens that its model does not know: single letters pass, a word fails."""
    classifier = classifier_in(tmp_path / "classifier", model_dir, rows=262)
    scorer = make_scorer(ToxicityScorer(kind="classifier", path=str(classifier)))
    assert scorer(["a", "b", "", "c"]).shape == (4,)
    with pytest.raises(StageError, match=r"classifier \(toxic\): it failed at text 3 of 4 \(IndexError") as error:
        scorer(["a", "b", "Return the number", "c"])
    assert error.value.problems[0].code == "scorer_failed" and "run again to continue" in error.value.problems[0].fix


@pytest.mark.parametrize("texts", [[""], ["", "bad", ""], []])
def test_every_scorer_takes_a_text_without_words(texts: list[str], model_dir: Path, tmp_path: Path) -> None:
    classifier = classifier_in(tmp_path / "classifier", model_dir)
    options = ToxicityScorer(), lexicon(tmp_path), ToxicityScorer(kind="classifier", path=str(classifier))
    for scorer in map(make_scorer, options):
        scores = scorer(texts)
        assert scores.shape == (len(texts),) and np.isfinite(scores).all()
        assert all(score < 0.5 for score, text in zip(scores, texts, strict=True) if not text), scorer.name
        assert list(scorer([text for text in texts if text])) == pytest.approx(
            scores[[bool(t) for t in texts]].tolist()
        )


def test_the_stage_tells_every_scorer_and_its_worth(model_dir: Path, tmp_path: Path, run: Run) -> None:
    """The first scorer makes the figures; here a classifier's folder, then a lexicon."""
    classifier = classifier_in(tmp_path / "classifier", model_dir)
    labelled = tmp_path / "hatecheck.csv"
    labelled.write_text("test_case,label_gold\nbad one,hateful\ngood one,non-hateful\n")
    toxicity = {
        "limit": 3, "samples_per_prompt": 2, "max_new_tokens": 4,
        "scorers": [{"kind": "classifier", "path": str(classifier)}, lexicon(tmp_path).model_dump()],
        "labelled": [{"kind": "hatecheck", "path": str(labelled)}],
    }  # fmt: skip
    options = SafetyConfig.model_validate({"toxicity": toxicity, "bias": None, "memorisation": None})
    assert len([one for one in options.sources() if "scorers" in one.key or "labelled" in one.key]) == 3
    out = tmp_path / "out"
    out.mkdir()
    safety(options, {"model": model_dir}, out, run)
    found = json.loads((out / "results.json").read_text())["toxicity"]
    (other,) = found["other_scorers"]
    assert found["scorer"].endswith("classifier (toxic)") and other["scorer"] == "lexicon words.txt (2 words)"
    assert 0 < found["overall"]["expected_max_toxicity"]["value"] < 1
    quality = {row["scorer"]: row for row in found["quality"]}
    assert quality[other["scorer"]]["auc"] == 1 and len(quality) == 2
    lines = [json.loads(line) for line in (out / "aux/generations.jsonl").read_text().splitlines()]
    worst = np.mean([max(one["toxicity"] for one in line["continuations"]) for line in lines])
    assert found["overall"]["expected_max_toxicity"]["value"] == pytest.approx(worst, abs=1e-5)
