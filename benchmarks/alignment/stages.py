"""Single stages for a benchmark, each made once for good, and what several seeds of one come to."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from infra.config import StageConfig
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.checkpoint.export import export
from training.config import ModelConfig
from training.model.models import build, hf_config

Figures = dict[str, float]


class Stages:
    """Artifacts by name in one folder, each with its figures in figures.json; what is there already is taken as it is.

    only_finished: nothing is made.
    """

    def __init__(self, out: Path, launch: LaunchConfig, only_finished: bool = False) -> None:
        self._out, self._launch, self._only_finished = out, launch, only_finished

    def made(
        self, name: str, function: Callable[..., Any], config: StageConfig, inputs: Mapping[str, Path] | None = None
    ) -> Path:
        """The artifact of one stage, whose seconds are one of its figures."""
        out = self._out / name
        if (out / "figures.json").exists() or self._only_finished:
            return out
        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with (self._out / f"{name}.jsonl").open("w", encoding="utf8") as journal:
            result = function(config, inputs or {}, out, Run(self._out / "work" / name, self._launch, journal=journal))
        figures = {**result.figures, "seconds": time.monotonic() - began}
        print(f"{name}: {result.headline} ({figures['seconds']:.0f} s)", file=sys.stderr, flush=True)
        (out / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf8")
        return out

    def figures(self, kind: str, seeds: Iterable[int]) -> list[Figures]:
        """Those of `kind_seed` for each seed that has been through."""
        names = [f"{kind}_{seed}" for seed in seeds]
        return [self.figures_of(name) for name in names if (self._out / name / "figures.json").exists()]

    def figures_of(self, name: str) -> Figures:
        """Those of one artifact."""
        figures: Figures = json.loads((self._out / name / "figures.json").read_text(encoding="utf8"))
        return figures


def options_of(
    description: str | None, rounds: int, sft_epochs: float, sft_help: str, **further: Mapping[str, Any]
) -> tuple[argparse.Namespace, Stages]:
    """Parse the options of a benchmark that tunes models by several seeds and lets each learn from rewards: `out`,
    `seeds`, `rounds`, `sft_epochs`, `threads`; and return them with the stages of the folder `out`.

    Args:
        further: other options, by their names, as `add_argument` takes them.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[17, 18, 19])
    for name, option in further.items():
        parser.add_argument(f"--{name}", **option)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--sft-epochs", type=float, default=sft_epochs, help=sft_help)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    launch = LaunchConfig(threads=args.threads, trainer="native", device="cpu", precision="fp32")
    return args, Stages(args.out, launch)


def base_model(folder: Path, words: PreTrainedTokenizerFast, model: Mapping[str, Any], seed: int) -> Path:
    """Return the folder of a model of random weights, with its tokenizer."""
    if not (folder / "config.json").exists():
        special = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        export(build(hf_config(ModelConfig(**model), len(words), special), seed), None, folder)
        words.save_pretrained(folder)
    return folder


def spread(values: list[float]) -> str:
    """Mean and standard deviation, to three and two digits."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3g} ± {deviation:.2g}"
