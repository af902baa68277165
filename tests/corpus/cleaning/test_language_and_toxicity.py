"""Documents in other languages and toxic ones are dropped; the language is found out; the scorer can be another."""

from __future__ import annotations

import json
from collections import Counter

import pyarrow.parquet as pq
import pytest

from corpus.clean import clean
from corpus.cleaning.config import CleanConfig, LanguageConfig
from corpus.config import IngestConfig
from corpus.documents.parts import read_documents
from corpus.ingest import ingest
from infra.errors import StageError

OFF = {"min_characters": None, "gopher_quality": None, "gopher_repetition": None, "personal_data": None}
ENGLISH = "The committee met on Monday to discuss the new bridge, and heard from those who live beside the river."
GERMAN = (
    "Der Ausschuss traf sich am Montag, um über die neue Brücke zu sprechen, und hörte die Anwohner des Flusses an."
)
FRENCH = (
    "Le comité s'est réuni lundi pour discuter du nouveau pont, et il a entendu ceux qui vivent près de la rivière."
)
UNSURE = "x = 3"
TOXIC = "You are a fucking idiot, and so is your stupid bitch of a mother."


@pytest.fixture
def ingested(build, write):
    def make(*sources):
        read = [
            {"kind": "files", "name": f"source-{number}", "paths": [write(f"{number}.jsonl", "".join(
                json.dumps({"text": text}) + "\n" for text in texts
            ))]}
            for number, texts in enumerate(sources)
        ]  # fmt: skip
        return build(ingest, IngestConfig(read=read))

    return make


def test_the_language_is_filled_in_and_others_are_dropped(build, ingested):
    documents = ingested([ENGLISH, GERMAN, FRENCH, UNSURE])
    filled = {
        d.text: d.language for d in read_documents(build(clean, CleanConfig(**OFF, language={}), documents=documents))
    }
    assert filled == {ENGLISH: "en", GERMAN: "de", FRENCH: "fr", UNSURE: ""}
    out = build(clean, CleanConfig(**OFF, language={"keep": ["en", "de"]}), documents=documents)
    assert {d.text for d in read_documents(out)} == {ENGLISH, GERMAN}
    dropped = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert {row["text"]: row["rule"] for row in dropped} == {FRENCH: "language.keep", UNSURE: "language.min_confidence"}


def test_a_source_can_have_languages_of_its_own(build, ingested):
    documents = ingested([ENGLISH, GERMAN], [ENGLISH + " Again.", GERMAN + " Nochmals."])
    config = CleanConfig(**OFF, language={"keep": ["en"], "keep_by_source": {"source-1": ["de"]}})
    kept = {d.text for d in read_documents(build(clean, config, documents=documents))}
    assert kept == {ENGLISH, GERMAN + " Nochmals."}
    misspelled = CleanConfig(**OFF, language={"keep": ["en"], "keep_by_source": {"sorce-1": ["de"]}})
    with pytest.raises(StageError, match=r"clean\.language\.keep_by_source.*did you mean source-1"):
        build(clean, misspelled, documents=documents)


def test_languages_of_real_text(real_data):
    from corpus.cleaning.steps import Language

    identify = Language(LanguageConfig()).identify
    with open(real_data("web_demo/c4_demo.jsonl"), encoding="utf8") as file:
        found = Counter(identify(json.loads(line)["text"])[0] for line in file)
    assert found["en"] >= 0.97 * found.total()


def test_toxic_passages_take_their_document_out(build, ingested):
    documents = ingested([ENGLISH, TOXIC, f"{ENGLISH} " * 30 + TOXIC])
    config = CleanConfig(**OFF, toxicity={"window_characters": 200})
    out = build(clean, config, documents=documents)
    assert [d.text for d in read_documents(out)] == [ENGLISH]
    dropped = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert len(dropped) == 2 and all(row["value"] > 0.9 and "profanity" in row["paper"] for row in dropped)


def test_any_sequence_classifier_can_score(tmp_path, build, ingested):
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "idiot"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )
    config = BertConfig(
        vocab_size=3, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        id2label={0: "fine", 1: "toxic"}, label2id={"fine": 0, "toxic": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    with torch.inference_mode():
        scores = [
            torch.softmax(model(**tokenizer(text, return_tensors="pt", truncation=True)).logits, -1)[0, 1].item()
            for text in (ENGLISH, TOXIC)
        ]
    low, high = sorted(scores)
    section = {"model": str(tmp_path / "model"), "max_score": (low + high) / 2}
    out = build(clean, CleanConfig(**OFF, toxicity=section), documents=ingested([ENGLISH, TOXIC]))
    [row] = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert row["value"] == pytest.approx(high, abs=1e-5)
    assert [source.key for source in CleanConfig(toxicity=section).sources()] == ["clean.toxicity.model"]
