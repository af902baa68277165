"""Multiple choice: our scoring against lm-eval's own Hugging Face backend, in one run, with the same scores.

python benchmarks/evaluation/bench_eval.py [--limit 200] [--shots 0,5] [--rounds 3] [--json]

A Llama of width 256 with 4 layers, a vocabulary of 4,096 and random weights, in fp32 on a CPU; lm-eval's tasks on the
data of ../shared/data, mirrored first. Both get the same model in memory, the same tasks and requests; what is timed is
`loglikelihood`, tokenising and scoring, by turns in one process. lm-eval's batch is 16 and 64; the faster counts.
Wall and processor time, the best of the rounds; the ratio of processor times tells more where others use the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.evaluation.contest import BestTimes, report
from evaluation.evaluate import tasks_of
from evaluation.harness.model import ReportingHFLM
from evaluation.harness.named_tasks import load_named, set_shots
from evaluation.harness.tasks import own_cache, quiet
from evaluation.mirror_writer import mirror_task
from infra.run import Run

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
GAUNTLET = DATA / "llm_foundry_eval"
TASKS = {
    "arc_easy": GAUNTLET,
    "piqa": GAUNTLET,
    "boolq": GAUNTLET,
    "openbookqa": GAUNTLET,
    "hellaswag": DATA / "hellaswag",
}
SEED = 1234


class Timed(ReportingHFLM):
    """Adds up the seconds of its requests."""

    wall = processor = 0.0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        wall, processor = time.perf_counter(), time.process_time()
        try:
            return super().loglikelihood(requests, disable_tqdm)
        finally:
            self.wall += time.perf_counter() - wall
            self.processor += time.process_time() - processor


def tokenizer() -> PreTrainedTokenizerFast:
    """4,096 byte-level entries, trained on the questions themselves."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    text = (GAUNTLET / "reading_comprehension" / "boolq.jsonl").read_text(encoding="utf8")[:1_000_000]
    found.train_from_iterator(text.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, initializer_range=0.05,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def race(names: list[str], shots: int, limit: int, rounds: int, run: Run, mirror: Path) -> list[dict[str, Any]]:
    """A row a task: seconds of both, the ratio, and whether the scores are the same."""
    network, words = model(), tokenizer()
    rows = []
    for name in names:
        loaded = tasks_of(load_named([name], mirror))
        times = BestTimes()
        scores: dict[str, Any] = {}
        for _ in range(rounds):
            for contender, batch, share in (("lm-eval 16", 16, False), ("lm-eval 64", 64, False), ("ours", 32, True)):
                set_shots(loaded["tasks"][name], shots, SEED)
                harness = Timed(run, network, words, batch, share=share)
                found = lm_eval.evaluate(lm=harness, task_dict=loaded, limit=limit, bootstrap_iters=0)
                times.add(contender, harness.wall, harness.processor)
                scores[contender] = {k: v for k, v in found["results"][name].items() if isinstance(v, float)}
        rows.append(
            {
                "task": name,
                "shots": shots,
                **times.figures(("lm-eval 16", "lm-eval 64")),
                "same": scores["lm-eval 16"] == scores["ours"],
            }
        )
        print(json.dumps(rows[-1]), file=sys.__stderr__, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--shots", default="0,5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--mirror", type=Path, help="a mirror that is there already")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not GAUNTLET.is_dir():
        sys.exit(f"expected the benchmark files in {GAUNTLET}")
    torch.set_num_threads(options.threads)
    names = options.tasks.split(",")
    with tempfile.TemporaryDirectory() as folder:
        mirror = options.mirror or Path(folder) / "mirror"
        if not options.mirror:
            for name in names:
                mirror_task(name, TASKS[name], mirror)
        run = Run(Path(folder) / "work")
        with quiet(), own_cache(run.work_dir / "datasets"):
            rows = [
                row
                for shots in options.shots.split(",")
                for row in race(names, int(shots), options.limit, options.rounds, run, mirror)
            ]
    report(rows, {"task": 12, "shots": 5}, as_json=options.json)


if __name__ == "__main__":
    main()
