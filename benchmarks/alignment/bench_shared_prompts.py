"""Answers to one prompt with the prompt computed once, against each answer with a prompt of its own.

python -m benchmarks.alignment.bench_shared_prompts [--rounds 5]

A step is what a policy learns from a minibatch: log-probabilities of the answers' tokens, forward and backward. Lengths
are drawn around the ones that are said, and sequences apart are padded to the longest, as a minibatch is.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor
from transformers import PreTrainedModel

from training.config import ModelConfig
from training.core.hardware import Hardware, native_bf16
from training.generation.completions import AnswerBatch, Completions
from training.model.attention import choose_attention
from training.model.models import build, hf_config
from training.train_modules.answer_logprobs import answer_logprobs
from training.train_modules.shared_prompts import share

VOCABULARY = 4096
# (what it is like, tokens of a prompt, answers to each, tokens of an answer, answers of a minibatch)
SETTINGS = (
    ("pairs of the quickstart", 36, 2, 16, 64),
    ("a minibatch of the quickstart's RLOO, by chance", 36, 2, 11, 32),
    ("whole groups of eight", 36, 8, 11, 32),
    ("a dialogue with long answers", 256, 2, 128, 8),
    ("a problem with eight solutions", 256, 8, 64, 16),
)


def _batch(prompt: int, each: int, answer: int, count: int) -> AnswerBatch:
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int) -> list[int]:
        size = int(length * (0.5 + float(torch.rand((), generator=generator)))) + 1
        return torch.randint(2, VOCABULARY, (size,), generator=generator).tolist()

    prompts = [one for _ in range(count // each) for one in [drawn(prompt)] * each]
    return AnswerBatch.of(Completions(prompts, [drawn(answer) for _ in prompts], torch.ones(count)), 0)


def _step(model: PreTrainedModel, batch: AnswerBatch, hardware: Hardware) -> Tensor:
    logprobs = answer_logprobs(model, batch.ids, batch.places, batch.tokens, batch.mask, hardware)
    loss = -logprobs.sum() / batch.mask.sum()
    model.zero_grad()
    loss.backward()
    return loss.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    cpu = torch.device("cpu")
    model = build(hf_config(ModelConfig(preset="qwen3-4m", tie_embeddings=False), VOCABULARY, {}), 1)
    ways = {shares: Hardware(cpu, native_bf16(cpu), share_prompts=shares) for shares in (False, True)}
    print(f"{sum(one.numel() for one in model.parameters()) / 1e6:.1f}M parameters, {ways[True].compute}")
    print(f"{'':50} tokens apart  shared   s apart  shared   times faster")
    for name, prompt, each, answer, count in SETTINGS:
        batch = _batch(prompt, each, answer, count)
        choose_attention(model, ways[True], batch.ids.shape[1])
        shared = share(batch.ids, batch.places[:, 0] + batch.mask.sum(1).long())
        assert shared is not None
        best, losses = {}, {}
        for shares, hardware in ways.items():
            losses[shares] = _step(model, batch, hardware)
            best[shares] = float("inf")
        torch.testing.assert_close(losses[True], losses[False], rtol=1e-2, atol=1e-2)
        for _ in range(rounds):
            for shares, hardware in ways.items():
                began = time.perf_counter()
                _step(model, batch, hardware)
                best[shares] = min(best[shares], time.perf_counter() - began)
        tokens = f"{batch.ids.numel():12,} {shared.ids.numel():7,}"
        print(f"{name:50} {tokens} {best[False]:9.3f} {best[True]:7.3f} {best[False] / best[True]:14.2f}")


if __name__ == "__main__":
    main()
