"""Losses, advantages, schedules and baselines against independent references."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from evaluation.statistics.clustered import clustered_intercept
from evaluation.statistics.intervals import bootstrap, wilson
from infra.launch.config import LaunchConfig
from training.core.hardware import prepare
from training.distributed.split_loss import split_losses
from training.generation.completions import Completions, kl_of
from training.model.loss import IGNORE, chunked_cross_entropy
from training.model.ngram import Bigram, Unigram
from training.train_modules.answer_logprobs import token_logprobs
from training.train_modules.kl import adapted_kl_coef, exact_kl, kl_k1
from training.train_modules.policy_losses import (
    advantages_and_returns,
    leave_one_out,
    policy_loss,
    token_rewards,
    value_loss,
    whiten,
)

t = torch.tensor
RANDOM = np.random.default_rng(5)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
def test_chunked_loss_and_its_gradients_are_those_of_torch(compiled: bool) -> None:
    # Two chunks of 1,677 positions at most.
    hidden = torch.randn(2500, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5000, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5000, (2500,))
    labels[::3] = IGNORE
    expected = cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE, reduction="sum") / 7
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = chunked_cross_entropy(hidden, weight, labels, compiled=compiled) / 7
    found = torch.autograd.grad(loss, (hidden, weight))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of one rank, by which a weight may be a DTensor."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**16])
def test_losses_in_fp16_have_the_gradients_of_fp64_at_every_loss_scale(loss_scale: float, alone: DeviceMesh) -> None:
    """The risk: hidden states of one sign, summed over the 16,384 positions of a chunk, exceed the range of fp16, and a
    sum that is infinite before it is divided by their number is infinite at every loss scale."""
    count, random = 16_384, torch.Generator().manual_seed(3)
    states = torch.randn(count, 32, generator=random)
    states[:, 0] = 12
    labels = torch.randint(0, 2, (count,), generator=random)
    labels[::5] = IGNORE
    hidden = states.half().requires_grad_()
    weight = (torch.randn(512, 32, generator=random) * 0.05).half().float().requires_grad_()
    exact = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    expected = cross_entropy(exact[0] @ exact[1].T, labels, ignore_index=IGNORE)
    wanted = torch.autograd.grad(expected, exact)
    labelled, split = labels != IGNORE, DTensor.from_local(weight, alone, [Shard(0)])
    losses = {
        "pretraining": chunked_cross_entropy(hidden, weight, labels) / labelled.sum(),
        "answers": -token_logprobs(hidden[labelled], weight, labels[labelled]).mean(),
        "tensor parallelism": split_losses(hidden, split, labels).sum() / labelled.sum(),
    }
    for name, loss in losses.items():
        assert float(loss) == pytest.approx(float(expected), rel=1e-3), name
        # A loss scale of 1 leaves gradients of hidden states to the least numbers that fp16 knows.
        for ours, theirs, close in zip(
            torch.autograd.grad(loss * loss_scale, (hidden, weight)),
            wanted,
            (5e-2 if loss_scale == 1 else 2e-3, 2e-3),
            strict=True,
        ):
            assert (ours.double() / loss_scale - theirs).norm() < close * theirs.norm(), name


@pytest.mark.parametrize("tokens", [900, 2500])
def test_log_probabilities_in_chunks_and_their_gradients_are_those_of_torch(tokens: int) -> None:
    """One chunk, whose probabilities are kept, and two of 1,677 tokens at most, which are computed again."""
    hidden = torch.randn(tokens, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5000, 16, dtype=torch.float64, requires_grad=True)
    drawn, upstream = torch.randint(0, 5000, (tokens,)), torch.randn(tokens)
    expected = -cross_entropy(hidden @ weight.T / 0.7, drawn, reduction="none")
    wanted = torch.autograd.grad(expected, (hidden, weight), upstream.double())
    logprobs = token_logprobs(hidden, weight, drawn, 0.7)
    found = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    for ours, theirs in zip((logprobs, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)


def _answers() -> tuple[np.ndarray, ...]:
    """Rewards, values and a mask (3, 6) with answers of 6, 4 and 1 tokens."""
    mask = (np.arange(6) < np.array([[6], [4], [1]])).astype(float)
    return RANDOM.normal(size=(3, 6)) * mask, RANDOM.normal(size=(3, 6)) * mask, mask


def test_advantages_are_the_discounted_sums_of_temporal_differences() -> None:
    rewards, values, mask = _answers()
    gamma, lam = 0.97, 0.9
    expected = np.zeros_like(rewards)
    for row in range(3):
        length = int(mask[row].sum())
        following = np.append(values[row, 1:length], 0.0)
        errors = rewards[row, :length] + gamma * following - values[row, :length]
        for step in range(length):
            expected[row, step] = sum((gamma * lam) ** (k - step) * errors[k] for k in range(step, length))
    advantages, returns = advantages_and_returns(t(rewards), t(values), t(mask), gamma=gamma, gae_lambda=lam)
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    np.testing.assert_allclose(returns, (expected + values) * mask, atol=1e-12)


def test_with_lambda_one_the_return_is_the_sum_of_rewards() -> None:
    rewards, values, mask = _answers()
    _, returns = advantages_and_returns(t(rewards), t(values), t(mask), gamma=1.0, gae_lambda=1.0)
    np.testing.assert_allclose(returns[:, 0], rewards.sum(1), atol=1e-12)


def test_the_policy_loss_is_ppo_s_clipped_surrogate() -> None:
    _, _, mask = _answers()
    new, old, advantages = (RANDOM.normal(size=(3, 6)) for _ in range(3))
    ratio = np.exp(new - old)
    surrogate = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    loss, clip_share = policy_loss(t(new), t(old), t(advantages), t(mask), 0.8, 1.2)
    assert float(loss) == pytest.approx(-(surrogate * mask).sum() / mask.sum())
    assert float(clip_share) == pytest.approx(((np.abs(ratio - 1) > 0.2) * mask).sum() / mask.sum())
    higher = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.5) * advantages)
    loss, clip_share = policy_loss(t(new), t(old), t(advantages), t(mask), 0.8, 1.5)
    assert float(loss) == pytest.approx(-(higher * mask).sum() / mask.sum())
    assert float(clip_share) == pytest.approx((((ratio < 0.8) | (ratio > 1.5)) * mask).sum() / mask.sum())


def test_the_value_loss_is_the_larger_of_the_clipped_and_the_plain_error() -> None:
    _, _, mask = _answers()
    new, old, returns = (RANDOM.normal(size=(3, 6)) for _ in range(3))
    clipped = np.clip(new, old - 0.2, old + 0.2)
    expected = (0.5 * np.maximum((new - returns) ** 2, (clipped - returns) ** 2) * mask).sum() / mask.sum()
    assert float(value_loss(t(new), t(old), t(returns), t(mask), clip=0.2)) == pytest.approx(expected)


def test_rewards_are_the_score_at_the_last_token_less_the_penalty_at_each() -> None:
    _, _, mask = _answers()
    ours, theirs, scores = RANDOM.normal(size=(3, 6)), RANDOM.normal(size=(3, 6)), np.array([1.0, -2.0, 3.0])
    rewards = token_rewards(t(scores), t(ours), t(theirs), t(mask), kl_coef=0.1).numpy()
    np.testing.assert_allclose(rewards.sum(1), scores - 0.1 * ((ours - theirs) * mask).sum(1))
    assert rewards[1, 3] == pytest.approx(-2.0 - 0.1 * (ours - theirs)[1, 3])


def test_an_answer_is_held_against_the_mean_of_the_others_to_its_prompt() -> None:
    random = np.random.default_rng(3)
    scores, logprobs, reference = random.normal(size=6), random.normal(size=(6, 4)), random.normal(size=(6, 4))
    mask = (np.arange(4) < np.array([4, 2, 1, 3, 4, 2])[:, None]).astype(float)
    found = leave_one_out(t(scores), t(logprobs), t(reference), t(mask), kl_coef=0.2, group=3)
    rewards = scores - 0.2 * ((logprobs - reference) * mask).sum(1)
    for row in range(6):
        prompt = row // 3 * 3
        others = [rewards[other] for other in range(prompt, prompt + 3) if other != row]
        assert np.allclose(found[row], (rewards[row] - np.mean(others)) * mask[row])


def test_kl_estimates_agree_with_the_exact_divergence() -> None:
    generator = torch.Generator().manual_seed(1)
    ours, theirs = torch.randn(12, generator=generator), torch.randn(12, generator=generator)
    p, q = ours.softmax(-1).double().numpy(), theirs.softmax(-1).double().numpy()
    expected = float((p * np.log(p / q)).sum())
    assert float(exact_kl(ours, theirs)) == pytest.approx(expected, rel=1e-4)
    drawn = torch.multinomial(ours.softmax(-1), 200_000, replacement=True, generator=generator)
    logp, logq = ours.log_softmax(-1)[drawn], theirs.log_softmax(-1)[drawn]
    assert float(kl_k1(logp, logq).mean()) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_divergences_of_answers_come_to_that_of_what_is_sampled(temperature: float) -> None:
    """Over all answers of two tokens, each as likely as it is drawn."""
    torch.manual_seed(3)
    policy, reference = (_tiny(spread=0.5) for _ in range(2))
    answers = list(product(range(8), repeat=2))
    whole = Completions([[1, 2]] * 64, [list(one) for one in answers], torch.zeros(64))
    chat: Any = SimpleNamespace(pad=0)
    found, tokens = kl_of(
        policy, reference, whole, chat, prepare(LaunchConfig(device="cpu", precision="fp32")), temperature
    )

    def logprobs(model: LlamaForCausalLM) -> torch.Tensor:
        ids = t([[1, 2, *one] for one in answers])
        with torch.no_grad():
            each = (model(ids).logits[:, 1:3].double() / temperature).log_softmax(-1)
        return each.gather(-1, ids[:, 2:, None])[..., 0].sum(1)

    ours, theirs = logprobs(policy), logprobs(reference)
    expected = (ours.exp() * (ours - theirs)).sum()
    assert float(expected) > 0.1 and (tokens == 2).all()
    torch.testing.assert_close((ours.exp() * found).sum(), expected, rtol=1e-4, atol=1e-5)


def _tiny(spread: float) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=8, initializer_range=spread,
        )
    ).eval()  # fmt: skip


def test_whitened_values_have_mean_zero_and_variance_one_over_the_mask() -> None:
    _, _, mask = _answers()
    values = whiten(torch.randn(3, 6).double() * 4 + 2, torch.tensor(mask))
    kept = values[torch.tensor(mask, dtype=torch.bool)]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
    assert float((kept**2).mean()) == pytest.approx(1, abs=1e-6)


def test_the_kl_coefficient_moves_towards_its_target_by_a_bounded_step() -> None:
    assert adapted_kl_coef(0.1, kl=60, target=6, answers=1000) == pytest.approx(0.1 * 1.02)
    assert adapted_kl_coef(0.1, kl=0, target=6, answers=1000) == pytest.approx(0.1 * 0.98)
    assert adapted_kl_coef(0.1, kl=6.6, target=6, answers=1000) == pytest.approx(0.1 * 1.01)


def test_n_gram_probabilities_sum_to_one_and_follow_the_counts() -> None:
    text = RANDOM.choice(12, size=(40, 30), p=np.arange(1, 13) / 78)
    bigram, unigram = Bigram([text], 15, text.size), Unigram([text], 15)
    for before in (0, 11, 14):  # rare, frequent, never seen
        total = bigram.probability(np.full(15, before), np.arange(15)).sum()
        assert total == pytest.approx(1.0)
    assert unigram.probabilities.sum() == pytest.approx(1.0)
    assert unigram.probabilities[11] == pytest.approx(((text == 11).sum() + 1) / (text.size + 15))


def test_a_bigram_model_predicts_what_always_follows() -> None:
    text = np.tile(np.arange(10), (20, 5))
    bigram, unigram = Bigram([text], 10, text.size).losses(text), Unigram([text], 10).losses(text[:, 1:])
    assert bigram.mean() < 0.1 < unigram.mean() == pytest.approx(math.log(10), abs=0.01)


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_pairs_counted_batch_by_batch_are_those_of_a_table(vocab_size: int) -> None:
    """Against dense tables of the same formula; 100,000 needs keys of 64 bits."""
    text, held = (RANDOM.zipf(1.3, size=(40, 30)) % 300 for _ in range(2))
    table = np.zeros((300, 300))
    np.add.at(table, (text[:, :-1].ravel(), text[:, 1:].ravel()), 1)
    once, twice = (table == 1).sum(), (table == 2).sum()
    discount = once / (once + 2 * twice)
    continuation = ((table > 0).sum(0) + 1.0) / ((table > 0).sum() + vocab_size)
    totals = table.sum(1, keepdims=True)
    backed = np.where(totals, discount * (table > 0).sum(1, keepdims=True) / np.maximum(totals, 1), 1.0)
    expected = np.maximum(table - discount, 0) / np.maximum(totals, 1) + backed * continuation
    bigram = Bigram(iter(np.split(text, 8)), vocab_size, text.size)
    assert bigram.discount == discount
    found = bigram.losses(held)
    np.testing.assert_allclose(found, -np.log(expected[held[:, :-1].ravel(), held[:, 1:].ravel()]), rtol=1e-12)


def test_counting_a_large_vocabulary_takes_few_bytes_a_token() -> None:
    """62.5 bytes a token before; a table of 50,257 entries squared would take 20 GB."""
    import tracemalloc

    vocab_size, rows = 50_257, 1000

    def batches() -> Iterator[np.ndarray]:
        random = np.random.default_rng(1)
        for _ in range(rows):
            yield random.integers(0, vocab_size, (1, 1000))  # nearly every pair is another one: the worst case

    tracemalloc.start()
    try:
        bigram = Bigram(batches(), vocab_size, rows * 999)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    tables = 24 * vocab_size
    assert peak < 30 * rows * 1000 + 2 * tables
    assert bigram.nbytes < 8 * rows * 1000 + tables


def test_the_gain_at_equal_length_is_the_constant_of_a_line_through_the_pairs() -> None:
    """Against numpy's least squares, and scipy's standard error, which is near CR2's of a prompt for each pair."""
    from scipy import stats

    changes = RANDOM.integers(-12, 6, 120).astype(float)
    gains = 0.3 - 0.05 * changes + RANDOM.normal(0, 0.2, 120)
    found, slope = clustered_intercept(gains, changes, np.arange(120))
    b, a = np.polyfit(changes, gains, 1)
    assert (found.value, slope) == (pytest.approx(a), pytest.approx(b))
    half = stats.t.ppf(0.975, 118) * stats.linregress(changes, gains).intercept_stderr
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.15)
    assert found.low < 0.3 < found.high


def test_a_reward_that_is_length_alone_gains_nothing_at_equal_length() -> None:
    changes = RANDOM.integers(-9, 1, 200).astype(float)
    gains = -0.1 * changes
    found, slope = clustered_intercept(gains, changes, np.arange(200))
    assert gains.mean() > 0.3 and slope == pytest.approx(-0.1)
    assert [found.value, found.low, found.high] == pytest.approx([0, 0, 0], abs=1e-9)
    alike, slope = clustered_intercept(gains, np.full(200, -4.0), np.arange(200))
    assert slope == 0 and alike.value == pytest.approx(gains.mean()), "nothing tells them apart"


def test_a_bootstrap_of_many_units_is_the_same_in_parts_and_takes_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tracemalloc

    from evaluation.statistics import intervals as statistics

    top, bottom = RANDOM.normal(3.0, 1.0, 20_000), RANDOM.integers(1, 50, 20_000)
    tracemalloc.start()
    try:
        found = statistics.bootstrap_ratio(top, bottom, seed=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5 * 8 * statistics.RESAMPLED_AT_ONCE, "all draws at once would take 320 MB, their values as much"
    monkeypatch.setattr(statistics, "RESAMPLED_AT_ONCE", 1_000_000)
    assert statistics.bootstrap_ratio(top, bottom, seed=3) == found


def test_intervals() -> None:
    share = wilson(8, 10)  # Newcombe 1998 gives 0.490 to 0.943
    assert (share.low, share.high) == (pytest.approx(0.490, abs=1e-3), pytest.approx(0.943, abs=1e-3))
    mean = bootstrap(RANDOM.normal(3.0, 1.0, 400), seed=1)
    assert mean.low < 3.0 < mean.high
    assert mean.high - mean.low == pytest.approx(2 * 1.96 / 20, rel=0.2)
