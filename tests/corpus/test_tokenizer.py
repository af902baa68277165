"""The tokenizer: loads in transformers, loses nothing, knows the chat format, sees no held-out text."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from corpus.chat_template import SPECIAL_TOKENS
from corpus.config import IngestConfig, TokenizerConfig
from corpus.documents import read_documents
from corpus.ingest import ingest
from corpus.split import is_heldout
from corpus.tokenizer import tokenizer
from infra.errors import StageError

TEXTS = ["plain words", "  indented\n\tand tabbed\r\n", "naïve café 你好 🙂", "e = m*c**2  # 42", ""]


@pytest.fixture(scope="module")
def loaded(trained_tokenizer):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(trained_tokenizer)


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


def test_same_bytes_twice(build, documents, trained_tokenizer, payload):
    assert payload(build(tokenizer, TokenizerConfig(vocab_size=600), documents=documents)) == payload(trained_tokenizer)


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
    with pytest.raises(StageError, match=r"tokenizer\.vocab_size: .* gives 26\d entries, asked were 4,096"):
        build(tokenizer, TokenizerConfig(), documents=words)


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
