"""Steps of pretraining on one GPU: model FLOPs utilisation, memory beside the plan's, and what each option is worth.

python benchmarks/training/bench_gpu.py [--only 1.3B ...] [--steps 6]

Each row is the pretrain stage itself, by the native loop, in a process of its own on random tokens in documents of
some 500; its first two steps compile and are left out, the median of the others is told. Some 8 minutes on an H200 (by
its steps; not run whole); rows that do not fit the GPU say so. MFU is PaLM's (Chowdhery et al. 2022, appendix B) of
the GPU's dense bf16 peak, in FP8 too. Planned is what `stemma check` says of the same training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.training.train_setting import Setting, write, write_tokenizer
from infra.launch.config import LaunchConfig
from infra.run import Run
from training.config import PretrainConfig
from training.core.devices import device_called
from training.planner.architecture import of_preset
from training.planner.stages import needs
from training.pretrain import pretrain

LENGTH, VOCABULARY, DOCUMENT = 2048, 50_257, 500
WARM_UP = 2
LINES_OF_THE_DEAD = 25


@dataclass(frozen=True)
class Row:
    """preset: of training/config/presets.py. sequences: of a batch, microbatch: at once. attention, optimizer: of
    `pretrain`. launch: what differs from the defaults."""

    preset: str
    sequences: int
    microbatch: int
    attention: str = "sequence"
    launch: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "125M": Row("gpt-125m", 128, 64),
    "125M, within documents": Row("gpt-125m", 128, 64, "document"),
    "1.3B": Row("gpt-1.3b", 64, 16),
    "1.3B, uncompiled": Row("gpt-1.3b", 64, 8, launch={"compile": "off"}),
    "1.3B, within documents": Row("gpt-1.3b", 64, 16, "document"),
    "1.3B, selective recompute": Row("gpt-1.3b", 64, 16, launch={"recompute": "selective"}),
    "1.3B, Muon": Row("gpt-1.3b", 64, 16, optimizer={"muon": {}}),
    "Llama 1.1B": Row("tinyllama-1.1b", 64, 16),
    "Llama 1.1B, FP8": Row("tinyllama-1.1b", 64, 16, launch={"precision": "fp8"}),
    "Llama 7B, full recompute": Row("llama-2-7b", 16, 4, launch={"recompute": "full"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="cpu: a nano model, to try it")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(Row(**options.child), options)
        return
    if options.device == "gpu" and not torch.cuda.is_available():
        print("no CUDA GPU: nothing is measured")
        return
    where = torch.cuda.get_device_name() if options.device == "gpu" else "CPU"
    print(f"{where}, torch {torch.__version__}, sequences of {LENGTH} tokens\n")
    print("| training | tokens/s | TFLOP/s | MFU | ms a step | planned | GB | planned | s of the first step |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = write_inputs(Path(name))
        for title in options.only:
            print(_told(title, options, folder), flush=True)


def write_inputs(folder: Path) -> Path:
    """Write the shards and the tokenizer that rows train on; returns the folder."""
    write(Setting("data", 0, 0, LENGTH, 4, 0, 0), folder, VOCABULARY, DOCUMENT)
    write_tokenizer(folder / "tokenizer", VOCABULARY)
    return folder


def measure(row: Row, folder: Path, steps: int, device: str) -> dict[str, Any]:
    """Return the figures of a row, trained in a process of its own; raises RuntimeError with the end of its log."""
    arguments = ["--child", json.dumps(asdict(row)), "--steps", str(steps), "--device", device, "--folder", str(folder)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError("\n".join(done.stderr.splitlines()[-LINES_OF_THE_DEAD:]))
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def _told(title: str, options: argparse.Namespace, folder: Path) -> str:
    try:
        found = measure(ROWS[title], folder, options.steps, options.device)
    except RuntimeError as error:
        return f"| {title} | failed |\n{error}"
    cells = [
        f"{found['tokens_per_s']:,.0f}", f"{found['tflops']:.0f}", f"{found['mfu']:.1%}" if found["mfu"] else "",
        f"{found['step_s'] * 1e3:.0f}", f"{found['planned_s'] * 1e3:.0f}" if found["planned_s"] else "",
        f"{found['memory_gb']:.1f}", f"{found['planned_gb']:.1f}" if found["planned_gb"] else "",
        f"{found['first_s']:.0f}",
    ]  # fmt: skip
    return f"| {title} | {' | '.join(cells)} |"


class Journal:
    """Ends the process when the last step is done, before a model of billions of weights is written."""

    def __init__(self, told: Any, steps: int) -> None:
        self._told, self._left = told, WARM_UP + steps
        self._last, self._seconds = time.perf_counter(), list[float]()

    def write(self, line: str) -> None:
        if '"train/loss"' not in line:
            return
        now = time.perf_counter()
        self._seconds.append(now - self._last)
        self._last = now
        self._left -= 1
        if not self._left:
            values = json.loads(line)["values"]
            self._told(self._seconds, values)
            sys.exit()

    def flush(self) -> None: ...


def train(row: Row, options: argparse.Namespace) -> None:
    """Trains, and tells as its last line what `_told` reads."""
    on_gpu = options.device == "gpu"
    preset, sequences, microbatch = (row.preset, row.sequences, row.microbatch) if on_gpu else ("llama-nano", 2, 1)
    config = PretrainConfig.model_validate(
        {
            "model": {"preset": preset, "positions": LENGTH, "vocab_multiple": 128},
            "duration": "10000 batches",
            "global_batch_tokens": sequences * LENGTH,
            "attention": row.attention,
            "optimizer": {"learning_rate": 1e-4, **row.optimizer},
            "schedule": {"decay": "constant", "warmup": "1 batches"},
            "guard": {"enabled": False},
            "evaluate_every": "10000 batches",
            "checkpoint_every": "10000 batches",
        }
    )
    launch = LaunchConfig.model_validate(
        {"device": options.device, "trainer": "native", "compile": "on", "microbatch": microbatch, **row.launch}
    )
    work = options.folder / f"work{os.getpid()}"

    def tell(seconds: list[float], values: dict[str, float]) -> None:
        step_s = statistics.median(seconds[WARM_UP:])
        speed = sequences * LENGTH / step_s
        ratio = speed / values["train/tokens_per_s"]  # the stage's own figure is a mean over a window
        planned_s, planned_gb = plan(config, launch, preset) if on_gpu else (None, None)
        told = {
            "tokens_per_s": speed,
            "tflops": values.get("train/tflops", 0.0) * ratio,
            "mfu": values.get("train/mfu", 0.0) * ratio,
            "step_s": step_s,
            "planned_s": planned_s,
            "planned_gb": planned_gb,
            "memory_gb": values["train/memory_gb"],
            "first_s": seconds[0],
            "steps_s": seconds,
        }
        print(json.dumps(told))

    run = Run(work, launch, journal=Journal(tell, options.steps))  # type: ignore[arg-type]
    inputs = {"shards": options.folder / "data", "tokenizer": options.folder / "tokenizer"}
    pretrain(config, inputs, options.folder / "out", run)


def plan(config: PretrainConfig, launch: LaunchConfig, preset: str) -> tuple[float | None, float | None]:
    """Seconds of a step and bytes × 1e-9, as `stemma check` has them."""
    device = device_called(torch.cuda.get_device_name())
    if device is None:
        return None, None
    arch = of_preset(preset, -(-VOCABULARY // 128) * 128)
    told = needs(config, arch, LENGTH, launch, device, 10_000 * config.global_batch_tokens)
    return told.hours and told.hours * 3600 / 10_000, told.memory_gb


if __name__ == "__main__":
    main()
