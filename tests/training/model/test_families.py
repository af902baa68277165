"""Every family that is named as proven trains here as the model that others run with transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evaluation.generation.decoding import Decoder, generate
from evaluation.generation.token_choice import SamplingOptions
from infra.errors import StageError
from training.config import ModelConfig, PretrainConfig
from training.config.families import FAMILIES
from training.core.hardware import Hardware
from training.generation.answer_text import AnswerRequest, Writing
from training.generation.completions import AnswerBatch, Completions
from training.generation.sampling import sample
from training.model.attention import FLEX, answering, choose_attention
from training.model.documents import block_mask, document_numbers, within_documents
from training.model.models import build, flops_per_token, hf_config
from training.objectives.causal import next_token_batch
from training.planner.architecture import of_transformers
from training.train_modules.answer_logprobs import answer_logits, answer_logprobs, logprobs_and_entropies
from training.train_modules.language_model import LanguageModel
from training.train_modules.shared_prompts import share

CPU = Hardware(torch.device("cpu"), bf16=False)
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
LENGTH, WINDOW, END = 24, 3, 0
# Two rows whose documents begin at other places.
STARTS = [np.array([0, 6, 8, 16, 21]), np.array([0, 3, 14])]
FLASH = "flash_attention_2"
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
          "intermediate_size": 48, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}  # fmt: skip
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "attn_pdrop": 0.0}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def values_of_family(name: str) -> dict[str, Any]:
    """A small config of a family, with windows and experts where it has them."""
    family = FAMILIES[name]
    values = dict(_GPT2 if name == "gpt2" else _SIZES)
    if family.windows != "none":
        values |= {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 0}
    if family.windows == "by_layer":
        values["layer_types"] = ["sliding_attention", "full_attention"]
    if family.router:
        # A coefficient at which the balancing loss can be seen.
        values |= {**_EXPERTS, "router_aux_loss_coef": 0.5}
    return {"model_type": name, **values}


@cache
def _network(name: str) -> PreTrainedModel:
    """With weights so wide that what a token sees tells in its logits."""
    network = build(hf_config(ModelConfig(transformers=values_of_family(name)), 320, SPECIAL), 1, "plain", 0.2)
    return network.eval()


def _model(name: str, kernel: str) -> LanguageModel:
    network = _network(name)
    if kernel == FLASH:
        network.config._attn_implementation = FLASH  # flash-attn need not be installed
    else:
        network.set_attn_implementation(kernel)
    return LanguageModel(network, CPU).eval()


def tokens_of_two_rows() -> np.ndarray[Any, np.dtype[np.int64]]:
    tokens = np.random.default_rng(3).integers(4, 320, (2, LENGTH))
    for row, starts in zip(tokens, STARTS, strict=True):
        row[starts[1:] - 1] = END
    return tokens


def _logits(model: LanguageModel, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        outputs = model(batch)
        states = outputs[0] if isinstance(outputs, tuple) else outputs
        plain = FAMILIES[model.model.config.model_type].plain_head
        return states @ model.model.get_output_embeddings().weight.T if plain else states


def _alone(network: PreTrainedModel, tokens: np.ndarray[Any, np.dtype[np.int64]]) -> Tensor:
    """The logits that transformers gives to each document by itself, joined."""
    network.set_attn_implementation("eager")
    rows = []
    with torch.no_grad():
        for row, starts in zip(tokens, STARTS, strict=True):
            begins = [0, *(starts[1:] - 1), LENGTH]
            spans = [row[begin:end] for begin, end in pairwise(begins)]
            rows.append(torch.cat([network(torch.from_numpy(span)[None], use_cache=False).logits[0] for span in spans]))
    return torch.stack(rows)


def _flash(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What flash-attn's documentation says of `flash_attn_varlen_func`, and without bounds of `flash_attn_func`: of all
    rows laid end to end, tokens [cu[i], cu[i + 1]) are sequence i, each causal and none longer than `max_length`; keys
    and values may have fewer heads; a window counts the token itself. Query (B, H, T, D); returns (B, T, H, D)."""
    assert attention_mask is None and softcap is None
    rows, heads, length, width = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = cu_seq_lens_k = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        max_length_q = max_length_k = length
    assert cu_seq_lens_k is not None and max_length_q is not None and max_length_q == max_length_k
    assert cu_seq_lens_q.dtype == torch.int32 and torch.equal(cu_seq_lens_q, cu_seq_lens_k)
    assert int(cu_seq_lens_q[-1]) == rows * length and int(cu_seq_lens_q.diff().max()) <= max_length_q
    flat = [one.transpose(1, 2).reshape(rows * length, one.shape[1], -1) for one in (query, key, value)]
    found = torch.zeros(rows * length, heads, value.shape[-1], dtype=query.dtype)
    for begin, end in pairwise(cu_seq_lens_q.tolist()):
        q, k, v = (one[begin:end].transpose(0, 1) for one in flat)
        k, v = (one.repeat_interleave(heads // one.shape[0], 0) for one in (k, v))
        scores = q @ k.transpose(1, 2) * (width**-0.5 if scaling is None else scaling)
        place = torch.arange(end - begin)
        far = place[:, None] - place
        hidden = (far < 0) | (far >= (sliding_window or LENGTH))
        found[begin:end] = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return found.view(rows, length, heads, -1), None


@pytest.fixture
def flash_stand_in() -> Iterator[None]:
    """Puts `_flash` in the place of flash-attn's kernel."""
    theirs = ALL_ATTENTION_FUNCTIONS[FLASH]
    AttentionInterface.register(FLASH, _flash)
    yield
    AttentionInterface.register(FLASH, theirs)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: these kernels need one")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.usefixtures("flash_stand_in")
def test_packed_documents_give_the_logits_of_each_document_alone(name: str) -> None:
    """By every kernel here, whole windows and experts among them; a flash kernel by a stand-in of its contract."""
    tokens = tokens_of_two_rows()
    expected = _alone(_network(name), tokens)
    for kernel in ("eager", "sdpa", *([FLASH] if FAMILIES[name].varlen else [])):
        found = _logits(_model(name, kernel), next_token_batch(tokens, STARTS))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=lambda told, k=kernel: f"{k}: {told}")
    # The check can fail: over whole sequences the logits are others.
    whole = _logits(_model(name, "eager"), next_token_batch(tokens))
    assert float((whole - expected).abs().max()) > 0.05


@pytest.mark.parametrize("name", FAMILIES)
def test_whole_sequences_give_transformers_logits_windows_and_all(name: str) -> None:
    tokens = tokens_of_two_rows()
    network = _network(name)
    for kernel in ("eager", "sdpa"):
        model = _model(name, kernel)
        with torch.no_grad():
            expected = network(torch.from_numpy(tokens), use_cache=False).logits
        torch.testing.assert_close(_logits(model, next_token_batch(tokens)), expected, rtol=1e-3, atol=1e-4)


def _written(network: PreTrainedModel, prompts: list[list[int]], stops: set[int], most: int) -> list[list[int]]:
    """Greedy answers by continuous batching, without what ended them."""
    no_text: Any = SimpleNamespace(clean_up_tokenization_spaces=False, decode=lambda *_, **__: "")
    options = SamplingOptions(most, frozenset(stops), temperature=0)
    batch, writings = Decoder(network, 16), [Writing(AnswerRequest(ids, options), no_text) for ids in prompts]
    for writing in writings:
        batch.add(writing)
    while not all(writing.is_over for writing in writings):
        batch.step()
    return [writing.new for writing in writings]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_that_leave_the_batch_one_by_one_are_those_of_generate(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = _network(name)
    network.set_attn_implementation("eager")
    prompts = [[5, 6, 7, 8, 9, 30, 40], [8, 9, 10], [11] * 12, [200, 100], [301, 17, 44, 260]]
    batched = generate(network, prompts, SamplingOptions(8, temperature=0))
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "usable", lambda *_: False)
        free = generate(network, prompts, SamplingOptions(8, temperature=0))
    assert batched == free

    def until(token: int) -> list[list[int]]:
        return [row[: row.index(token) + 1] if token in row else row for row in free]

    # That token at which the answers end at the most different times.
    stop = max(chain(*free), key=lambda token: len({len(row) for row in until(token)}))
    twice = [*prompts, prompts[0], prompts[2]]  # which are read once
    ours = sample(network, twice, max_new_tokens=8, temperature=0, stops={stop}, hardware=CPU)
    assert ours == [*until(stop), until(stop)[0], until(stop)[2]]
    before_stop = [row[:-1] if row[-1] == stop else row for row in ours]
    assert _written(network, twice, {stop}, 8) == before_stop
    monkeypatch.setattr(Decoder, "usable", lambda *_: False)
    assert sample(network, twice, max_new_tokens=8, temperature=0, stops={stop}, hardware=CPU) == ours
    assert _written(network, twice, {stop}, 8) == before_stop
    assert len({len(answer) for answer in ours}) > 1


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_to_a_shared_prompt_are_as_likely_as_the_model_finds_each_alone(name: str, kernel: str) -> None:
    """Log-probabilities, entropies and gradients are those of the model's own logits, at a temperature."""
    network = _network(name)
    network.set_attn_implementation(kernel)
    turns = [([7] * prompt + [50, 60], answer) for answer in ([3], [9, 9, 4], [9, 9, 9, 9]) for prompt in (1, 3, 11)]
    prompts, answers = ([list(one) for one in column] for column in zip(*turns, strict=True))
    batch = AnswerBatch.of(Completions(prompts, answers, torch.ones(len(turns))), 0)
    assert share(batch.ids, batch.last()) is not None

    def gradient(logprobs: Tensor) -> Tensor:
        network.zero_grad()
        logprobs.sum().backward()
        found = network.get_input_embeddings().weight.grad
        assert found is not None
        return found.clone()

    rows = [
        network(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1] / 0.7
        for prompt, answer in turns
    ]
    wanted = torch.cat(rows).log_softmax(-1)
    told = wanted.gather(-1, batch.tokens[batch.mask.bool()][:, None])[:, 0]
    wanted_gradient = gradient(told)
    for shares in (False, True):
        hardware = Hardware(CPU.device, bf16=False, share_prompts=shares)
        given = network, batch.ids, batch.places, batch.tokens, batch.mask, hardware, 0.7
        logprobs = answer_logprobs(*given)
        scored, entropies = logprobs_and_entropies(*given)
        assert not logprobs[batch.mask == 0].any()
        found = (
            (logprobs[batch.mask.bool()], told),
            (scored, logprobs),
            (entropies[batch.mask.bool()], -(wanted.exp() * wanted).sum(-1)),
            (answer_logits(network, batch.ids, batch.places, batch.mask, hardware, 0.7).log_softmax(-1), wanted),
            (gradient(logprobs), wanted_gradient),
        )
        for ours, theirs in found:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_what_a_model_says_of_generation_leaves_its_answers_as_they_are() -> None:
    network = _network("llama")
    plain = generate(network, [[5, 6, 7, 8]], SamplingOptions(8, temperature=0))
    assert network.generation_config is not None
    network.generation_config.update(repetition_penalty=50.0, no_repeat_ngram_size=1)
    assert generate(network, [[5, 6, 7, 8]], SamplingOptions(8, temperature=0)) == plain
    assert network.generation_config.repetition_penalty == 50.0


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "bloom"])
def test_a_family_that_is_not_proven_answers_as_generate_has_it(model_type: str) -> None:
    """A recurrent state cannot be selected from by rows, and bloom takes no positions."""
    layers = {"num_hidden_layers": 3, "lru_width": 32, "num_attention_heads": 2, "n_layer": 2, "n_head": 2}
    config = AutoConfig.for_model(model_type, vocab_size=64, hidden_size=32, intermediate_size=64, **layers)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config).eval()
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    ours = sample(network, prompts, max_new_tokens=6, temperature=0, stops=set(), hardware=CPU)
    for prompt, answer in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(6):
                ids = torch.cat([ids, network(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        assert answer == ids[0, len(prompt) :].tolist()
    assert _written(network, prompts, set(), 6) == ours


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("window", [None, WINDOW])
def test_flex_attention_s_mask_is_the_dense_one(window: int | None, prefix: bool) -> None:
    documents = document_numbers(STARTS, LENGTH)
    seen_by_all = torch.rand(2, LENGTH) < 0.3 if prefix else None
    dense = within_documents(documents, seen_by_all, window)
    sees = block_mask(documents, seen_by_all, window).mask_mod
    place = torch.arange(LENGTH)
    found = torch.stack([sees(torch.tensor(row), torch.tensor(0), place[:, None], place) for row in range(2)])
    assert torch.equal(found[:, None], dense)


@pytest.mark.parametrize("name", ["gpt2", "gemma3_text"])
def test_flex_attention_gives_the_logits_of_each_document_alone(name: str) -> None:
    """Uncompiled: this torch compiles its flex attention on a GPU alone."""
    tokens = tokens_of_two_rows()
    expected = _alone(_network(name), tokens)
    with torch.compiler.set_stance("force_eager"):
        found = _logits(_model(name, FLEX), next_token_batch(tokens, STARTS))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("kernel", ["auto", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3_text"])
def test_kernels_of_a_gpu_give_the_loss_and_gradient_of_the_dense_mask(name: str, kernel: str) -> None:
    if kernel == "flash_attention_2":
        pytest.importorskip("flash_attn")
        if not FAMILIES[name].varlen:
            pytest.skip(f"{name} hands no bounds to the kernel")
    gpu = torch.device("cuda")
    results = []
    for wanted in ("sdpa", kernel):
        network = build(hf_config(ModelConfig(transformers=values_of_family(name)), 320, SPECIAL), 1).to(gpu)
        hardware = Hardware(gpu, bf16=True, attention=wanted)
        choose_attention(network, hardware, LENGTH, documents=True)
        assert wanted == "sdpa" or network.config._attn_implementation != "sdpa"
        model = LanguageModel(network, hardware)
        batch = {key: value.to(gpu) for key, value in next_token_batch(tokens_of_two_rows(), STARTS).items()}
        loss = model.loss(model(batch), batch)
        loss.backward()
        results.append((float(loss), network.get_input_embeddings().weight.grad.float()))
    (dense, its_gradient), (ours, gradient) = results
    assert ours == pytest.approx(dense, rel=2e-3)
    assert float((gradient - its_gradient).norm() / its_gradient.norm()) < 0.03


def test_a_kernel_that_would_cross_documents_is_refused() -> None:
    flash = Hardware(torch.device("cpu"), bf16=False, attention=FLASH)
    for name, causal in (("gpt2", True), ("llama", False)):
        with pytest.raises(StageError, match="it would cross them"):
            choose_attention(_network(name), flash, LENGTH, causal=causal, documents=True)


def test_a_gpu_takes_no_dense_mask_for_documents_where_flex_attention_can_be_had() -> None:
    """The choice needs no GPU; its kernels do."""
    gpu = Hardware(torch.device("cuda"), bf16=True)
    for name in ("gpt2", "llama"):
        network = _network(name)
        network.set_attn_implementation("sdpa")
        choose_attention(network, gpu, LENGTH)
        assert network.config._attn_implementation == "sdpa"
        choose_attention(network, gpu, LENGTH, documents=True)
        assert network.config._attn_implementation == FLEX
        with answering(network):
            assert network.config._attn_implementation == "sdpa"
        assert network.config._attn_implementation == FLEX
    dropped = build(hf_config(ModelConfig(family="gpt2", layers=1, width=32, heads=2, dropout=0.1), 320, SPECIAL), 1)
    choose_attention(dropped, gpu, LENGTH, documents=True)
    assert dropped.config._attn_implementation == "sdpa"
    asked = Hardware(torch.device("cuda"), bf16=True, attention="flex_attention")
    with pytest.raises(StageError, match="does not support attention dropout"):
        choose_attention(dropped, asked, LENGTH, documents=True)


@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba", "gemma2", "bloom"])
def test_a_family_that_is_not_proven_is_refused_within_documents_before_anything_runs(model_type: str) -> None:
    model = ModelConfig(transformers={"model_type": model_type})
    for config in (PretrainConfig(model=model), PretrainConfig(model=model, objective="prefix", attention="sequence")):
        (problem,) = config.problems(2048)
        assert problem.code == "unproven_family" and model_type in problem.message
        assert all(name in problem.fix for name in FAMILIES)
    assert not PretrainConfig(model=model, attention="sequence").problems(2048)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "dbrx"])
def test_experts_whose_balancing_loss_would_be_lost_are_refused(model_type: str) -> None:
    config = hf_config(ModelConfig(transformers={"model_type": model_type}), 320, SPECIAL)
    with pytest.raises(StageError, match="mixtral, olmoe, qwen3_moe"):
        build(config, seed=1)


def test_the_docs_name_every_proven_family() -> None:
    text = (Path(__file__).parents[3] / "docs" / "training" / "documents.md").read_text(encoding="utf8")
    items = re.findall(r"^- \*\*[^*]+:\*\* ([\w,\s]+)\.$", text.partition("## Families")[2], re.MULTILINE)
    assert len(items) == 3
    assert {name.strip() for item in items for name in item.split(",")} == set(FAMILIES)


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
@pytest.mark.parametrize("own_heads", [True, False])
def test_a_config_is_planned_as_the_model_that_transformers_builds(model_type: str, own_heads: bool) -> None:
    """Also where it leaves out what is the family's default: as people write it, and as transformers saves it."""
    sizes: dict[str, Any] = {"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 32}
    heads = {"head_dim": 16} if own_heads and hasattr(AutoConfig.for_model(model_type), "head_dim") else {}
    config = AutoConfig.for_model(model_type, **sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    parameters = sum(weight.numel() for weight in network.parameters())
    written = {"model_type": model_type, **sizes, **heads}
    for values in (written, config.to_diff_dict(), config.to_dict()):
        planned = of_transformers(values, None)
        assert planned is not None and planned.parameters == pytest.approx(parameters, rel=0.01)
        if planned.experts == 1:
            assert planned.flops_per_token(512) == pytest.approx(flops_per_token(network, 512), rel=0.01)
