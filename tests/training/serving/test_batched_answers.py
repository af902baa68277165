"""Continuous batching: what an answer is does not depend on the answers that are written with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from evaluation.generation.decoding import CHUNK_TOKENS, Decoder, tokens_in_memory
from evaluation.generation.llama_slots import LlamaSlots
from evaluation.generation.slots import Chunk
from evaluation.generation.token_choice import SamplingOptions, Token, TokenBias
from training.generation.answer_text import AnswerRequest, Writing
from training.generation.session import loaded

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def base(base_dir: Path) -> Loaded:
    lm = loaded(base_dir)
    return lm.model, lm.tokenizer


def request(number: int, most: int = 20, **options: Any) -> AnswerRequest:
    """Prompts of different lengths, some greedy, some drawn with their own seeds, without an end of text."""
    ids = [5 + (number * 7 + place) % 300 for place in range(1 + number * 5 % 23)]
    drawn = {"temperature": number % 3 / 2, "top_p": 0.9, "seed": number, "bias": TokenBias({(0,): -100.0})}
    return AnswerRequest(ids, SamplingOptions(most, frozenset([0]), **{**drawn, **options}))


def write(base: Loaded, requests: Sequence[AnswerRequest], at_once: int, *, staggered: bool = False) -> list[list[int]]:
    """The new ids of each answer. staggered: a request comes with each step, in place of all at first."""
    batch, writings = Decoder(base[0], at_once), [Writing(one, base[1]) for one in requests]
    coming = list(writings)
    while not all(one.is_over for one in writings):
        while coming:
            batch.add(coming.pop(0))
            if staggered:
                break
        batch.step()
    return [one.new for one in writings]


@pytest.fixture(scope="module")
def alone(base: Loaded) -> list[list[int]]:
    return [write(base, [request(number)], 1)[0] for number in range(14)]


@pytest.mark.parametrize(("at_once", "staggered"), [(32, False), (3, False), (32, True), (4, True)])
def test_answers_are_those_of_single_requests(
    base: Loaded, alone: list[list[int]], at_once: int, staggered: bool
) -> None:
    requests = [request(number) for number in range(14)]
    assert all(len(one) == 20 for one in alone)
    assert write(base, requests, at_once, staggered=staggered) == alone


def test_greedy_answers_are_those_of_generate(base: Loaded, alone: list[list[int]]) -> None:
    model, _ = base
    for number in (0, 3, 6):
        ids = torch.tensor([request(number).ids])
        wanted = model.generate(ids, max_new_tokens=20, do_sample=False, suppress_tokens=[0])[0, ids.shape[1] :]
        assert alone[number] == wanted.tolist()


def test_answers_that_memory_does_not_hold_go_on_later(base: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(number, most=60) for number in range(6)]
    wanted = [write(base, [one], 1)[0] for one in requests]
    monkeypatch.setattr("evaluation.generation.decoding.LEAST_WIDTH", 16)
    held: list[int] = []

    def slots(_: PreTrainedModel, width: int, *rest: Any) -> int:
        held.append(max(1, 160 // width))
        return held[-1]

    monkeypatch.setattr("evaluation.generation.decoding.slots_in_memory", slots)
    assert write(base, requests, 8, staggered=True) == wanted
    assert min(held) < len(requests) <= max(held)  # as they grew, fewer of them fitted


@pytest.mark.parametrize("left", [0, 1])
def test_an_answer_that_is_not_wanted_any_more_gives_its_slot_at_once(
    base: Loaded, alone: list[list[int]], left: int
) -> None:
    """In the first slot, to which the last one moves, and in the last."""
    batch = Decoder(base[0], 2)
    writings = {number: Writing(request(number), base[1]) for number in (1, 2, 4)}
    for writing in writings.values():
        batch.add(writing)
    for _ in range(3):
        batch.step()
    assert [bool(writing.new) for writing in writings.values()] == [True, True, False]  # two at once
    batch.remove(writings.pop((1, 2)[left]))
    batch.step()
    assert writings[4].new
    while not all(writing.is_over for writing in writings.values()):
        batch.step()
    for number, writing in writings.items():
        assert writing.new == alone[number]


def test_a_model_that_slots_do_not_support_answers_alone_by_the_same_choices(tokenizer_dir: Path) -> None:
    """Bias and log-probabilities too, which `generate` itself would not give."""
    config = MambaConfig(vocab_size=320, hidden_size=16, state_size=4, num_hidden_layers=1, eos_token_id=0)
    torch.manual_seed(0)
    base = MambaForCausalLM(config).eval(), AutoTokenizer.from_pretrained(tokenizer_dir)
    plain, drawn = request(0, 6, logprobs=2), request(1, 6)
    found = write(base, [plain, drawn, request(3, 6)], 4)
    ids = torch.tensor([plain.ids])
    wanted = base[0].generate(ids, max_new_tokens=6, do_sample=False, suppress_tokens=[0])[0, ids.shape[1] :].tolist()
    assert found[0] == wanted
    assert found[1] == write(base, [drawn], 1)[0] != write(base, [request(1, 6, temperature=0)], 1)[0]


@pytest.fixture(scope="module")
def llama(tokenizer_dir: Path) -> Loaded:
    """A Llama that this project's own layers compute, with room for long prompts."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=96, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval(), AutoTokenizer.from_pretrained(tokenizer_dir)


def prompt(length: int, first: int = 0) -> list[int]:
    return [5 + (first * 31 + n * 7 + n * n // 5) % 300 for n in range(length)]


def mixed(count: int) -> list[AnswerRequest]:
    """Prompts of one token to three chunks, greedy and drawn, with log-probabilities; some share their beginning."""
    lengths = (300, 7, 1, 129, 40, 256, 290, 20)
    return [
        AnswerRequest(
            prompt(lengths[number % 8], first=0 if number % 8 == 6 else number // 8),
            replace(request(number).options, max_new_tokens=8, logprobs=2),
        )
        for number in range(count)
    ]


def tokens_of(base: Loaded, requests: Sequence[AnswerRequest], at_once: int, *, staggered: bool) -> list[list[Token]]:
    """The tokens of each answer with their log-probabilities, as floats without rounding."""
    batch, writings = Decoder(base[0], at_once), [Writing(request, base[1]) for request in requests]
    coming = list(writings)
    while not all(writing.is_over for writing in writings):
        for _ in range(1 if staggered else len(coming)):
            if coming:
                batch.add(coming.pop(0))
        batch.step()
    return [[placed.token for piece in writing.pieces for placed in piece.tokens] for writing in writings]


@pytest.mark.parametrize("staggered", [False, True])
def test_own_layers_give_the_bits_of_a_single_request(
    llama: Loaded, staggered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed(16)
    alone = [tokens_of(llama, [query], 1, staggered=False)[0] for query in requests]
    assert all(len(tokens) == 8 for tokens in alone)
    assert tokens_of(llama, requests, 16, staggered=staggered) == alone
    assert Decoder(llama[0]).usable([prompt(9)], 9) and Decoder(llama[0]).has_own_layers
    monkeypatch.setattr("evaluation.generation.decoding.CACHE_BYTES", 1200 * 2 * 2 * 2 * 16 * 4)  # 1,200 tokens
    assert tokens_of(llama, requests, 16, staggered=staggered) == alone  # some are computed again


def test_neither_a_long_prompt_nor_many_short_ones_stall_the_others(llama: Loaded) -> None:
    batch = Decoder(llama[0], 4)
    running, long, short = (Writing(request(n, most=40), llama[1]) for n in (1, 2, 3))
    long.prompt = prompt(5 * CHUNK_TOKENS + 1)
    batch.add(running)
    batch.step()
    batch.add(long)
    batch.add(short)
    # The end of a prompt is read without the others: that of the short one at once, that of the long one at last.
    for step in range(1, 7):
        batch.step()
        assert (len(running.new), len(short.new), len(long.new)) == (step, step, 0)
    batch.step()
    assert (len(running.new), len(short.new), len(long.new)) == (6, 6, 1)
    batch.remove(long)
    # Prompts that follow each other delay the others by half at most.
    for number in range(4, 8):
        batch.add(Writing(request(number, most=1), llama[1]))
        batch.step()
    assert len(running.new) == 8


def test_equal_prompts_and_equal_beginnings_are_read_once(llama: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    advance = LlamaSlots.advance

    def counted(self: LlamaSlots, rows: Any, tokens: Any, positions: Any, chunks: Sequence[Chunk]) -> torch.Tensor:
        read.append(sum(len(chunk.ids) for chunk in chunks))
        return advance(self, rows, tokens, positions, chunks)

    monkeypatch.setattr(LlamaSlots, "advance", counted)
    length = 2 * CHUNK_TOKENS + 10
    several = [AnswerRequest(prompt(length), SamplingOptions(5, seed=1, number=n)) for n in range(4)]
    batch, writings = Decoder(llama[0], 8), [Writing(query, llama[1]) for query in several]
    for writing in writings:
        batch.add(writing)
    for _ in range(3):
        batch.step()
    assert sum(read) == length
    batch.add(Writing(AnswerRequest([*prompt(length - 5), 7], SamplingOptions(5)), llama[1]))
    batch.step()
    assert sum(read) == length + 6  # two chunks were there


@pytest.mark.parametrize("windowed", [False, True])
def test_layers_of_transformers_read_prompts_in_chunks(
    tokenizer_dir: Path, windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MistralConfig(
        vocab_size=320, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=11 if windowed else None, eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    base = MistralForCausalLM(config).eval(), AutoTokenizer.from_pretrained(tokenizer_dir)
    monkeypatch.setattr("evaluation.generation.decoding.CHUNK_TOKENS", 8)
    requests = [AnswerRequest(prompt(n, n), request(0, 10).options) for n in (30, 3, 8, 9, 17, 1)]
    written = write(base, requests, 6, staggered=True)
    for query, answer in zip(requests, written, strict=True):
        ids = torch.tensor([query.ids])
        expected = base[0].generate(ids, max_new_tokens=10, do_sample=False, suppress_tokens=[0])[0, ids.shape[1] :]
        assert answer == expected.tolist()


def test_the_cache_bounds_what_a_request_may_be(llama: Loaded) -> None:
    of_token = 2 * 2 * 2 * 16 * 4
    assert tokens_in_memory(llama[0], 700 * of_token) == 700
    batch = Decoder(llama[0], 4, cache_bytes=700 * of_token)
    writings = [Writing(AnswerRequest(prompt(690, n), SamplingOptions(10, seed=n)), llama[1]) for n in range(2)]
    for writing in writings:
        batch.add(writing)
    while not writings[1].is_over:
        batch.step()
        assert len(batch._rows) <= 1  # the second waits until the first has ended
    assert [len(writing.new) for writing in writings] == [10, 10]
