"""Greedy answers: ours against transformers' `generate` and lm-eval's own backend, in one run, with the same tokens.

python benchmarks/evaluation/bench_generation.py [--models 1M,5M,10M,100M] [--prompts 64] [--new 64] [--rounds 2]
    [--json]

Llamas with random weights in fp32 on a CPU, and with `--model DIR` any other; questions of gsm8k of different lengths.
Two ways to stop: at token ids (one in 40 of the vocabulary), against `generate`, whose batches are sorted by length and
padded on the left; and at strings, against `generate_until` of lm-eval's Hugging Face backend. Their batch is 16 and
64; the faster counts. By turns in one process; wall and processor time, the best of the rounds. What both write is
compared token for token, for strings as text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks.evaluation.bench_eval import DATA, tokenizer
from benchmarks.evaluation.contest import BestTimes, report
from evaluation.generation.decoding import generate
from evaluation.generation.token_choice import SamplingOptions
from evaluation.harness.model import ReportingHFLM
from evaluation.harness.tasks import quiet
from infra.run import Run

SIZES = {"1M": (96, 2), "5M": (256, 4), "10M": (320, 6), "100M": (768, 12)}
"""Width and layers; the vocabulary has 4,096 entries."""
STOP_STRINGS = ["\n", "es", " th"]
BATCHES = (16, 64)


def network(size: str) -> Any:
    width, layers = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
        num_attention_heads=max(2, width // 64), max_position_embeddings=2048, bos_token_id=0, eos_token_id=0,
        initializer_range=0.08,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def by_generate(model: Any, prompts: list[list[int]], new: int, stops: list[int], batch: int) -> list[list[int]]:
    """transformers' `generate` in left-padded batches, longest first."""
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    found: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = max(len(prompts[number]) for number in chosen)
        ids = torch.tensor([[0] * (width - len(prompts[n])) + prompts[n] for n in chosen])
        mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in chosen])
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=stops, pad_token_id=0
        )
        for number, row in zip(chosen, out[:, width:].tolist(), strict=True):
            end = next((place for place, token in enumerate(row) if token in stops), len(row))
            found[number] = row[: end + 1]
    return found


def race(name: str, model: Any, words: Any, options: argparse.Namespace, run: Run) -> list[dict[str, Any]]:
    """A row a way to stop: seconds of both, the ratios, and whether what they wrote is the same."""
    lines = (DATA / "gsm8k" / "test.jsonl").read_text(encoding="utf8").splitlines()[: options.prompts]
    asked = [f"Question: {json.loads(line)['question']}\nAnswer:" for line in lines]
    prompts = [words(text)["input_ids"] for text in asked]
    stops = sorted({*range(1, len(words), 40), words.eos_token_id})
    kwargs = {"until": STOP_STRINGS, "max_gen_toks": options.new, "do_sample": False}
    requests = [Instance("generate_until", {}, (text, kwargs), number) for number, text in enumerate(asked)]

    def harness(own: bool, batch: int) -> list[str]:
        with quiet():
            one = ReportingHFLM(run, model, words, 1) if own else HFLM(model, tokenizer=words, batch_size=batch)
            return list(one.generate_until(requests, disable_tqdm=True))

    ways: dict[str, dict[str, Callable[[], Any]]] = {
        "token ids": {
            **{f"theirs {b}": lambda b=b: by_generate(model, prompts, options.new, stops, b) for b in BATCHES},
            "ours": lambda: generate(model, prompts, SamplingOptions(options.new, frozenset(stops), temperature=0)),
        },
        "strings": {
            **{f"theirs {b}": lambda b=b: harness(False, b) for b in BATCHES},
            "ours": lambda: harness(True, 1),
        },
    }
    rows = []
    for way, contenders in ways.items():
        times = BestTimes()
        wrote: dict[str, Any] = {}
        for _ in range(options.rounds):
            for contender, work in contenders.items():
                wall, processor = time.perf_counter(), time.process_time()
                wrote[contender] = work()
                times.add(contender, time.perf_counter() - wall, time.process_time() - processor)
        lengths = sorted(len(one if way == "token ids" else words(one)["input_ids"]) for one in wrote["ours"])
        rows.append(
            {
                "model": name,
                "parameters": model.num_parameters(),
                "stops": way,
                "prompts": len(prompts),
                "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
                "answer_tokens": [lengths[0], lengths[len(lengths) // 2], lengths[-1]],
                **times.figures(f"theirs {batch}" for batch in BATCHES),
                "same": all(wrote[f"theirs {batch}"] == wrote["ours"] for batch in BATCHES),
            }
        )
        print(json.dumps(rows[-1]), file=sys.__stderr__, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--model", type=Path, help="a Hugging Face folder in place of random weights")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new", type=int, default=64, help="the most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not (DATA / "gsm8k").is_dir():
        sys.exit(f"expected gsm8k in {DATA}")
    torch.set_num_threads(options.threads)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder))
        if options.model:
            model = AutoModelForCausalLM.from_pretrained(options.model).eval()
            rows += race(options.model.name, model, AutoTokenizer.from_pretrained(options.model), options, run)
        else:
            for size in options.models.split(","):
                rows += race(size, network(size), tokenizer(), options, run)
    report(rows, {"model": 18, "stops": 10}, as_json=options.json)


if __name__ == "__main__":
    main()
