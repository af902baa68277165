"""The decoder: greedy answers are those of transformers' own `generate`, and draws follow from seed and number."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from evaluation.generation.decoding import Decoder, generate
from evaluation.generation.slots import ModelSlots, unseen
from evaluation.generation.token_choice import ChosenAnswer, SamplingOptions, TokenBias, choose_tokens
from evaluation.harness.generation import is_plain
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
    """Of 1 to 20 tokens; each third is questions twice."""
    drawn = torch.Generator().manual_seed(1)
    found = [torch.randint(0, WORDS, (1 + 7 * n % 20,), generator=drawn).tolist() for n in range(count)]
    return [ids for n, ids in enumerate(found) for _ in range(1 + (n % 3 == 0))]


def by_transformers(monkeypatch: pytest.MonkeyPatch, *questions: Any) -> list[list[int]]:
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "usable", lambda *_: False)
        return generate(*questions)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_the_likeliest_tokens_are_those_of_generate(kind: str) -> None:
    """Four slots for twenty-four prompts: each is used again and again, and the last answers move into freed ones."""
    model, questions = network(kind), prompts(18)
    decoder = Decoder(model, 4)
    assert decoder.usable(questions, 12)
    assert decoder.has_own_layers == (kind != "gpt2")
    heard: list[int] = []
    options = SamplingOptions(12, frozenset(STOPS), temperature=0)
    answers = [ChosenAnswer(ids, options) for ids in questions]
    decoder.answer(answers, heard.append)
    found = [answer.new for answer in answers]
    for ids, new in zip(questions, found, strict=True):
        alone = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=12, eos_token_id=sorted(STOPS), pad_token_id=0,
        )[0, len(ids) :].tolist()  # fmt: skip
        assert new == alone
    assert len({len(new) for new in found}) > 2, "answers of one length prove little"
    assert heard[0] == 0 and sorted(heard) == heard and heard[-1] < len(questions)


@pytest.mark.parametrize(
    ("kind", "temperature", "top_p"),
    [("gpt2", 0.0, 1.0), ("llama", 1.0, 0.9), ("llama", 0.6, 1.0), ("qwen3", 1.5, 0.5)],
)
def test_drawn_answers_depend_on_their_seed_and_number_alone(
    kind: str, temperature: float, top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In large and small batches, in parts as ranks draw them, and by the passes of transformers' `generate`."""
    model, questions = network(kind), prompts(15)
    options = SamplingOptions(8, frozenset(STOPS), temperature, top_p, seed=5)
    before = torch.get_rng_state()
    found = generate(model, questions, options)
    assert generate(model, questions, options, at_once=3) == found
    assert generate(model, questions[7:], options, numbers=range(7, len(questions))) == found[7:]
    assert by_transformers(monkeypatch, model, questions, options) == found
    assert torch.equal(torch.get_rng_state(), before)
    assert all(5 not in new and 6 not in new for new in found) and len({len(new) for new in found}) > 2
    assert (generate(model, questions, replace(options, seed=6)) == found) == (temperature == 0)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_draws_follow_the_distribution_within_the_nucleus(top_p: float) -> None:
    """The nucleus is held against its definition, by a sort."""
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.0, 0.4, -3.0, 0.0]])
    probabilities, order = logits[0].softmax(-1).sort(descending=True)
    kept = probabilities.cumsum(0) - probabilities < top_p
    expected = torch.zeros(7).index_put_((order,), probabilities * kept / probabilities[kept].sum())
    answers = [ChosenAnswer([0], SamplingOptions(1, top_p=top_p, seed=3, number=n)) for n in range(20_000)]
    drawn = torch.tensor([token.id for token in choose_tokens(logits.expand(len(answers), -1), answers)])
    shares = torch.bincount(drawn, minlength=7) / len(answers)
    assert float((shares - expected).abs().max()) < 0.015
    assert set(drawn.tolist()) == set(expected.nonzero()[:, 0].tolist())


def test_a_bias_of_sequences_is_that_of_transformers() -> None:
    """It reaches from the prompt into the answer."""
    model, questions = network("llama"), prompts(8)
    options = SamplingOptions(8, temperature=0)
    first = generate(model, questions, options)
    bias: dict[tuple[int, ...], float] = {(9,): -2.0}
    for ids, new in zip(questions, first, strict=True):
        bias |= {(*ids[-1:], new[0]): -9.0, (*ids[-2:], new[0]): -3.0, (new[0], new[1]): -9.0}
    found = generate(model, questions, replace(options, bias=TokenBias(bias)))
    for ids, new in zip(questions, found, strict=True):
        alone = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
            max_new_tokens=8, pad_token_id=0, sequence_bias=bias,
        )[0, len(ids) :].tolist()  # fmt: skip
        assert new == alone
    assert found != first


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-39, 9e-10])
def test_the_coldest_draws_are_the_likeliest(temperature: float) -> None:
    """Logits over such a temperature were infinite, and their softmax no number."""
    model, questions = network("llama"), prompts(3)
    likeliest = generate(model, questions, SamplingOptions(4, temperature=0))
    assert generate(model, questions, SamplingOptions(4, temperature=temperature, top_p=0.9, seed=5)) == likeliest


def test_a_hook_that_measures_leaves_the_layers_and_one_that_may_change_them_does_not() -> None:
    model, questions = network("qwen3"), prompts(6)
    decoder = Decoder(model, 4)
    model.model.register_forward_hook(lambda *_: None)
    assert decoder.usable(questions, 4) and decoder.has_own_layers
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
    assert changed.usable(questions, 4) and not changed.has_own_layers


def test_a_model_that_counts_or_remembers_in_its_own_way_answers_by_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4)).eval()
    mamba = MambaForCausalLM(MambaConfig(vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, state_size=4)).eval()
    questions, options = prompts(6), SamplingOptions(4, frozenset(STOPS), temperature=0)
    for model in (bloom, mamba):
        assert not Decoder(model, 4).usable(questions, 16)
        for ids, new in zip(questions, generate(model, questions, options), strict=True):
            alone = list(ids)
            while alone[len(ids) :] != new:
                alone.append(int(model(torch.tensor([alone]), use_cache=False).logits[0, -1].argmax()))
                assert alone[len(ids) :] == new[: len(alone) - len(ids)]


@pytest.mark.parametrize("window", [3, 8])
def test_a_sliding_window_is_kept_within_answers(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers leave the windows of their prompts; layers with and without a window in one model, and in all layers."""
    mistral = MistralConfig(
        **SIZES, vocab_size=WORDS, intermediate_size=48, num_key_value_heads=2, sliding_window=window
    )
    torch.manual_seed(0)
    mixed = network("qwen3", use_sliding_window=True, sliding_window=window, max_window_layers=1)
    questions, options = prompts(9), SamplingOptions(12, temperature=0)
    for model in (mixed, MistralForCausalLM(mistral).eval()):
        assert Decoder(model, 4).usable(questions, 12)
        found = generate(model, questions, options, at_once=4)
        assert found == by_transformers(monkeypatch, model, questions, options)
        with monkeypatch.context() as patch:
            patch.setattr(
                ModelSlots, "_masks", lambda slots, places, reach: unseen(places, reach, torch.float32)[:, None, None]
            )
            assert generate(model, questions, options, at_once=4) != found, "no answer leaves its window"


def test_answers_in_bf16_are_near_those_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers' layers under autocast, in slots."""
    model, questions = network("gpt2"), prompts(9)
    assert Decoder(model, 4, torch.bfloat16).usable(questions, 6)
    options = SamplingOptions(6, temperature=0)
    pairs = list(
        zip(generate(model, questions, options), generate(model, questions, options, dtype=torch.bfloat16), strict=True)
    )
    assert sum(whole == half for whole, half in pairs) > len(pairs) / 2


def test_answers_to_lm_eval_end_where_its_own_backend_ends_them(model_dir: Path, run: Run) -> None:
    """Asked one by one by lm-eval, all at once by us: at strings of several tokens, at an end token, and by a model
    whose own settings ask for more than the likeliest token, which is questions by `generate`."""
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
        questions: list[dict[str, Any]] = [{"until": [free[5:8], "a", "e "], "max_gen_toks": 16}, {"max_gen_toks": 8}]
        requests = [
            Instance("generate_until", {}, (text, {**questions[number % 2], "do_sample": False}), number)
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
    ended = StopText(tokenizer, [" "])
    assert not ended.ends([2]) and not ended.ends([2, 4])
    assert ended.ends([2, 4, 3])


@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ({}, True),
        (
            {"repetition_penalty": 1.0, "num_beams": 1, "output_attentions": False, "top_p": 0.8, "do_sample": True},
            True,
        ),
        ({"repetition_penalty": 1.1}, False),
        ({"num_beams": 2}, False),
        ({"bad_words_ids": [[1]]}, False),
    ],
)
def test_only_settings_with_an_effect_leave_the_decoder_unused(settings: dict, plain: bool, tmp_path: Path) -> None:
    """A model without a generation_config.json, and one saved and loaded by transformers, whose defaults changed."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=WORDS, intermediate_size=48, num_key_value_heads=2))
    model.generation_config.update(**settings)
    assert is_plain(model, {"do_sample": False, "temperature": 0.0}) == plain
    model.save_pretrained(tmp_path)
    assert is_plain(LlamaForCausalLM.from_pretrained(tmp_path), {"do_sample": False}) == plain
