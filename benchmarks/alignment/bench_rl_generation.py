"""A round of reinforcement learning by ours and written plainly with transformers, with the same tokens.

python -m benchmarks.alignment.bench_rl_generation [--store .stemma | --made FOLDER] [--ways rloo whole ppo]
    [--rounds 4] [--threads 2] [--precision fp32] [--json]

A real training (`training.rlhf`) with `rlhf` of configs/quickstart.yaml on the newest SFT model, instructions and
reward model of the store, or on those that `benchmarks.alignment.rl_inputs` makes in a folder; "whole" with
`whole_groups`; PPO with the same, but one answer to a prompt. Every round is sampled by all contenders in one process,
and the order goes round. `generate` is told which tokens to write, ours, so that it writes the same and is spared the
drawing. Its prompts are sorted by length, padded on the left and repeated for each answer, in batches of 64 and of all;
the faster counts. Then `benchmarks.alignment.plain_rlhf` scores the same answers and learns from the same minibatches,
in the plain way. A step is a round: sampling, scoring and learning. The first round is not counted. Before, greedy
answers of both are compared token for token, and afterwards the two policies: how far they are apart, as a share of how
far they went.

Prints wall and processor time: on a machine that others use, the latter says more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from benchmarks.alignment.plain_rlhf import PlainRlhf
from benchmarks.alignment.rl_inputs import rl_inputs
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.chat.base import Chat, read_rows
from training.config import RlhfConfig
from training.core.hardware import prepare
from training.data.rows import prompts_of
from training.generation import completions
from training.generation.completions import Completions
from training.generation.sampling import sample
from training.model.models import load
from training.rl import round as rounds
from training.rl.prompts import Prompt
from training.rl.round import Rollouts
from training.rlhf import rlhf

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
BATCHES = (64, 256)
WAYS: dict[str, dict[str, Any]] = {
    "rloo": {},
    "whole": {"whole_groups": True},
    "ppo": {"answers_per_prompt": 1, "algorithm": "ppo"},
}
Both = tuple[float, float]
"""Seconds by the clock and of processor time."""


class Told(LogitsProcessor):
    """Leaves one token to write at each step."""

    def __init__(self, tokens: Tensor, width: int) -> None:
        self._tokens, self._width = tokens, width

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        step = input_ids.shape[1] - self._width
        return torch.full_like(scores, -torch.inf).scatter_(1, self._tokens[:, step : step + 1], 0.0)


def by_generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]] | None,
    batch: int,
    given: dict[str, Any],
) -> list[list[int]]:
    """transformers' `generate`; answers: what it is to write, None for the likeliest."""
    new, stops = given["max_new_tokens"], given["stops"]
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    found: list[list[int]] = [[] for _ in prompts]
    model.eval()
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        width = max(len(prompts[number]) for number in chosen)
        ids = torch.tensor([[0] * (width - len(prompts[n])) + list(prompts[n]) for n in chosen])
        mask = torch.tensor([[0] * (width - len(prompts[n])) + [1] * len(prompts[n]) for n in chosen])
        told = LogitsProcessorList()
        if answers is not None:
            tokens = torch.tensor([[*answers[n], *[0] * (new - len(answers[n]))] for n in chosen])
            told.append(Told(tokens, width))
        with given["hardware"].autocast():
            out: Any = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=sorted(stops),
                pad_token_id=0, logits_processor=told,
            )  # fmt: skip
        for number, row in zip(chosen, out[:, width:].tolist(), strict=True):
            end = next((place for place, token in enumerate(row) if token in stops), len(row))
            found[number] = row[: end + 1]
    return found


class Race:
    """Takes the sampler's place in the first rounds of a training, and times all contenders."""

    def __init__(self, rounds: int, plain: PlainRlhf) -> None:
        self._rounds = rounds
        self._plain = plain
        self._left: Both | None = None
        self._asked: list[Prompt] = []
        self._parts: list[NDArray[np.int64]] = []
        self._start: list[Tensor] = [weight.detach().clone() for weight in plain.policy.parameters()]
        self.times: dict[str, list[Both]] = {}
        self.rest: list[Both] = []
        self.plain_rest: list[Both] = []
        self.tokens: list[int] = []
        self.copies: list[float] = []
        self.apart = 0.0

    def __enter__(self) -> Race:
        """Listens to which prompts a round asks, and how its answers are dealt to minibatches."""
        asking, dealing = Rollouts._sample, rounds.minibatches

        def asked(of: Rollouts, prompts: Sequence[Prompt], seed: int) -> Completions:
            self._asked = list(prompts)
            return asking(of, prompts, seed)

        def dealt(config: RlhfConfig, random: np.random.Generator) -> list[NDArray[np.int64]]:
            parts = dealing(config, random)
            self._parts += parts
            return parts

        self._patched = ExitStack()
        self._patched.enter_context(mock.patch.object(Rollouts, "_sample", asked))
        self._patched.enter_context(mock.patch.object(rounds, "minibatches", dealt))
        self._patched.enter_context(mock.patch.object(completions, "sample", self._sample))
        return self

    def __exit__(self, *_: object) -> None:
        self._patched.close()

    def _sample(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], **given: Any) -> list[list[int]]:
        now = _now()
        if self._left is not None:
            self.rest.append(_since(self._left, now))
            self._left = None
            self._compare()
        answers = sample(model, prompts, **given)
        if len(self.tokens) == self._rounds:
            return answers
        contenders: list[tuple[str, Callable[[], list[list[int]]]]] = [
            ("ours", lambda: sample(model, prompts, **given))
        ]
        for batch in BATCHES:
            contenders.append((f"theirs {batch}", partial(by_generate, model, prompts, answers, batch, given)))
        turn = len(self.tokens) % len(contenders)
        for name, work in contenders[turn:] + contenders[:turn]:
            began = _now()
            wrote = work()
            self.times.setdefault(name, []).append(_since(began, _now()))
            assert wrote == answers, name
        self.tokens.append(sum(map(len, answers)))
        self.copies.append(len(prompts) / len(set(map(tuple, prompts))))
        ended = torch.tensor([answer[-1:] == [self._plain.chat.end] for answer in answers])
        began = _now()
        self._plain.learn(Completions([*map(list, prompts)], answers, ended), self._asked, self._parts)
        self.plain_rest.append(_since(began, _now()))
        self._parts = []
        self._policy = model
        self._left = _now()
        return answers

    def _compare(self) -> None:
        ours, theirs = ([*one.parameters()] for one in (self._policy, self._plain.policy))
        apart, went = (
            sum(float((one - other).detach().double().square().sum()) for one, other in zip(*pair, strict=True))
            for pair in ((ours, theirs), (ours, self._start))
        )
        self.apart = (apart / went) ** 0.5


def _now() -> Both:
    return time.perf_counter(), time.process_time()


def _since(one: Both, other: Both) -> Both:
    return other[0] - one[0], other[1] - one[1]


def race(way: str, inputs: dict[str, Path], options: argparse.Namespace, launch: LaunchConfig) -> dict[str, Any]:
    """Seconds of sampling and of the rest, the mean of the counted rounds, and what follows from them."""
    pipeline = yaml.safe_load(QUICKSTART.read_text(encoding="utf8"))
    settings = {**pipeline["rlhf"], "seed": pipeline["seed"], "checkpoint_every": "100000 batches", **WAYS[way]}
    settings |= {"rollouts": options.rounds + 1, "heldout_prompts": 4, "heldout_answers": 1}
    config, hardware = RlhfConfig.model_validate(settings), prepare(launch)
    length = config.max_prompt_tokens + config.answer_max_tokens
    with (
        tempfile.TemporaryDirectory() as folder,
        Race(options.rounds + 1, PlainRlhf(inputs, config, hardware, length)) as timed,
    ):
        rlhf(config, inputs, Path(folder) / "out", Run(Path(folder) / "work", launch))

    def mean(seconds: list[Both]) -> Both:
        counted = seconds[1 : options.rounds + 1]
        return sum(one[0] for one in counted) / len(counted), sum(one[1] for one in counted) / len(counted)

    ours, rest, plain_rest = mean(timed.times["ours"]), mean(timed.rest), mean(timed.plain_rest)
    each = {name: mean(seconds) for name, seconds in timed.times.items()}
    theirs = min(each[f"theirs {batch}"][0] for batch in BATCHES), min(each[f"theirs {b}"][1] for b in BATCHES)
    tokens = sum(timed.tokens[1:]) / len(timed.tokens[1:])
    row: dict[str, Any] = {"way": way, "rounds": options.rounds, "tokens": tokens, "copies": timed.copies[-1]}
    row |= {name: [round(one, 3) for one in seconds] for name, seconds in each.items()}
    row |= {"rest": rest, "plain_rest": plain_rest, "apart": timed.apart}
    for place, clock in enumerate(("wall", "processor")):
        row[clock] = {
            "sampling_ratio": theirs[place] / ours[place],
            "learning_ratio": plain_rest[place] / rest[place],
            "step_ratio": (theirs[place] + plain_rest[place]) / (ours[place] + rest[place]),
            "generating_share": ours[place] / (ours[place] + rest[place]),
            "generating_share_theirs": theirs[place] / (theirs[place] + plain_rest[place]),
            "tokens_per_s": tokens / ours[place],
        }
    return row


def greedy(inputs: dict[str, Path], launch: LaunchConfig, count: int = 64) -> tuple[int, int]:
    """How many greedy answers to prompts of the store are the same from both, of how many."""
    chat, hardware, model = Chat.load(inputs["model"]), prepare(launch), load(inputs["model"]).eval()
    rows = read_rows(inputs["prompts"] / "train.jsonl", ("prompt",))[: 2 * count]
    prompts = [ids for ids in prompts_of(chat, rows) if len(ids) <= 96][: count // 2] * 2
    given: dict[str, Any] = {"max_new_tokens": 32, "stops": chat.stops, "hardware": hardware}
    ours = sample(model, prompts, temperature=0, **given)
    theirs = by_generate(model, prompts, None, 64, given)
    return sum(one == other for one, other in zip(ours, theirs, strict=True)), len(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--store", type=Path, help="a store with the quickstart's artifacts")
    where.add_argument("--made", type=Path, help="a folder for inputs of the quickstart's size")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    launch = LaunchConfig(threads=options.threads, trainer="native", device="cpu", precision=options.precision)
    if options.made:
        inputs = rl_inputs(options.made, yaml.safe_load(QUICKSTART.read_text(encoding="utf8")), launch)
    else:
        stages = {"model": "sft", "prompts": "instructions", "reward_model": "reward_model"}
        inputs = {name: _newest(options.store, stage) for name, stage in stages.items()}
    same, count = greedy(inputs, launch)
    rows = [race(way, inputs, options, launch) for way in options.ways]
    if options.json:
        print(json.dumps({"greedy_same": same, "greedy": count, "rows": rows}, indent=1))
        return
    print(f"greedy answers that are the same: {same} of {count}; {prepare(launch).compute}")
    print("seconds of sampling and of scoring and learning, and how many times faster ours is")
    print(
        f"{'':6}{'clock':>10}   {'ours':>15}   {'plain':>15} {'sampling':>9} {'learning':>9} {'step':>6}   generating"
    )
    for row in rows:
        for place, clock in enumerate(("wall", "processor")):
            theirs, found = min(row[f"theirs {batch}"][place] for batch in BATCHES), row[clock]
            print(
                f"{row['way']:6}{clock:>10}   {row['ours'][place]:>6.2f} + {row['rest'][place]:>6.2f}"
                f"   {theirs:>6.2f} + {row['plain_rest'][place]:>6.2f}"
                f" {found['sampling_ratio']:>8.2f}x {found['learning_ratio']:>8.2f}x {found['step_ratio']:>5.2f}x"
                f"   {found['generating_share']:.0%}, plain {found['generating_share_theirs']:.0%}"
            )
        speed = row["wall"]["tokens_per_s"]
        print(f"      {row['tokens']:,.0f} tokens a round, {row['copies']:.1f} answers a prompt, {speed:,.0f} tokens/s")
        print(f"      the two policies are apart by {row['apart']:.2%} of how far they went")


def _newest(store: Path, stage: str) -> Path:
    return max((store / stage).glob("*/manifest.json"), key=lambda path: path.stat().st_mtime).parent


if __name__ == "__main__":
    main()
