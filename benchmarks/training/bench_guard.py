"""How often the guard calls a healthy training ill: its own decisions on recorded losses, batches drawn anew.

python benchmarks/training/bench_guard.py record --store .stemma --out /tmp/losses
python benchmarks/training/bench_guard.py simulate --losses /tmp/losses [--runs 4000] [--seed 1]

record (some 20 minutes on two cores, of the store that `make demo` leaves): trains pretrain, SFT, SFT again from the
SFT model, and the reward model with the quickstart's settings, and at some batches on the way writes down the loss of
each of some training examples. simulate: a run is a fresh order of these examples cut into batches, one epoch after
another; the loss of an example at a batch lies between those recorded before and after it, and stays as it was at the
last one. The guard's judge gets each batch's loss and noise, with a gradient norm that is always suspicious: so the
share of runs with an alarm is at most what it would be with any norms.
"""

from __future__ import annotations

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from training.config.guard import GuardConfig
from training.guard.judge import Figures, Judge

REPOSITORY = Path(__file__).resolve().parents[2]
BATCHES = (4, 8, 16, 32, 64)
EXAMPLES = 1024
PLACES = (0, 3, 8, 20, 50)
STAGES = ("pretrain", "sft", "sft_again", "reward_model")


class Severe(Judge):
    """One for whom a norm is always far above the usual."""

    def _beside_a_norm(self, figures: Figures) -> tuple[str, float, float] | None:
        return "gradient norm", math.inf, 1.0


@dataclass(frozen=True)
class Recorded:
    """losses (places, examples): each example's summed loss; weights (examples,): by which its mean counts."""

    places: NDArray[np.int64]
    losses: NDArray[np.float64]
    weights: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path) -> Recorded:
        kept = np.load(path)
        return cls(kept["places"], kept["losses"].astype(np.float64), kept["weights"].astype(np.float64))

    def at(self, batch: int) -> NDArray[np.float64]:
        """Each example's loss at a batch."""
        after = int(np.searchsorted(self.places, batch))
        if after == 0 or after == len(self.places):
            return self.losses[min(after, len(self.places) - 1)]
        share = (batch - self.places[after - 1]) / (self.places[after] - self.places[after - 1])
        mixed: NDArray[np.float64] = (1 - share) * self.losses[after - 1] + share * self.losses[after]
        return mixed


def alarms(recorded: Recorded, size: int, length: int, seed: int, place: int | None, guard: GuardConfig) -> int:
    """The batch of the first alarm of one simulated run, -1 if there is none."""
    random = np.random.default_rng([seed, size])
    judge = Severe(guard, math.log(2) if recorded.weights.max() == 1 else 0.0)
    order = np.empty(0, np.int64)
    for batch in range(length):
        if len(order) < size:
            order = random.permutation(len(recorded.weights))
        chosen, order = order[:size], order[size:]
        losses = (recorded.at(batch) if place is None else recorded.losses[place])[chosen]
        weights = recorded.weights[chosen]
        loss = losses.sum() / weights.sum()
        rest = losses - loss * weights
        noise = math.sqrt((rest**2).sum() * size / (size - 1)) / weights.sum()
        if judge.look(batch, Figures(float(loss), noise, size)):
            return batch
    return -1


def some(recorded: Recorded, size: int, length: int, seeds: range, place: int | None) -> list[int]:
    guard = GuardConfig()
    return [alarms(recorded, size, length, seed, place, guard) for seed in seeds]


def upper(found: int, runs: int) -> float:
    """Clopper-Pearson: the share that is exceeded with 2.5 % probability."""
    return float(beta.ppf(0.975, found + 1, runs - found)) if found < runs else 1.0


def simulate(folder: Path, runs: int, seed: int, length: int, stages: list[str], each_place: bool) -> None:
    parts = 8
    with ProcessPoolExecutor(2) as pool:
        for stage in stages:
            recorded = Recorded.read(folder / f"{stage}.npz")
            for place in [None, *(range(len(recorded.places)) if each_place else ())]:
                for size in BATCHES:
                    jobs = []
                    for part in range(parts):
                        first, end = runs * part // parts, runs * (part + 1) // parts
                        seeds = range(seed * 1_000_000 + first, seed * 1_000_000 + end)
                        jobs.append(pool.submit(some, recorded, size, length, seeds, place))
                    ends = [one for job in jobs for one in job.result()]
                    found = sum(end >= 0 for end in ends)
                    name = stage if place is None else f"{stage} at {recorded.places[place]}"
                    print(
                        f"{name:<20} batch {size:>2}: {found} alarms in {runs:,} runs of {length} batches, at most "
                        f"{upper(found, runs):.3%}" + (f" {sorted(e for e in ends if e >= 0)[:8]}" if found else ""),
                        flush=True,
                    )


class Done(Exception):
    """All places are recorded."""


def record(store: Path, out: Path, stages: list[str], examples: int, places: list[int]) -> None:
    for stage in stages:
        if not (out / f"{stage}.npz").exists():
            _record(stage, store, out / f"{stage}.npz", examples, places)


def _artifact(store: Path, *names: str) -> Path:
    """The newest artifact of the first of these stages that has any."""
    for name in names:
        found = sorted((store / name).glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
        if found:
            return found[-1].parent
    raise SystemExit(f"{store}: no artifact of {names[0]}; run `make demo` first")


def _record(stage: str, store: Path, out: Path, examples: int, places: list[int]) -> None:
    import torch

    from infra.run import Run
    from training import pretrain, reward_model, sft
    from training.config import PretrainConfig, RewardModelConfig, SftConfig
    from training.core.callbacks import Callback
    from training.core.measuring import measuring
    from training.core.train_state import TrainState

    quick = yaml.safe_load((REPOSITORY / "configs" / "quickstart.yaml").read_text())
    own = {"guard": {"enabled": False}, "checkpoint_every": "100000 batches"}
    base, tuned = ("pretrain",), ("sft",)
    length = f"{max(150, places[-1] + 1)} batches"
    module: Any
    function: Any
    config: Any
    if stage == "pretrain":
        module, function = pretrain, pretrain.pretrain
        settings = quick["pretrain"] | {
            "duration": length,
            "evaluate_every": "100000 batches",
            "global_batch_tokens": 4096,
        }
        config = PretrainConfig.model_validate(settings | own)
        inputs = {"shards": _artifact(store, "shard"), "tokenizer": _artifact(store, "tokenizer")}
    elif stage == "reward_model":
        module, function = reward_model, reward_model.reward_model
        config = RewardModelConfig.model_validate(quick["reward_model"] | {"duration": length} | own)
        inputs = {"model": _artifact(store, *tuned), "preferences": _artifact(store, "preferences")}
    else:
        module, function = sft, sft.sft
        settings = quick["sft"] | {"heldout_limit": 2, "answers_limit": 2}
        if stage == "sft_again":
            settings |= {"optimizer": {"learning_rate": 6.0e-5, "weight_decay": 0.0}, "global_batch_examples": 8}
        config = SftConfig.model_validate(settings | own)
        inputs = {
            "model": _artifact(store, *(tuned if stage == "sft_again" else base)),
            "instructions": _artifact(store, "instructions"),
        }

    class Recorder(Callback):
        """Measures each example at the places."""

        def __init__(self, model: Any, loader: Any) -> None:
            self._model = model
            data = loader.dataloader.dataset
            many = list(data.examples[:examples]) if hasattr(data, "examples") else [data[n] for n in range(examples)]
            self._batches = [loader.dataloader.collate_fn(many[n : n + 32]) for n in range(0, examples, 32)]
            self._rows: list[Any] = []
            self._weights: Any = None

        def batch_start(self, state: TrainState) -> None:
            batch = state.clock.batch
            if batch not in places:
                return
            with measuring(self._model):
                told = [self._model.example_losses(self._model(one), one) for one in self._batches]
            self._rows.append(torch.cat([losses for losses, _ in told]).numpy())
            self._weights = torch.cat([weights for _, weights in told]).numpy()
            out.parent.mkdir(parents=True, exist_ok=True)
            print(f"{stage} at batch {batch}: mean loss {self._rows[-1].sum() / self._weights.sum():.3f}", flush=True)
            if batch == places[-1]:
                np.savez_compressed(out, places=np.array(places), losses=np.stack(self._rows), weights=self._weights)
                raise Done

    fit = module.fit

    def recording(name: str, model: Any, loader: Any, *others: Any, **named: Any) -> Any:
        given = list(others)
        callbacks = given.pop() if isinstance(given[-1], list) else []
        return fit(name, model, loader, *given, [*callbacks, Recorder(model, loader)], **named)

    module.fit = recording
    work = out.parent / f"{stage}.work"
    try:
        (work / "out").mkdir(parents=True, exist_ok=True)
        function(config, inputs, work / "out", Run(work))
    except Done:
        return
    finally:
        module.fit = fit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record")
    one.add_argument("--store", type=Path, default=Path(".stemma"))
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    one.add_argument("--examples", type=int, default=EXAMPLES)
    one.add_argument("--places", type=int, nargs="+", default=list(PLACES), help="batches to record at, ascending")
    two = commands.add_parser("simulate")
    two.add_argument("--losses", type=Path, required=True)
    two.add_argument("--runs", type=int, default=4000)
    two.add_argument("--batches", type=int, default=200)
    two.add_argument("--seed", type=int, default=1)
    two.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    two.add_argument("--each-place", action="store_true")
    options = parser.parse_args()
    if options.command == "record":
        record(options.store, options.out, options.stages, options.examples, options.places)
    else:
        simulate(options.losses, options.runs, options.seed, options.batches, options.stages, options.each_place)


if __name__ == "__main__":
    main()
