"""The contenders of bench_train.py, each in a process of its own that trains when it is told to.

python benchmarks/training/train_contenders.py CONTENDER A|B FOLDER

It says `ready SECONDS` after its first steps, then for each line on stdin `speed TOKENS_PER_S TOKENS_PER_CPU_S` of one
window of steps, and the tokens a second of each of its steps; the line `profile` gets a table besides, which an empty
line ends.
All train the same Llama on the same tokens, in bf16 under autocast with fp32 weights (in fp32 on a CPU that does not
compute bf16 natively), AdamW (fused), gradients clipped.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.training.train_setting import LEARNING_RATE, SETTINGS, VOCABULARY, Setting, llama_values
from training.core.hardware import native_bf16

WARM_UP = 3
BF16 = native_bf16(torch.device("cpu"))
# Kinds of work by the beginnings of operators' names, the first that fits.
KINDS = {
    "matrix products of layers and output": ("aten::mm", "aten::addmm", "mkldnn", "aten::linear", "aten::matmul"),
    "attention: its matrix products, or SDPA": ("aten::bmm", "aten::baddbmm", "aten::_scaled_dot", "aten::_flash"),
    "compiled kernels": ("CompiledFunction", "## Call CompiledFxGraph", "graph_", "Torch-Compiled", "cpp_fused"),
    "optimizer": ("Optimizer.step", "aten::_fused_adamw", "Optimizer.zero_grad"),
    "gradient norm and clipping": ("aten::linalg_vector_norm", "aten::_foreach"),
    "copies and casts": ("aten::copy_", "aten::_to_copy", "aten::to", "aten::clone"),
}


def profile_table(profiler: torch.profiler.profile, seconds: float, steps: int) -> str:
    """Milliseconds a step by kind of work; what no operator accounts for is Python: the loop and its callbacks."""
    spent = dict.fromkeys([*KINDS, "other operators"], 0.0)
    for event in profiler.key_averages():
        fits = (kind for kind, names in KINDS.items() if event.key.startswith(names))
        spent[next(fits, "other operators")] += event.self_cpu_time_total / 1e6
    spent["Python between operators"] = seconds - sum(spent.values())
    rows = [f"| {kind} | {1e3 * time / steps:.1f} | {time / seconds:.0%} |" for kind, time in spent.items()]
    return "\n".join(["| a step's time | ms | share |", "|---|---|---|", *rows])


class Pace:
    """Lets the loop that calls `step` after each of its steps run one window at a time."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._done = 0
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._last, self._steps = self._began, list[float]()
        self._profiler: torch.profiler.profile | None = None

    def step(self) -> None:
        self._done += 1
        now = time.perf_counter()
        seconds, cpu_seconds = now - self._began, time.process_time() - self._cpu_began
        self._steps.append(now - self._last)
        self._last = now
        if self._done == WARM_UP:
            self._wait(f"ready {seconds:.1f}")
        elif self._done > WARM_UP and (self._done - WARM_UP) % self._setting.window == 0:
            if self._profiler is not None:
                self._profiler.stop()
            tokens = self._setting.batch * self._setting.length
            speeds = [len(self._steps) * tokens / all_s for all_s in (seconds, cpu_seconds)]
            print("speed", *(f"{speed:.1f}" for speed in [*speeds, *(tokens / step_s for step_s in self._steps)]))
            if self._profiler is not None:
                print(profile_table(self._profiler, seconds, self._setting.window) + "\n")
                self._profiler = None
            self._wait("waiting")

    def _wait(self, message: str) -> None:
        print(message, flush=True)
        word = sys.stdin.readline().strip()
        if not word:
            os._exit(0)
        if word == "profile":
            self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profiler.start()
        self._began, self._cpu_began = time.perf_counter(), time.process_time()
        self._last, self._steps = self._began, []


def ours(setting: Setting, folder: Path, pace: Pace, attention: str, trainer: str = "composer") -> None:
    """The pretrain stage itself, whose journal tells when a batch is done."""
    from infra.launch.config import LaunchConfig
    from infra.run import Run
    from training.config import PretrainConfig
    from training.pretrain import pretrain

    class Journal:
        def write(self, line: str) -> None:
            if '"train/loss"' in line:
                pace.step()

        def flush(self) -> None: ...

    config = PretrainConfig.model_validate(
        {
            "model": {"transformers": {"model_type": "llama", **llama_values(setting)}},
            "duration": "100000 batches",
            "global_batch_tokens": setting.batch * setting.length,
            "attention": attention,
            "optimizer": {"learning_rate": LEARNING_RATE},
            "schedule": {"decay": "constant", "warmup": "1 batches"},
            "evaluate_every": "100000 batches",
            "checkpoint_every": "100000 batches",
        }
    )
    launch = LaunchConfig(device="cpu", precision="bf16" if BF16 else "fp32", compile="on", trainer=trainer)
    run = Run(folder / f"work-{trainer}-{attention}-{setting.name}", launch, journal=Journal())  # type: ignore[arg-type]
    inputs = {"shards": folder / setting.name, "tokenizer": folder / "tokenizer"}
    pretrain(config, inputs, folder / "out", run)


def plain(setting: Setting, folder: Path, pace: Pace) -> None:
    """(a) The best plain loop: everything from tokens to the loss in one compiled graph, plain attention or our blocks,
    whichever is faster."""
    from training.model.attention import CAUSAL_BLOCKS

    model = _llama(setting, "eager" if setting.length <= 256 else CAUSAL_BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    @torch.compile
    def loss_of(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
            weight = model.lm_head.weight
            chunks = [
                cross_entropy((part @ weight.T).float(), target, ignore_index=-100, reduction="sum")
                for part, target in zip(hidden.split(1024), labels.flatten().split(1024), strict=True)
            ]
            return torch.stack(chunks).sum() / (labels != -100).sum()

    for ids, labels in _batches(setting, folder):
        loss = loss_of(ids, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        pace.step()


def trainer(setting: Setting, folder: Path, pace: Pace) -> None:
    """(b) transformers' Trainer with its bf16 and its fused AdamW."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Told(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            pace.step()

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"), max_steps=100_000, per_device_train_batch_size=setting.batch, bf16=BF16,
        use_cpu=True, optim="adamw_torch_fused", learning_rate=LEARNING_RATE, max_grad_norm=1.0, weight_decay=0.1,
        lr_scheduler_type="constant", report_to=[], save_strategy="no", logging_steps=10, disable_tqdm=True,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in _tokens(setting, folder)]
    Trainer(_llama(setting, "sdpa"), arguments, train_dataset=rows, callbacks=[Told()]).train()


def composer(setting: Setting, folder: Path, pace: Pace) -> None:
    """(c) Composer as it comes, with the bf16 forward that it refuses on a CPU, and torch.compile."""
    import composer
    from composer.algorithms import GradientClipping
    from composer.models import ComposerModel
    from torch.utils.data import DataLoader

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.model = _llama(setting, "sdpa")

        def forward(self, batch: dict[str, Tensor]) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=BF16):
                return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"], use_cache=False)

        def loss(self, outputs: Any, batch: Any, *_: Any, **__: Any) -> Tensor:
            loss: Tensor = outputs.loss
            return loss

    class Told(composer.Callback):
        def batch_end(self, *_: Any) -> None:
            pace.step()

    model = Model()
    rows = [{"input_ids": torch.from_numpy(row)} for row in _tokens(setting, folder)]
    composer.Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, fused=True),
        train_dataloader=DataLoader(rows, setting.batch, shuffle=True),  # type: ignore[arg-type]
        max_duration="100000ba",
        device="cpu",
        compile_config={},
        progress_bar=False,
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
        callbacks=[Told()],
    ).fit()


def _llama(setting: Setting, attention: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, **llama_values(setting))
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model


def _tokens(setting: Setting, folder: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    tokens: np.ndarray[Any, np.dtype[np.int64]] = np.load(folder / f"{setting.name}.npy")
    return tokens


def _batches(setting: Setting, folder: Path) -> Iterator[tuple[Tensor, Tensor]]:
    tokens = torch.from_numpy(_tokens(setting, folder))
    while True:
        for rows in torch.randperm(len(tokens)).split(setting.batch):
            ids = tokens[rows]
            labels = torch.full_like(ids, -100)
            labels[:, :-1] = ids[:, 1:]
            yield ids, labels


CONTENDERS: dict[str, Callable[[Setting, Path, Pace], None]] = {
    "ours": lambda *args: ours(*args, "sequence"),
    "ours, attention within documents": lambda *args: ours(*args, "document"),
    "ours, by the native loop": lambda *args: ours(*args, "sequence", "native"),
    "(a) plain loop": plain,
    "(b) transformers Trainer": trainer,
    "(c) bare Composer": composer,
}

if __name__ == "__main__":
    name, which, place = sys.argv[1:]
    if not (tokens := Path(place) / f"{which}.npy").exists():
        sys.exit(f"{tokens}: expected the tokens that bench_train.py writes")
    CONTENDERS[name](SETTINGS[which], Path(place), Pace(SETTINGS[which]))
