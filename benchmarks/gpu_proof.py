"""What users get on one GPU, shown in at most nine minutes: tests, every learning stage, both loops, options, sampling.

python -m benchmarks.gpu_proof [--out gpu-proof] [--minutes 9] [--only PART ...]
python -m benchmarks.gpu_proof --device cpu --toy       the same at toy size, to see that it works

Each part runs in a process of its own and leaves OUT/parts/PART.json; one that is done is not run again for the same
commit, torch and device, and one that there is no time for is left to the next call. OUT/proof.json has all figures,
OUT/proof.md the table that is printed at the end. Reads nothing but the repository; the text is docstrings of
installed packages.

- machine: device, driver and versions, and whether the installed torch can use the device.
- tests: those marked `gpu`.
- stages: `stemma run configs/small.yaml`, Composer's loop, `compile: auto`, `microbatch: auto`, with fewer batches;
  seconds, tokens a second and memory of each learning stage beside the plan's.
- losses: the same batches on the device and on its CPU, in fp32 within 0.1 %, in bf16 within 2 %.
- loops: Composer's and the native one side by side.
- options: FP8, recomputed layers, flex_attention, compiled and not.
- sampling: tokens a second of `training.generation.sampling`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infra.project import PROJECT, code_state

LINES_OF_THE_DEAD = 15
FP32_BOUND, BF16_BOUND = 1e-3, 2e-2
"""Largest relative difference of a training loss from the CPU's, as in tests/training/trainer/test_on_a_gpu.py."""
SMALL = {
    "pretrain.duration": "150 batches",
    "ingest.read": "[{kind: docstrings, limit_mb: 24}]",
    "rlhf.rollouts": "3",
    "rlhf.heldout_prompts": "64",
    "benchmarks.limit": "50",
    "safety.toxicity.samples_per_prompt": "2",
}
TOY = {
    "ingest.read": "[{kind: docstrings, packages: [numpy], limit_mb: 1}]",
    "instructions.read": "[{kind: docstrings, packages: [numpy], limit: 100}]",
    "preferences.read": "[{kind: docstrings, packages: [numpy], limit: 100}]",
    "tokenizer.vocab_size": "1024",
    "pretrain.model.width": "64",
    "pretrain.model.heads": "2",
    "pretrain.model.mlp_width": "128",
    "pretrain.model.layers": "2",
    "pretrain.duration": "3 batches",
    "pretrain.global_batch_tokens": "4096",
    "sft.duration": "2 batches",
    "sft.global_batch_examples": "8",
    "sft.answers_limit": "8",
    "sft.answer_max_tokens": "8",
    "sft.heldout_limit": "8",
    "reward_model.duration": "2 batches",
    "reward_model.global_batch_pairs": "8",
    "judge.duration": "2 batches",
    "judge.global_batch_pairs": "8",
    "rlhf.rollouts": "1",
    "rlhf.rollout_prompts": "8",
    "rlhf.minibatch_answers": "8",
    "rlhf.answer_max_tokens": "8",
    "rlhf.heldout_prompts": "8",
}
LEARNING = ("pretrain", "sft", "reward_model", "rlhf")


@dataclass(frozen=True)
class Settings:
    """What the parts are told: where they write, on which device they compute, and whether at toy size."""

    out: Path
    device: str
    is_toy: bool

    @property
    def steps(self) -> int:
        return 2 if self.is_toy else 6


def machine(settings: Settings) -> list[dict[str, Any]]:
    import torch
    import transformers

    from infra.launch.devices.gpus import ask_driver, describe, gpu_problems

    answer, driver = describe(), ask_driver()
    asked = settings.device == "gpu"
    return [
        {
            "device": answer.gpus[0].name if answer.gpus and asked else "CPU",
            "driver": driver.version,
            "torch": answer.torch,
            "cuda": answer.cuda,
            "transformers": transformers.__version__,
            "composer": version("mosaicml"),
            "free_gib": round(answer.gpus[0].free / 2**30, 1) if answer.gpus and answer.gpus[0].free else None,
            "threads": torch.get_num_threads(),
            "problems": [str(problem) for problem in gpu_problems(answer, driver, requested=asked)],
        }
    ]


def tests(settings: Settings) -> list[dict[str, Any]]:
    report = settings.out / "tests.xml"
    files = [
        f"tests/training/{name}.py" for name in ("trainer/test_on_a_gpu", "model/test_families", "model/test_float8")
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    if done.returncode not in (0, 1):
        raise RuntimeError(_end_of(done.stdout + done.stderr))
    from xml.etree import ElementTree

    suite = ElementTree.parse(report).getroot()[0]
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [case.get("name") for case in suite.iter("testcase") if case.find("failure") is not None]
    ran = count["tests"] - count["skipped"]
    row = {**count, "ran": ran, "seconds": float(suite.get("time", 0)), "failed": failed}
    # Without a GPU all of them skip, which proves nothing where one was asked for.
    return [{**row, "holds": ran > 0} if settings.device == "gpu" else row]


def stages(settings: Settings) -> list[dict[str, Any]]:
    """The default path through every learning stage. What is built is kept, so that a second call goes on."""
    changes = TOY | {"pretrain.model.positions": "1024"} if settings.is_toy else SMALL
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    words += ["--set", f"launch.device={settings.device}", "--until", "rlhf", "--root", str(settings.out / "store")]
    config = str(PROJECT / "configs" / "small.yaml")
    plans = {row["stage"]: row["plan"] for row in _stemma("check", config, *words)["stages"]}
    rows = []
    for row in _stemma("run", config, *words)["stages"]:
        if row["stage"] not in LEARNING or row["path"] is None:
            continue
        folder = Path(row["path"])
        figures = json.loads((folder / "manifest.json").read_text())["result"]["figures"]
        told = [json.loads(line)["values"] for line in (folder / "aux" / "metrics.jsonl").read_text().splitlines()]
        memory = [values["train/memory_gb"] for values in told if "train/memory_gb" in values]
        plan = plans.get(row["stage"]) or {}
        rows.append(
            {
                "stage": row["stage"],
                "status": row["status"],
                "seconds": row["seconds"],
                "planned_s": plan["hours"] * 3600 if plan.get("hours") else None,
                **{name: figures.get(name) for name in ("tokens_per_s", "mfu")},
                "memory_gb": max(memory, default=None),
                "planned_gb": plan.get("memory_gb"),
            }
        )
    return rows


def losses(settings: Settings) -> list[dict[str, Any]]:
    reference = _losses(settings, "cpu", "fp32")
    rows = []
    for precision, bound in (("fp32", FP32_BOUND), ("bf16", BF16_BOUND)):
        here = _losses(settings, settings.device, precision)
        apart = max(abs(one - other) / other for one, other in zip(here, reference, strict=True))
        rows.append(
            {"precision": precision, "batches": len(here), "apart": apart, "bound": bound, "holds": apart <= bound}
        )
    return rows


def loops(settings: Settings) -> list[dict[str, Any]]:
    return _rows(settings, {loop: {"trainer": loop} for loop in ("composer", "native")})


def options(settings: Settings) -> list[dict[str, Any]]:
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "uncompiled": {"compile": "off"},
        "recompute: full": {"recompute": "full"},
        "flex_attention": {"attention": "flex_attention"},
    }
    if settings.device == "gpu":
        changes["precision: fp8"] = {"precision": "fp8"}
    else:
        del changes["as it is"]  # compiling takes a CPU a minute
        changes = {name: {"compile": "off", **launch} for name, launch in changes.items() if name != "flex_attention"}
    return _rows(settings, changes)


def sampling(settings: Settings) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from infra.launch.config import LaunchConfig
    from training.core.hardware import prepare
    from training.generation.sampling import sample

    hardware = prepare(LaunchConfig(device="gpu" if settings.device == "gpu" else "cpu"))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    if not settings.is_toy:
        sizes = {"hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, intermediate_size=2 * sizes["hidden_size"], head_dim=32, vocab_size=16_384)
    model = AutoModelForCausalLM.from_config(config).to(hardware.device)
    prompts = [list(range(1, 33))] * (8 if settings.is_toy else 512)
    rows = []
    for at_once in (1, len(prompts)):
        count = 16 if settings.is_toy else 128
        chosen = prompts[:at_once]
        sample(model, chosen, max_new_tokens=8, temperature=0.7, stops=set(), hardware=hardware, batch_size=at_once)
        began = time.perf_counter()
        answers = sample(
            model, chosen, max_new_tokens=count, temperature=0.7, stops=set(), hardware=hardware, batch_size=at_once
        )
        seconds = time.perf_counter() - began
        rows.append({"answers at once": at_once, "tokens_per_s": sum(map(len, answers)) / seconds})
    return rows


@dataclass(frozen=True)
class Part:
    """seconds: about what it takes on an H100; without them left it is not begun."""

    run: Callable[[Settings], list[dict[str, Any]]]
    seconds: int


PARTS = {
    "machine": Part(machine, 20),
    "tests": Part(tests, 140),
    "losses": Part(losses, 30),
    "loops": Part(loops, 60),
    "stages": Part(stages, 200),
    "options": Part(options, 90),
    "sampling": Part(sampling, 25),
}


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"))
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU")
    parser.add_argument("--child", choices=PARTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    settings = Settings(given.out.absolute(), given.device, given.toy)
    if given.child:
        print(json.dumps(PARTS[given.child].run(settings)))
        return 0
    (settings.out / "parts").mkdir(parents=True, exist_ok=True)
    key = _key(settings)
    for name in given.only:
        path = settings.out / "parts" / f"{name}.json"
        if path.exists() and (kept := json.loads(path.read_text()))["key"] == key and "rows" in kept:
            print(f"{name}: done before", flush=True)
            continue
        left = given.minutes * 60 - (time.monotonic() - began)
        if left < PARTS[name].seconds and not settings.is_toy:
            print(f"{name}: left to the next call, {left:.0f} s are left of {given.minutes:g} minutes", flush=True)
            continue
        path.write_text(json.dumps({"key": key, **_run(name, left)}, indent=1))
    return _told(settings, key)


def _run(name: str, seconds: float) -> dict[str, Any]:
    """The rows of a part, or why it has none."""
    began = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_proof", *sys.argv[1:], "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=PROJECT, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    took = time.monotonic() - began
    print(f"{name}: {took:.0f} s{', failed' if done.returncode else ''}", flush=True)
    if done.returncode:
        return {"error": _end_of(done.stderr), "seconds": took}
    return {"rows": json.loads(done.stdout.splitlines()[-1]), "seconds": took}


def _told(settings: Settings, key: str) -> int:
    """Write and print what is known; returns 1 where a part of this commit failed, or does not hold."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted((settings.out / "parts").glob("*.json"))}
    parts = {name: parts[name] for name in PARTS if name in parts and parts[name]["key"] == key}
    (settings.out / "proof.json").write_text(json.dumps({"key": key, "parts": parts}, indent=1))
    lines = [f"`python -m benchmarks.gpu_proof`, {key}"]
    for name, part in parts.items():
        lines += ["", f"**{name}**, {part.get('seconds', 0):.0f} s", ""]
        lines += [part["error"]] if "error" in part else _table(part["rows"])
    (settings.out / "proof.md").write_text("\n".join(lines) + "\n")
    print("\n".join(["", *lines]))
    rows = [row for part in parts.values() for row in part.get("rows", [])]
    broken = any("error" in part for part in parts.values())
    return int(broken or any(row.get("failures") or row.get("errors") or row.get("holds") is False for row in rows))


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0]) if rows else []
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return lines + [f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    if isinstance(value, list):
        return "; ".join(map(str, value))
    return "" if value is None else str(value)


def _key(settings: Settings) -> str:
    """What figures are of: those of another commit, torch or device are not taken for these."""
    state = code_state()
    changed = " with changes" if state["dirty"] else ""
    size = ", toy size" if settings.is_toy else ""
    return f"commit {str(state['commit'])[:10]}{changed}, torch {version('torch')}, {settings.device}{size}"


def _rows(settings: Settings, launches: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps of a pretraining with each of some `launch:` keys."""
    from benchmarks.training.bench_gpu import ROWS, measure, write_inputs

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_inputs(Path(name))
        for title, launch in launches.items():
            launch = {"compile": "off", **launch} if settings.is_toy else launch
            attention = "document" if "attention" in launch else "sequence"
            row = replace(ROWS["Llama 1.1B"], launch=launch, attention=attention)
            began = time.monotonic()
            try:
                found = measure(row, folder, settings.steps, settings.device)
            except RuntimeError as error:
                rows.append({"": title, "error": str(error).splitlines()[-1]})
                continue
            wanted = ("first_s", "step_s", "planned_s", "tokens_per_s", "mfu", "memory_gb", "planned_gb")
            rows.append({"": title, "process_s": time.monotonic() - began, **{key: found[key] for key in wanted}})
    return rows


def _losses(settings: Settings, device: str, precision: str) -> list[float]:
    """Of a short pretraining on random tokens by the default loop."""
    from benchmarks.training.train_setting import SETTINGS, write, write_tokenizer
    from infra.launch.config import LaunchConfig
    from infra.run import Run
    from training.config import PretrainConfig
    from training.pretrain import pretrain

    class Journal:
        """Keeps the training losses."""

        def __init__(self) -> None:
            self.losses: list[float] = []

        def write(self, line: str) -> None:
            if '"train/loss"' in line:
                self.losses.append(json.loads(line)["values"]["train/loss"])

        def flush(self) -> None: ...

    config = PretrainConfig.model_validate(
        {
            "model": {"family": "llama", "layers": 2, "width": 64, "heads": 2, "positions": 256},
            "duration": f"{5 if settings.is_toy else 30} batches",
            "global_batch_tokens": 8 * 256,
            "optimizer": {"learning_rate": 3.0e-3, "muon": {}},
        }
    )
    with tempfile.TemporaryDirectory() as name:
        folder, journal = Path(name), Journal()
        write(SETTINGS["A"], folder)
        write_tokenizer(folder / "tokenizer")
        launch = LaunchConfig.model_validate({"device": device, "precision": precision})
        run = Run(folder / "work", launch, journal=journal)  # type: ignore[arg-type]
        pretrain(config, {"shards": folder / "A", "tokenizer": folder / "tokenizer"}, folder / "out", run)
    return journal.losses


def _stemma(*words: str) -> Any:
    environment = os.environ | {"STEMMA_RELAY": "off", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "cli.main", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PROJECT, check=False)
    if done.returncode:
        raise RuntimeError(_end_of(done.stderr) + done.stdout[-2000:])
    return json.loads(done.stdout)


def _end_of(log: str) -> str:
    return "\n".join(log.strip().splitlines()[-LINES_OF_THE_DEAD:])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError:
        traceback.print_exc()
        sys.exit(1)
