"""Answers of a policy by vLLM against our own sampler, in turns on one machine.

STEMMA_VLLM=/opt/vllm/bin/vllm python -m benchmarks.evaluation.bench_vllm [--preset qwen3-4m] [--prompts 64]
    [--answers 4]
    [--prompt-tokens 48] [--tokens 64] [--rounds 3] [--precision fp32] [--vllm-arguments=--enforce-eager …]

A preset with random weights, whose answers are as long as they may be but for the one in some hundreds that ends. Every
round both answer the same prompts, first the one, then the other; before, vLLM gets the policy's weights, which is
timed apart. Told are new tokens a second and a second of a core, of all processes (the median round; on a machine that
others use the latter says more), seconds until the server answers and to bring it weights,
and how far its log-probabilities are from ours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.alignment.bench_verifiable import tokenizer_of_bytes
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.chat.base import Chat
from training.config import ModelConfig
from training.core.hardware import prepare
from training.generation.completions import AnswerBatch, generate
from training.generation.vllm_sampler import VllmSampler, differences
from training.model.models import build, hf_config
from training.train_modules.answer_logprobs import logprobs_and_entropies


@dataclass
class Answering:
    answer_max_tokens: int
    temperature: float = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-4m")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--vllm-arguments", action="append", default=[])
    options = parser.parse_args()
    settings = {"device": "cpu", "precision": options.precision, "vllm": {"arguments": options.vllm_arguments}}
    launch = LaunchConfig.model_validate(settings)
    hardware = prepare(launch)
    model = ModelConfig(preset=options.preset)
    policy = build(hf_config(model, 4096, {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}), 3).eval()
    random = np.random.default_rng(5)
    asked = [random.integers(5, 4096, options.prompt_tokens).tolist() for _ in range(options.prompts)]
    prompts = [prompt for prompt in asked for _ in range(options.answers)]
    config, longest = Answering(options.tokens), options.prompt_tokens + options.tokens
    speeds: dict[str, list[tuple[float, float]]] = {"own": [], "vllm": []}
    brought, apart = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_of_bytes().save_pretrained(folder)
        chat, run = Chat.load(Path(folder)), Run(Path(folder) / "work", launch)
        began = time.perf_counter()
        sampler = VllmSampler(policy, Path(folder), chat, config, longest, hardware, run)
        ready = time.perf_counter() - began
        try:
            for number in range(options.rounds + 1):
                began = time.perf_counter()
                sampler.update(number)
                brought.append(time.perf_counter() - began)
                for name in ("own", "vllm") if number % 2 else ("vllm", "own"):
                    began, computed = time.perf_counter(), _processor_s()
                    if name == "own":
                        answers = generate(policy, prompts, chat, config, hardware, number)
                    else:
                        answers = sampler.sample(prompts, number)
                    took, worked = time.perf_counter() - began, _processor_s() - computed
                    if number:  # the first warms both up
                        tokens = sum(map(len, answers.ids))
                        speeds[name].append((tokens / took, tokens / worked))
                    if name == "vllm":
                        batch = AnswerBatch.of(answers, chat.pad)
                        looked = (batch.ids, batch.places, batch.tokens, batch.mask)
                        ours, _ = logprobs_and_entropies(policy, *looked, hardware)
                        apart = max(apart, float(differences(answers, ours, batch.mask).mean()))
        finally:
            sampler.close()
    print(f"{options.preset}, {len(prompts)} answers of up to {options.tokens} tokens, {options.precision}")
    for place, clock in enumerate(("second", "second of a core")):
        own, vllm = (statistics.median(one[place] for one in speeds[name]) for name in ("own", "vllm"))
        print(f"tokens a {clock}: own {own:,.0f}, vLLM {vllm:,.0f}, {vllm / own:.2f} times")
    print(f"vLLM answers after {ready:.0f} s, has new weights after {statistics.median(brought):.2f} s")
    print(f"log-probabilities apart by {apart:.2g} nats a token in the mean")


def _processor_s() -> float:
    """Seconds that the cores worked for this process and all below it."""
    total = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


if __name__ == "__main__":
    main()
