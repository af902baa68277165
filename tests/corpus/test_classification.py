"""Documents scored by a real sequence classifier of transformers, and what is kept by the scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from corpus.classification.config import ClassifyConfig
from corpus.classification.scorer import SequenceScorer
from corpus.classification.stage import classify
from corpus.documents.parts import DocumentWriter, link_parts, make_document, read_documents
from flows.config.graph import graph
from flows.config.read import parse
from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run

WORDS = ["river", "mill", "the", "bends", "twice", "chapter", "a", "quiet"]
TEXTS = [" ".join(WORDS[(number + turn * number) % 8] for turn in range(3 + number)) for number in range(20)]

Classifier = Callable[..., Path]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    """Makes a BERT with random weights that fits 32 tokens; options: of its config."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    def make(**options: Any) -> Path:
        words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
        backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
        torch.manual_seed(1)
        shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        config = BertConfig(
            vocab_size=len(words), max_position_embeddings=32, initializer_range=0.5, **shape, **options
        )
        folder = tmp_path_factory.mktemp("classifier")
        tokenizer.save_pretrained(folder)
        BertForSequenceClassification(config).eval().save_pretrained(folder)
        return folder

    return make


def expected(folder: Path, texts: Sequence[str]) -> np.ndarray:
    """The logits (N, labels) that transformers gives, text by text."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        encoded = [tokenizer(text, return_tensors="pt", truncation=True, max_length=32) for text in texts]
        return np.array([model(**one).logits[0].double().numpy() for one in encoded])


def given(folder: Path) -> Path:
    """Four parts of five documents."""
    for part in range(4):
        with DocumentWriter(folder / str(part) / "documents") as writer:
            for number in range(5 * part, 5 * part + 5):
                metadata = '{"title": "River", "scores": {"other": 1.0}}' if number == 0 else ""
                source = f"{'crawl' if number % 2 else 'books'}/{number}"
                writer.write(make_document(TEXTS[number], source, metadata=metadata))
    link_parts([folder / str(part) for part in range(4)], folder)
    return folder


def built(out: Path, documents: Path, run: Run | None = None, **config: Any) -> dict[str, float]:
    out.mkdir()
    run = run or Run(out.with_suffix(".work"), LaunchConfig(device="cpu"))
    return dict(classify(ClassifyConfig(**config), {"documents": documents}, out, run).figures)


def scores_of(folder: Path, name: str = "quality") -> dict[str, float]:
    found = {one.text: json.loads(one.metadata or "{}").get("scores", {}) for one in read_documents(folder)}
    return {text: scores[name] for text, scores in found.items() if name in scores}


def test_scores_are_those_of_transformers_and_stay_with_the_documents(tmp_path: Path, classifier: Classifier) -> None:
    """Texts of other lengths share a batch, and longer ones are cut to what the model can read."""
    folder = classifier(id2label={0: "bad", 1: "good", 2: "best"}, label2id={"bad": 0, "good": 1, "best": 2})
    logits = expected(folder, TEXTS)
    shares = np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)
    documents = given(tmp_path / "in")
    figures = built(tmp_path / "out", documents, model=str(folder), label="good", batch_documents=4)
    found = scores_of(tmp_path / "out")
    assert [found[text] for text in TEXTS] == pytest.approx(shares.tolist(), abs=2e-6)
    first = next(read_documents(tmp_path / "out"))
    scores = {"other": 1.0, "quality": found[TEXTS[0]]}
    assert json.loads(first.metadata) == {"title": "River", "scores": scores}
    assert figures["documents"] == 20 == figures["scored"] and figures["dropped"] == 0
    raw = SequenceScorer(ClassifyConfig(model=str(folder), label="best", output="raw"))(["", *TEXTS])
    assert np.isnan(raw[0]) and raw[1:] == pytest.approx(logits[:, 2], abs=1e-5)


def test_a_regression_is_filtered_by_its_number_or_by_the_best_share(tmp_path: Path, classifier: Classifier) -> None:
    folder, documents = classifier(num_labels=1), given(tmp_path / "in")
    logits = expected(folder, TEXTS)[:, 0]
    least = float(np.sort(logits)[12] + np.sort(logits)[13]) / 2
    above = {text for text, value in zip(TEXTS, logits, strict=True) if value > least}
    figures = built(tmp_path / "threshold", documents, model=str(folder), min_score=least, name="edu")
    assert set(scores_of(tmp_path / "threshold", "edu")) == above and figures["dropped"] == 13
    rows = pq.read_table(tmp_path / "threshold" / "aux" / "dropped.parquet").to_pylist()
    assert {row["text"] for row in rows} == set(TEXTS) - above
    assert all(row["rule"] == "min_score" and row["value"] < least == row["low"] for row in rows)
    built(tmp_path / "share", documents, model=str(folder), top_share=0.35, name="edu")
    assert set(scores_of(tmp_path / "share", "edu")) == above
    report = json.loads((tmp_path / "share" / "aux" / "scores.json").read_text())
    assert report["best"][0]["score"] == pytest.approx(logits.max(), abs=1e-5)
    assert sum(sum(one["histogram"]) for one in report["sources"].values()) == 20
    built(tmp_path / "some", documents, model=str(folder), top_share=0.1, from_sources=["crawl"], name="edu")
    kept = list(read_documents(tmp_path / "some"))
    assert [one.text for one in kept if one.source.startswith("books")] == TEXTS[::2]
    assert len(scores_of(tmp_path / "some", "edu")) == 1 == len(kept) - 10


def test_an_interrupted_build_goes_on_at_its_part(
    tmp_path: Path, classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, documents = classifier(num_labels=1), given(tmp_path / "in")
    scored: list[str] = []
    score = SequenceScorer.__call__

    def counted(scorer: SequenceScorer, texts: Sequence[str]) -> np.ndarray:
        scored.extend(texts)
        return score(scorer, texts)

    monkeypatch.setattr(SequenceScorer, "__call__", counted)
    stopped = Run(tmp_path / "work", LaunchConfig(device="cpu"), is_cancelled=lambda: len(scored) >= 8)
    with pytest.raises(Cancelled):
        built(tmp_path / "stopped", documents, stopped, model=str(folder))
    assert 8 <= len(scored) < 20
    built(tmp_path / "out", documents, Run(tmp_path / "work", LaunchConfig(device="cpu")), model=str(folder))
    assert scores_of(tmp_path / "out").keys() == set(TEXTS) and len(scored) < 20 + 8


def test_what_is_no_classifier_is_named(tmp_path: Path, classifier: Classifier) -> None:
    folder, documents = classifier(num_labels=3), given(tmp_path / "in")
    with pytest.raises(StageError, match="expected one of the labels LABEL_0, LABEL_1, LABEL_2, not good"):
        built(tmp_path / "label", documents, model=str(folder), label="good")
    with pytest.raises(StageError, match="did you mean crawl"):
        built(tmp_path / "source", documents, model=str(folder), label="LABEL_1", from_sources=["crawls"])
    with pytest.raises(StageError) as raised:
        built(tmp_path / "none", documents, model=str(tmp_path))
    assert raised.value.problems[0].path == "classify.model"
    with pytest.raises(StageError, match="no document is left of 20"):
        built(tmp_path / "all", documents, model=str(folder), label="LABEL_1", min_score=2)
    with pytest.raises(ValidationError, match="not a fastText model"):
        ClassifyConfig(model="cc.en.300.bin")
    with pytest.raises(ValidationError, match="expected one of them"):
        ClassifyConfig(model="x", min_score=1, top_share=0.5)


def test_it_stands_between_dedupe_and_generate() -> None:
    served = {"endpoint": {"url": "http://127.0.0.1:8000/v1", "model": "m"}}
    sections: dict[str, Any] = {"ingest": {}, "dedupe": {}, "classify": {"model": "edu"}, "generate": served, "mix": {}}
    nodes = graph(parse({"name": "x", **sections}))
    chain = {name: nodes[name].inputs["documents"] for name in ("classify", "generate", "mix")}
    assert chain == {"classify": "dedupe", "generate": "classify", "mix": "generate"}
