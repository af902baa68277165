"""Answers in batches that lose what has ended are those of transformers' own `generate`, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import evaluation.generation.continuations as generation
from evaluation.generation.continuations import Sampling, generate
from evaluation.generation.decoding import Decoder
from infra.run import Run

WORDS, STOPS = 61, set(range(0, 61, 8))
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def network(kind: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    common = SIZES | {"vocab_size": WORDS, "intermediate_size": 48, "max_position_embeddings": 128} | more
    model: PreTrainedModel
    if kind == "gpt2":
        config = GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
        model = GPT2LMHeadModel(config)
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, num_key_value_heads=4, head_dim=8))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=2))
    model.generation_config = GenerationConfig(suppress_tokens=[5, 6])
    return model.eval()


def prompts(count: int) -> list[list[int]]:
    """Of 1 to 20 tokens; each third is asked twice."""
    drawn = torch.Generator().manual_seed(1)
    found = [torch.randint(0, WORDS, (1 + 7 * n % 20,), generator=drawn).tolist() for n in range(count)]
    return [ids for n, ids in enumerate(found) for _ in range(1 + (n % 3 == 0))]


def by_transformers(monkeypatch: pytest.MonkeyPatch, *asked: Any) -> list[list[int]]:
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "usable", lambda *_: False)
        return generate(*asked)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_the_likeliest_tokens_are_those_of_generate(kind: str) -> None:
    """Four slots for twenty-four prompts: each is used again and again, and the last answers move into freed ones."""
    model, asked = network(kind), prompts(18)
    decoder = Decoder(model, 4)
    assert decoder.usable(asked, 12)
    assert decoder.has_own_layers == (kind != "gpt2")
    heard: list[int] = []
    found = decoder.answer(
        asked, 12, lambda logits, rows: logits.argmax(-1), lambda row, new: new[-1] in STOPS, heard.append
    )
    for ids, new in zip(asked, found, strict=True):
        alone = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=12, eos_token_id=sorted(STOPS), pad_token_id=0, suppress_tokens=None,
        )[0, len(ids) :].tolist()  # fmt: skip
        assert new == alone
    assert len({len(new) for new in found}) > 2, "answers of one length prove little"
    assert heard[0] == 0 and sorted(heard) == heard and heard[-1] < len(asked)


@pytest.mark.parametrize(
    ("kind", "temperature", "top_p"),
    [("gpt2", 0.0, 1.0), ("llama", 1.0, 0.9), ("llama", 0.6, 1.0), ("qwen3", 1.5, 0.5)],
)
def test_what_is_drawn_under_a_seed_stays_what_generate_draws(
    kind: str, temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half the words are stops: most batches end early, and those behind them were begun from the wrong draws."""
    model, asked = network(kind), prompts(15)
    monkeypatch.setattr(generation, "ROWS_AT_ONCE", 12)
    sampling = Sampling(8, temperature, top_p, seed=5)
    for stops in (set(range(0, WORDS, 2)), STOPS):
        theirs = by_transformers(monkeypatch, model, asked, sampling, stops)
        before = torch.get_rng_state()
        assert generate(model, asked, sampling, stops) == theirs
        assert torch.equal(torch.get_rng_state(), before)
        with monkeypatch.context() as patch:  # too many numbers to keep
            patch.setattr(generation, "NUMBERS_AT_ONCE", 12 * WORDS)
            assert generate(model, asked, sampling, stops) == theirs
    assert all(5 not in new and 6 not in new for new in theirs)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-39, 1e-9])
def test_the_coldest_draws_are_the_likeliest(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits over such a temperature were infinite, and their softmax no number."""
    model, asked = network("llama"), prompts(3)
    likeliest = generate(model, asked, Sampling(4, 0.0), STOPS)
    cold = Sampling(4, temperature, 0.9, seed=5)
    assert generate(model, asked, cold, STOPS) == by_transformers(monkeypatch, model, asked, cold, STOPS) == likeliest


def test_a_hook_that_measures_leaves_the_layers_and_one_that_may_change_them_does_not() -> None:
    model, asked = network("qwen3"), prompts(6)
    decoder = Decoder(model, 4)
    model.model.register_forward_hook(lambda *_: None)
    assert decoder.usable(asked, 4) and decoder.has_own_layers
    for module in (model, model.model.layers[0], model.lm_head):
        hook = module.register_forward_hook(lambda *_: None)
        assert not decoder.has_own_layers
        hook.remove()

    def halve(_module: Any, _given: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state / 2
        return output

    other = network("qwen3")
    other.model.register_forward_hook(halve)
    changed = Decoder(other, 4)
    assert changed.usable(asked, 4) and not changed.has_own_layers


def test_numbers_made_row_by_row_are_those_that_torch_draws() -> None:
    ours, theirs = (torch.Generator().manual_seed(9) for _ in range(2))
    shape = generation.ROWS_IN_CACHE * 2 + 3, 4096
    assert torch.equal(generation.exponential(shape, ours), torch.empty(shape).exponential_(generator=theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_a_model_that_counts_or_looks_back_in_its_own_way_is_asked_by_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)).eval()
    mamba = MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4)).eval()
    window = network("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    asked = prompts(6)
    for model in (bloom, mamba, window):
        assert not Decoder(model, 4).usable(asked, 16)
        found = generate(model, asked, Sampling(4, 0.0), STOPS)
        assert found == by_transformers(monkeypatch, model, asked, Sampling(4, 0.0), STOPS)


def test_answers_to_lm_eval_end_where_its_own_backend_ends_them(model_dir: Path, run: Run) -> None:
    """Asked one by one by lm-eval, all at once by us: at strings of several tokens, at an end token, and by a model
    whose own settings ask for more than the likeliest token, which is asked by `generate`."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from evaluation.generation.language_model import load_model
    from evaluation.harness import generation as harness_generation
    from evaluation.harness.model import ReportingHFLM

    lm = load_model(model_dir, run)
    texts = [f"{'The clerk reads. ' * (n % 4)}Question {n * n}:" for n in range(6)]
    for told in ({}, {"eos_token_id": list(range(0, 400, 9))}, {"repetition_penalty": 1.3, "eos_token_id": [0]}):
        lm.model.generation_config = GenerationConfig(**told)
        assert harness_generation.is_plain(lm.model, {"do_sample": False}) == ("repetition_penalty" not in told)
        # What its own way answers depends on the batch, where a stop string is half a character.
        batch = 2 if "repetition_penalty" in told else 1
        own = HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=batch)
        free = own.generate_until([Instance("generate_until", {}, (texts[1], {"max_gen_toks": 10}), 0)])[0]
        asked = [{"until": [free[5:8], "a", "e "], "max_gen_toks": 16}, {"max_gen_toks": 8}]
        requests = [
            Instance("generate_until", {}, (text, {**asked[number % 2], "do_sample": False}), number)
            for number, text in enumerate(texts)
        ]
        theirs = own.generate_until(requests, disable_tqdm=True)
        assert ReportingHFLM(run, lm.model, lm.tokenizer, 2).generate_until(requests) == theirs
        assert len({len(one) for one in theirs}) > 2, "answers of one length prove little"


def test_a_stop_string_of_a_space_is_seen_in_tokens_whose_space_sentencepiece_drops() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from evaluation.harness.generation import StopText

    vocab = {piece: number for number, piece in enumerate(["<unk>", "\u2581", "\u2581one", "\u2581two", "s"])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert tokenizer.decode([2]) == "one" and tokenizer.decode([2, 3]) == "one two"
    ended = StopText(tokenizer, [" "], frozenset())
    assert not ended(0, [2]) and not ended(0, [2, 4])
    assert ended(0, [2, 4, 3])
