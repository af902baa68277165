"""Continuous batching: what an answer is does not depend on the answers that are written with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from evaluation.generation.decoding import Decoder
from evaluation.generation.token_choice import SamplingOptions, TokenBias
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

    def slots(_: PreTrainedModel, width: int) -> int:
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
