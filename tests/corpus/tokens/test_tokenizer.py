"""The tokenizer: loads in transformers, loses nothing, knows the chat format, sees no held-out text."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from corpus.config import IngestConfig, TokenizerConfig
from corpus.documents.parts import DocumentWriter, is_heldout, read_documents
from corpus.ingest import ingest
from corpus.tokenizer import tokenizer
from corpus.tokens.chat_template import SPECIAL_TOKENS
from corpus.tokens.encode import TableEncoder, encoder_of, load_tokenizer
from infra.errors import StageError
from infra.run import Run
from tests.corpus.conftest import build_stage
from tests.support.programs.command import REPOSITORY, environment

EVERY_ASCII_TWICE = "".join(f"{chr(point)}{chr(point)} {chr(point)}" for point in range(128))
TEXTS = [
    EVERY_ASCII_TWICE,
    "\u07ff\uffff\U0010fffd x\U000e0041\u3000\u3000",
    "plain words",
    "  indented\n\tand tabbed\r\n",
    "naïve café 你好 🙂",
    "e = m*c**2  # 42",
    "x " + "ACGT" * 700 + " " + "=" * 2001 + "\n" + "字" * 1100,
    "",
]


@pytest.fixture(scope="module", params=["bpe", "unigram", "wordpiece"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, documents, trained_tokenizer, tmp_path_factory):
    if kind == "bpe":
        return trained_tokenizer
    out = tmp_path_factory.mktemp(kind) / "tokenizer"
    return build_stage(tokenizer, TokenizerConfig(kind=kind, vocab_size=600), out, documents=documents)


@pytest.fixture(scope="module")
def loaded(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_whole(loaded, text):
    assert loaded.decode(loaded(text)["input_ids"]) == text


def test_special_tokens_have_the_first_ids_and_their_roles(loaded):
    assert loaded.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert (loaded.eos_token_id, loaded.bos_token_id, loaded.pad_token_id) == (0, 0, 1)
    assert len(loaded) == 600
    assert loaded("a")["input_ids"] == loaded("a", add_special_tokens=False)["input_ids"]


def test_chat_template_writes_the_contracted_format_and_marks_the_answer(loaded):
    chat = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    assert loaded.apply_chat_template(chat, tokenize=False) == "<|user|>Why?<|end|><|assistant|>Because.<|end|>"
    asked = loaded.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|user|>Why?<|end|><|assistant|>"
    masked = loaded.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    answer = [i for i, mask in zip(masked["input_ids"], masked["assistant_masks"], strict=True) if mask]
    assert loaded.decode(answer) == "Because.<|end|>"


def test_nothing_is_unknown(folder, kind):
    found = json.loads((folder / "aux" / "compression.json").read_text())
    assert found["this tokenizer"]["all"]["tokens"] > 1000 and found["this tokenizer"]["all"]["unknown"] == 0


def test_same_bytes_in_another_process_and_from_documents_in_another_order(folder, kind, documents, payload, tmp_path):
    turned = tmp_path / "turned"
    with DocumentWriter(turned / "documents", part_bytes=50_000) as writer:
        for document in sorted(read_documents(documents), reverse=True):
            writer.write(document)
    (turned / "sources.json").write_bytes((documents / "sources.json").read_bytes())
    (tmp_path / "config.yaml").write_text(f"{{kind: {kind}, vocab_size: 600}}")
    command = [sys.executable, "-m", "corpus.tokenizer", "--config", tmp_path / "config.yaml"]
    command += ["--input", f"documents={turned}", "--out", tmp_path / "out"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, cwd=REPOSITORY, env=environment())
    assert payload(tmp_path / "out") == payload(folder)


def test_the_fast_encoder_takes_every_kind(folder):
    model = load_tokenizer(folder)
    encoder = encoder_of(model, 0)
    assert isinstance(encoder, TableEncoder)
    ids, _ = encoder.encode(pa.array(TEXTS, pa.string()))
    assert ids.tolist() == [token for text in TEXTS for token in [*model.encode(text).ids, 0]]


def test_unigram_takes_the_most_probable_cut(build, documents):
    """The most probable cut by the scores in the file, found by trying all of them."""
    config = TokenizerConfig(kind="unigram", vocab_size=600, compare=False)
    model = load_tokenizer(build(tokenizer, config, documents=documents))
    vocabulary = json.loads(model.to_str())["model"]["vocab"]
    assert len(vocabulary) == 600 and all(score < 0 for _, score in vocabulary[6:])
    scores = dict(vocabulary[6:])

    def best(word: str) -> float:
        cuts = [scores[word[:end]] + best(word[end:]) for end in range(1, len(word) + 1) if word[:end] in scores]
        return max(cuts, default=0.0)

    for word in ("returns", "exception", "argument", "zqx"):
        assert sum(scores[piece] for piece in model.encode(word).tokens) == pytest.approx(best(word))


def test_long_text_without_spaces_gives_unigram_pieces(build, write):
    """SentencePiece passes over lines of more than 4,192 bytes."""
    text = "".join(f"北方沼泽的地图{'甲乙丙丁'[n % 4]}渡船的船长" for n in range(300))
    path = write("a.jsonl", "".join(json.dumps({"text": text[n:]}) + "\n" for n in range(20)))
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    config = TokenizerConfig(kind="unigram", vocab_size=300, compare=False, heldout_share=0.001)
    model = load_tokenizer(build(tokenizer, config, documents=documents))
    assert len(model.encode(text).ids) < len(text)
    assert model.decode(model.encode(text).ids) == text


def test_a_tokenizer_is_not_measured_without_held_out_text(build, write, tmp_path):
    text = "some words of a single document that is not held out, and words of it again " * 40
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [write("a.txt", text)]}]))
    (tmp_path / "out").mkdir()
    config = TokenizerConfig(vocab_size=300, heldout_share=1e-9)
    result = tokenizer(config, {"documents": documents}, tmp_path / "out", Run(tmp_path / "work"))
    assert "not measured" in result.headline and list(result.figures) == ["vocab_size"]


def test_compression_is_measured_by_source_on_held_out_text(folder, kind, documents):
    model = load_tokenizer(folder)
    found = json.loads((folder / "aux" / "compression.json").read_text())
    texts = [document.text for document in read_documents(documents) if is_heldout(document.group, 0.05)]
    tokens = sum(len(model.encode(text).ids) for text in texts)
    mine = found["this tokenizer"]["sources"]["docstrings"]
    assert mine["documents"] == len(texts) and mine["tokens"] == tokens
    assert mine["bytes_per_token"] == pytest.approx(sum(len(text.encode()) for text in texts) / tokens, rel=1e-5)
    assert mine["fertility"] == pytest.approx(tokens / sum(len(text.split()) for text in texts), rel=1e-5)
    assert ("GPT-2-style BPE" in found) == (kind != "bpe")


def test_a_sample_is_even_over_the_corpus_and_as_large_as_asked(build, write):
    """Each document has a character of its own: the ones that the tokenizer can write in one token were read."""
    characters = [chr(0x4E00 + i) for i in range(2000)]
    path = write("a.jsonl", "".join(json.dumps({"text": c * 100}) + "\n" for c in characters))
    documents = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [path]}]))
    config = TokenizerConfig(vocab_size=700, train_mb=0.06)
    model = load_tokenizer(build(tokenizer, config, documents=documents))
    places = [i for i, c in enumerate(characters) if len(model.encode(c * 50).ids) < 50]
    assert 140 < len(places) < 260
    assert min(places) < 200 and max(places) > 1800


def test_baselines_are_measured_beside(build, documents, trained_tokenizer):
    config = TokenizerConfig(vocab_size=400, baselines=[str(trained_tokenizer)])
    found = json.loads((build(tokenizer, config, documents=documents) / "aux" / "compression.json").read_text())
    ours, baseline = found["this tokenizer"], found[trained_tokenizer.name]
    assert (ours["vocab_size"], baseline["vocab_size"]) == (400, 600)
    assert baseline["all"]["bytes_per_token"] > ours["all"]["bytes_per_token"] > 1


def test_baselines_of_one_name_are_told_apart_by_their_folders(build, documents, trained_tokenizer, tmp_path):
    for name in ("one", "other"):
        shutil.copytree(trained_tokenizer, tmp_path / name / "tokenizer")
    folders = [str(tmp_path / name / "tokenizer") for name in ("one", "other")]
    out = build(tokenizer, TokenizerConfig(vocab_size=400, baselines=folders), documents=documents)
    found = json.loads((out / "aux" / "compression.json").read_text())
    assert list(found) == ["this tokenizer", "one/tokenizer", "other/tokenizer"]


def test_held_out_text_leaves_no_trace(build, write):
    texts = [f"sentence number {i} about ordinary things" for i in range(300)]
    path = write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = IngestConfig(read=[{"kind": "files", "paths": [path]}])
    plain = build(ingest, config)
    heldout = [document for document in read_documents(plain) if is_heldout(document.group, 0.05)]
    assert heldout
    rest = [text for text in texts if text not in {document.text for document in heldout}]
    write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in rest))
    trained = [build(tokenizer, TokenizerConfig(vocab_size=300), documents=d) for d in (plain, build(ingest, config))]
    assert (trained[0] / "tokenizer.json").read_bytes() == (trained[1] / "tokenizer.json").read_bytes()


def test_a_vocabulary_too_large_for_the_text_says_how_large_it_can_be(build, write):
    words = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [write("a.txt", "a few words only")]}]))
    with pytest.raises(StageError, match=r"tokenizer\.vocab_size: .* gives 26\d entries, not the requested 4,096"):
        build(tokenizer, TokenizerConfig(), documents=words)


def test_a_finished_tokenizer_is_taken_over_for_a_text_too_small_to_train_one_like_it(build, trained_tokenizer, write):
    rows = "".join(json.dumps({"text": f"sentence number {number}"}) + "\n" for number in range(300))
    words = build(ingest, IngestConfig(read=[{"kind": "files", "paths": [write("a.jsonl", rows)]}]))
    out = build(tokenizer, TokenizerConfig(pretrained=str(trained_tokenizer)), documents=words)
    found = json.loads((out / "aux" / "compression.json").read_text())
    assert found["GPT-2-style BPE"]["vocab_size"] < found["this tokenizer"]["vocab_size"] == 600


def test_a_finished_tokenizer_is_taken_over_with_our_tokens_added(build, documents, tmp_path):
    from tokenizers import models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    foreign = Tokenizer(models.BPE())
    foreign.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    foreign.train_from_iterator(
        ["some words"], trainers.BpeTrainer(vocab_size=260, special_tokens=["<s>", "<unk>"], initial_alphabet=alphabet)
    )
    folder = tmp_path / "foreign"
    PreTrainedTokenizerFast(tokenizer_object=foreign, eos_token="<s>", unk_token="<unk>").save_pretrained(folder)

    out = build(tokenizer, TokenizerConfig(pretrained=str(folder)), documents=documents)
    adopted = AutoTokenizer.from_pretrained(out)
    old = AutoTokenizer.from_pretrained(folder)
    assert adopted("some words")["input_ids"] == old("some words")["input_ids"]
    ids = adopted.convert_tokens_to_ids(list(SPECIAL_TOKENS))
    assert len(set(ids)) == 5 and min(ids) >= len(old) and adopted.eos_token == "<|endoftext|>"
    assert adopted.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|user|>a<|end|>"


def test_a_folder_without_a_tokenizer_is_named(build, documents, tmp_path):
    with pytest.raises(StageError, match=r"expected a Hugging Face tokenizer folder"):
        build(tokenizer, TokenizerConfig(pretrained=str(tmp_path)), documents=documents)
