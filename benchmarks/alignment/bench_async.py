"""Sampling next to learning against both in turns: wall time to the same reward.

python -m benchmarks.alignment.bench_async OUT [--seeds 17 18 19] [--rounds 24] [--staleness 1] [--sampling-s 12]
    [--learning-s 12] [--target 0.5] [--threads 1]

A Llama of two layers, tuned on additions of one-digit numbers as in `benchmarks.alignment.bench_verifiable`, learns by
GRPO to write the digit 7: the reward is the share of the four tokens that are one. All contenders run `training.rlhf`
with one sampler process each; "in turns" has `max_staleness: 0`, which ends with the bits of a training without
samplers. The sampler takes at least --sampling-s for a round (`benchmarks.alignment.slow_sampler`), the trainer at
least --learning-s for its batches: what is beyond the computation of this small model they spend asleep, as processes
do whose devices are elsewhere. All contenders run at the same time, so that they meet the same load.

Reported: rounds and seconds until the mean reward of three rounds reaches --target, counted from the first round's
prompts without the start of the processes; the share of time that trainer and sampler were idle; the reward of held-out
answers in the end. What OUT contains already is not made again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.alignment.bench_verifiable import SFT, _additions, _base
from benchmarks.alignment.stages import Stages, spread
from corpus.instructions import instructions
from infra.launch.config import LaunchConfig
from infra.run import read_journal
from training.config import RlhfConfig, SftConfig
from training.rl.rollouts import processes
from training.rl.round import Rollouts
from training.rlhf import rlhf
from training.sft import sft

RLHF: dict[str, Any] = {
    "algorithm": "grpo", "answers_per_prompt": 8, "rollout_prompts": 256, "minibatch_answers": 64,
    "answer_max_tokens": 4, "max_prompt_tokens": 24, "kl_coef": 0.0, "heldout_prompts": 100, "heldout_answers": 4,
    "reward_functions": {"benchmarks.alignment.bench_async:sevens": 1.0}, "unfinished_penalty": 0.0,
    "optimizer": {"learning_rate": 1.0e-3, "weight_decay": 0.0}, "schedule": {"decay": "constant", "warmup": "3 %"},
    "checkpoint_every": "1000 batches",
}  # fmt: skip
REWARD = "rlhf/function/benchmarks.alignment.bench_async:sevens"
SMOOTHED = 3
"""Rounds of which the reward's mean counts."""


def sevens(prompts: Sequence[str], answers: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward function: the share of an answer's four tokens that are the digit 7."""
    return [answer.count("7") / RLHF["answer_max_tokens"] for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--staleness", type=int, nargs="+", default=[1], help="of the contenders against 0")
    parser.add_argument("--sampling-s", type=float, default=12.0)
    parser.add_argument("--learning-s", type=float, default=12.0)
    parser.add_argument("--target", type=float, default=0.5)
    parser.add_argument("--sft-epochs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    _stages(args).made("additions", instructions, _additions(args.out / "additions.json"))
    _at_once([(_start_of, args, seed) for seed in args.seeds])
    _at_once([(_train, args, seed, staleness) for seed in args.seeds for staleness in (0, *args.staleness)])
    _print(args)


def _at_once(calls: Sequence[tuple[Any, ...]]) -> None:
    """Call functions in forked processes, which have imported what they need."""
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=function, args=arguments) for function, *arguments in calls]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit(f"processes ended with {[worker.exitcode for worker in workers]}")


def _stages(args: argparse.Namespace) -> Stages:
    return Stages(args.out, LaunchConfig(threads=args.threads, trainer="native", device="cpu", precision="fp32"))


def _start_of(args: argparse.Namespace, seed: int) -> dict[str, Path]:
    """The model that adds a little, and the prompts, without the rule that would check sums."""
    stages = _stages(args)
    additions = stages.made("additions", instructions, _additions(args.out / "additions.json"))
    base = _base(args.out / f"base_{seed}", seed)
    config = SftConfig.model_validate(SFT | {"duration": f"{args.sft_epochs} epochs", "seed": seed})
    tuned = stages.made(f"sft_{seed}", sft, config, {"model": base, "instructions": additions})
    prompts = args.out / f"prompts_{seed}"
    prompts.mkdir(exist_ok=True)
    for name in ("train.jsonl", "heldout.jsonl") if not any(prompts.iterdir()) else ():
        rows = [json.loads(line) for line in (additions / name).read_text(encoding="utf8").splitlines()]
        lines = [json.dumps({key: value for key, value in row.items() if key != "verify"}) for row in rows]
        (prompts / name).write_text("\n".join(lines) + "\n", encoding="utf8")
    return {"model": tuned, "prompts": prompts}


def _train(args: argparse.Namespace, seed: int, staleness: int) -> None:
    """One contender."""
    os.environ["BENCH_SAMPLING_S"] = str(args.sampling_s)
    processes.MODULE = "benchmarks.alignment.slow_sampler"
    rounds = Rollouts.__iter__

    def learning(self: Rollouts) -> Iterator[Any]:
        """From the first batch, which the loader has asked for once it has the answers, to the end of the last."""
        began = 0.0
        for batch in rounds(self):
            began = began or time.monotonic()
            yield batch
        time.sleep(max(0.0, args.learning_s - (time.monotonic() - began)))

    Rollouts.__iter__ = learning  # type: ignore[method-assign]
    settings = RLHF | {"rollouts": args.rounds, "seed": seed, "async": {"max_staleness": staleness}}
    _stages(args).made(f"staleness{staleness}_{seed}", rlhf, RlhfConfig.model_validate(settings), _start_of(args, seed))


def _reached(journal: Path, args: argparse.Namespace) -> tuple[int, float]:
    """The rounds and the seconds until the target was reached."""
    points = [
        (line["time"], line["values"][REWARD])
        for line in read_journal(journal)
        if line["kind"] == "metric" and REWARD in line["values"]
    ]
    for number in range(SMOOTHED, len(points) + 1):
        window = [value for _, value in points[number - SMOOTHED : number]]
        if sum(window) / SMOOTHED >= args.target:
            return number, points[number - 1][0] - points[0][0] + args.sampling_s
    sys.exit(f"{journal} did not reach {args.target:g}: its last rounds have {points[-SMOOTHED:]}")


def _print(args: argparse.Namespace) -> None:
    stages = _stages(args)
    print("| max_staleness | seeds | rounds | seconds | times faster | trainer idle | sampler idle | reward |")
    print("|---" * 8 + "|")
    base = [_reached(args.out / f"staleness0_{seed}.jsonl", args) for seed in args.seeds]
    for staleness in (0, *args.staleness):
        name = f"staleness{staleness}"
        reached = [_reached(args.out / f"{name}_{seed}.jsonl", args) for seed in args.seeds]
        ratios = [first[1] / other[1] for first, other in zip(base, reached, strict=True)]
        figures = stages.figures(name, args.seeds)
        keys = ("trainer_idle_share", "sampler_idle_share", "heldout_functions_rlhf")
        cells = [
            *(spread([float(row[column]) for row in reached]) for column in (0, 1)),
            spread(ratios),
            *(spread([row[key] for row in figures]) for key in keys),
        ]
        print(f"| {staleness} | {len(figures)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
