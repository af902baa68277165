"""Documents that say the same go, exactly those of a comparison of all pairs, and each with the one that stays."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from corpus.documents.parts import DocumentWriter, document_parts, link_parts, make_document, read_documents
from corpus.documents.passes import Passes
from corpus.semantic.clusters import Clusters, find_clusters, find_duplicates
from corpus.semantic.config import SemanticDedupeConfig
from corpus.semantic.embeddings import EmbeddingFile, embed_documents
from corpus.semantic.encoder import TextEncoder
from corpus.semantic.stage import in_order, semantic_dedupe
from flows.config.graph import graph
from flows.config.read import parse
from infra.errors import Cancelled, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.programs.command import Answer, write_config

WORDS = ["river", "mill", "the", "bends", "twice", "chapter", "a", "quiet", "lamp", "wind"]
TEXTS = [" ".join(words) for words in list(itertools.combinations(WORDS, 6))[::10][:20]]
PAIRS = {20: 3, 21: 12, 22: 3}
"""Number of a text of the same words in another order → that of the text: a bag of words is its mean embedding."""
CPU = LaunchConfig(device="cpu", workers=1)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with random weights and 32 positions, all of whose sentences are bags of words: it has no embeddings of
    positions that differ."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=12, max_position_embeddings=32, initializer_range=0.5, **shape))
    torch.nn.init.zeros_(model.embeddings.position_embeddings.weight)
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer.save_pretrained(folder)
    model.eval().save_pretrained(folder)
    return folder


def texts_with_pairs() -> list[str]:
    return [*TEXTS, *(" ".join(reversed(TEXTS[original].split())) for original in PAIRS.values())]


def given(folder: Path, texts: Sequence[str], parts: int = 4) -> Path:
    for part in range(parts):
        with DocumentWriter(folder / str(part) / "documents") as writer:
            for number in range(part * len(texts) // parts, (part + 1) * len(texts) // parts):
                source = f"{'crawl' if number % 2 else 'books'}/{number}"
                writer.write(make_document(texts[number], source)._replace(id=f"{number:016x}"))
    link_parts([folder / str(part) for part in range(parts)], folder)
    return folder


def embedding_file(path: Path, embeddings: np.ndarray) -> EmbeddingFile:
    embeddings.astype(np.float32).tofile(path)
    return EmbeddingFile(path, *embeddings.shape)


def random_embeddings(count: int, seed: int) -> np.ndarray:
    """A third of them are near another one, in chains too: A like B and B like C, but not A like C."""
    generator = np.random.default_rng(seed)
    embeddings = generator.normal(size=(count, 24))
    for number in generator.choice(np.arange(1, count), count // 3, replace=False):
        embeddings[number] = embeddings[generator.integers(number)] + generator.normal(size=24) * 0.25
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings.astype(np.float32)


def all_pairs(embeddings: np.ndarray, order: Sequence[int], threshold: float) -> dict[int, int]:
    """By brute force: document → the most similar one of those that were kept before it."""
    kept: list[int] = []
    clusters_found = {}
    for document in order:
        similar = embeddings[kept] @ embeddings[document]
        if kept and similar.max() >= threshold:
            clusters_found[document] = kept[similar.argmax()]
        else:
            kept.append(document)
    return clusters_found


@pytest.mark.parametrize(("clusters", "keep"), [(1, "first"), (1, "farthest"), (12, "farthest"), (12, "nearest")])
def test_duplicates_are_those_of_all_pairs_within_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clusters: int, keep: str
) -> None:
    """Blocks and pieces are small, so that a cluster has many."""
    monkeypatch.setattr("corpus.semantic.clusters.BLOCK", 100)
    monkeypatch.setattr("corpus.semantic.clusters.SIMILARITIES_AT_ONCE", 5000)
    embeddings = random_embeddings(3000, 4)
    file = embedding_file(tmp_path / "embeddings.bin", embeddings)
    config = SemanticDedupeConfig(model="m", threshold=0.9, clusters=clusters)
    clusters_found = find_clusters(file, config, lambda: None)
    assert clusters_found.count == clusters
    duplicates: dict[int, int] = {}
    expected: dict[int, int] = {}
    for members in clusters_found.members():
        centre = embeddings[members].mean(0)
        ordered = in_order(members, clusters_found.similarities, keep)
        to_centre = embeddings[members] @ (centre / np.linalg.norm(centre))
        assert np.allclose(clusters_found.similarities[members], to_centre, atol=1e-5), "k-means has converged"
        originals, similarities = find_duplicates(file, ordered, 0.9, lambda: None)
        removed = originals >= 0
        assert np.allclose(
            similarities[removed], (embeddings[ordered[removed]] * embeddings[originals[removed]]).sum(1)
        )
        duplicates |= dict(zip(ordered[removed].tolist(), originals[removed].tolist(), strict=True))
        expected |= all_pairs(embeddings, ordered.tolist(), 0.9)
    assert duplicates == expected and len(expected) > 500


def test_most_duplicates_are_in_one_cluster(tmp_path: Path) -> None:
    embeddings = random_embeddings(3000, 5)
    file = embedding_file(tmp_path / "embeddings.bin", embeddings)
    config = SemanticDedupeConfig(model="m", clusters=12)
    clusters_found = find_clusters(file, config, lambda: None)
    assert np.bincount(clusters_found.labels).max() < 600
    pairs = np.array(list(all_pairs(embeddings, range(3000), 0.9).items()))
    assert (clusters_found.labels[pairs[:, 0]] == clusters_found.labels[pairs[:, 1]]).mean() > 0.85
    again = find_clusters(file, config, lambda: None)
    assert np.array_equal(clusters_found.labels, again.labels)


def test_a_large_cluster_is_divided_and_equal_embeddings_stay_together(tmp_path: Path) -> None:
    embeddings = random_embeddings(2000, 6)
    embeddings[500:1500] = embeddings[500]
    file = embedding_file(tmp_path / "embeddings.bin", embeddings)
    config = SemanticDedupeConfig(model="m", clusters=1, max_cluster_documents=200)
    clusters_found = find_clusters(file, config, lambda: None)
    sizes = np.bincount(clusters_found.labels)
    assert sizes.sum() == 2000 and sizes.min() > 0 and np.sort(sizes)[-2] <= 200
    assert set(clusters_found.labels[500:1500]) == {sizes.argmax()} and sizes.max() < 1200
    members = next(members for members in clusters_found.members() if members.size == sizes.max())
    originals, _ = find_duplicates(file, members, 0.99, lambda: None)
    assert (originals >= 0).sum() >= 999


def test_the_least_central_document_of_a_group_stays() -> None:
    """The paper's rule, and the alternatives."""
    similarities = np.array([0.9, 0.5, 0.7, 0.5, 0.1], np.float32)
    members = np.array([0, 1, 2, 3])
    assert in_order(members, similarities, "farthest").tolist() == [1, 3, 2, 0]
    assert in_order(members, similarities, "nearest").tolist() == [0, 2, 1, 3]
    assert in_order(members, similarities, "first").tolist() == [0, 1, 2, 3]
    assert [some.tolist() for some in Clusters(np.array([1, 0, 1], np.int32), similarities, 2).members()] == [
        [1],
        [0, 2],
    ]


def test_embeddings_are_means_of_hidden_states_over_all_windows_of_a_text(encoder: Path) -> None:
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(encoder), AutoTokenizer.from_pretrained(encoder)
    longest = " ".join(WORDS[number % 7] for number in range(100))
    texts = [*TEXTS[:5], longest, longest + " lamp", ""]
    expected = []
    for text in texts:
        ids = tokenizer(text)["input_ids"][:64]
        with torch.inference_mode():
            states = [model(torch.tensor([ids[at : at + 32]])).last_hidden_state[0] for at in range(0, len(ids), 32)]
        total = torch.cat(states).mean(0).numpy() if ids else np.zeros(16)
        expected.append(total / (np.linalg.norm(total) or 1))
    config = SemanticDedupeConfig(model=str(encoder), max_tokens=64, batch_windows=3)
    embeddings, is_cut = TextEncoder(config, "cpu")(texts)
    assert np.allclose(embeddings, expected, atol=1e-5)
    assert is_cut.tolist() == [False] * 5 + [True, True, False]
    complete, is_cut = TextEncoder(SemanticDedupeConfig(model=str(encoder)), "cpu")(texts)
    assert not is_cut.any() and np.abs(complete[5] - complete[6]).max() > 1e-3
    assert np.allclose(embeddings[5], embeddings[6], atol=1e-6), "they differ after what is read of them"


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification", "LlamaForCausalLM"])
def test_models_with_an_output_layer_embed_by_what_is_below_it(tmp_path: Path, encoder: Path, kind: str) -> None:
    import torch
    import transformers

    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings = transformers.LlamaConfig if kind.startswith("Llama") else transformers.BertConfig
    torch.manual_seed(2)
    model = getattr(transformers, kind)(settings(vocab_size=12, max_position_embeddings=32, **shape)).eval()
    transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    embeddings, _ = TextEncoder(SemanticDedupeConfig(model=str(tmp_path)), "cpu")(TEXTS[:2])
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        mean = model.base_model(ids).last_hidden_state[0].mean(0)
    assert np.allclose(embeddings[0], torch.nn.functional.normalize(mean, dim=0).numpy(), atol=1e-5)


def test_each_duplicate_is_recorded_with_the_document_that_stays(tmp_path: Path, encoder: Path) -> None:
    texts = texts_with_pairs()
    made = []
    for turn in ("one", "two"):
        out = tmp_path / turn
        out.mkdir()
        config = SemanticDedupeConfig(model=str(encoder), threshold=0.9999, keep="first")
        result = semantic_dedupe(
            config, {"documents": given(tmp_path / f"in-{turn}", texts)}, out, Run(tmp_path / f"{turn}.work", CPU)
        )
        made.append([file.read_bytes() for file in sorted(out.rglob("*.parquet")) if file.parent.name != "text"])
    rows = {int(row["id"], 16): row for row in pq.read_table(out / "aux" / "duplicates.parquet").to_pylist()}
    assert {number: int(row["original"], 16) for number, row in rows.items()} == PAIRS
    assert all(row["rule"] == "semantic_duplicate" and row["similarity"] > 0.9999 for row in rows.values())
    assert (rows[21]["source"], rows[21]["original_source"]) == ("crawl/21", "books")
    assert [document.text for document in read_documents(out)] == TEXTS
    dropped = pq.read_table(out / "aux" / "dropped.parquet").to_pylist()
    assert {row["text"] for row in dropped} == set(texts[20:]) and dropped[0]["paper"] == "SemDeDup, Abbas et al., 2023"
    counts = json.loads((out / "aux" / "counts.json").read_text())
    assert (counts["read"], counts["kept"], counts["dropped"]) == (23, 20, {"semantic_duplicate": 3})
    assert (counts["groups"], counts["largest_group"], counts["clusters"], counts["cut"]) == (2, 3, 1, 0)
    [largest, *_] = json.loads((out / "aux" / "clusters.json").read_text())
    assert largest["kept"]["text"] == TEXTS[3] and {row["text"] for row in largest["samples"]} == {texts[20], texts[22]}
    assert sum(row["documents"] for row in counts["near"]["similarities"]) == 3
    assert result.figures["dropped"] == 3 and made[0] == made[1]


def test_an_interrupted_build_goes_on_at_its_part(
    tmp_path: Path, encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: list[str] = []
    embed: Callable[..., object] = TextEncoder.__call__

    def counted(encoder: TextEncoder, texts: Sequence[str]) -> object:
        embedded.extend(texts)
        return embed(encoder, texts)

    monkeypatch.setattr(TextEncoder, "__call__", counted)
    texts = texts_with_pairs()
    parts = document_parts(given(tmp_path / "in", texts))
    config = SemanticDedupeConfig(model=str(encoder))
    with pytest.raises(Cancelled):
        embed_documents(config, Passes(Run(tmp_path / "work", CPU, is_cancelled=lambda: len(embedded) >= 12), parts))
    assert 12 <= len(embedded) < len(texts)
    file, _ = embed_documents(config, Passes(Run(tmp_path / "work", CPU), parts))
    assert len(texts) <= len(embedded) <= len(texts) + 6
    fresh, _ = embed_documents(config, Passes(Run(tmp_path / "fresh", CPU), parts))
    assert file.path.read_bytes() == fresh.path.read_bytes() and file.rows == len(texts)


def test_what_is_no_encoder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StageError) as raised:
        TextEncoder(SemanticDedupeConfig(model=str(tmp_path)), "cpu")
    assert raised.value.problems[0].path == "semantic_dedupe.model"


def test_the_command_runs_it_between_dedupe_and_classify(
    tmp_path: Path, encoder: Path, run: Callable[..., Answer]
) -> None:
    """The report's funnel has it, and a build reports how much disk its embeddings need."""
    nodes = graph(
        parse({"name": "x", "ingest": {}, "dedupe": {}, "semantic_dedupe": {"model": "e"}, "classify": {"model": "m"}})
    )
    assert [nodes[name].inputs["documents"] for name in ("semantic_dedupe", "classify")] == [
        "dedupe",
        "semantic_dedupe",
    ]
    texts = texts_with_pairs()
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sections = {"ingest": {"read": [{"kind": "files", "paths": [str(source)]}]}, "corpus_report": {}}
    settings = {"model": str(encoder), "threshold": 0.9999, "keep": "first"}
    config = {"name": "semantic", **sections, "semantic_dedupe": settings, "launch": {"device": "cpu"}}
    answer = run("run", write_config(tmp_path / "config.yaml", config), "--root", tmp_path / "store")
    assert answer.code == 0, answer.document["errors"]
    rows = answer.rows()
    built = Path(rows["semantic_dedupe"]["path"])
    assert [document.text for document in read_documents(built)] == TEXTS
    facts = json.loads((Path(rows["corpus_report"]["path"]) / "facts.json").read_text())
    assert facts["documents dropped by rule"] == {"semantic_dedupe: semantic_duplicate": 3}
    assert facts["documents left by stage"] == {"ingest": 23, "semantic_dedupe": 20}
    page = (Path(rows["corpus_report"]["path"]) / "aux" / "corpus_report.html").read_text()
    assert "3 of 23 documents say the same as another one." in page
    needed = SemanticDedupeConfig(**settings).disk_bytes({"documents": Path(rows["ingest"]["path"])})
    assert needed == 23 * 16 * 4
