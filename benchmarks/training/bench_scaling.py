"""Weak and strong scaling of pretraining from one rank to two, each pinned to a core, and what a model of the network
makes of it for many nodes.

python benchmarks/training/bench_scaling.py [--model A] [--rounds 3] [--batches 24] [--sharding ddp]

About 8 minutes on 2 quiet cores. In each round: one rank alone; two trainings of one rank side by side, which share
memory and cache but send nothing; two ranks with twice the batch (weak scaling) and with the same batch (strong).
Efficiency is tokens a second of the two ranks over twice those of one. Two ranks wait for the slower of both in each
step: how much that costs is told by the steps of the two trainings that send nothing, paired in order. The time of
gloo's all-reduce over loopback is measured by size, and a start-up time and a bandwidth fitted to it (Hockney's α and
β); with them and the step of one rank the planner's network says what N ranks would reach, which for two is held
against what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import distributed, multiprocessing

from benchmarks.training.train_setting import SETTINGS, Setting, llama_values, write, write_tokenizer
from cli.common.output import print_table
from training.planner.hardware.network import Network

PROJECT = Path(__file__).resolve().parents[2]
SIZES = [2**power for power in range(10, 27, 2)]
"""Bytes of the all-reduces that are timed."""
REPEATS = 8
WARM = 4
"""Steps that are not looked at."""
NODES = (1, 2, 4, 8, 16, 64)
GBIT = 25.0
"""Of the nodes' network in the extrapolation."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(SETTINGS), default="A")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--sharding", default="ddp")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("expected two cores")
    setting = SETTINGS[options.model]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(replace(setting, batch=64), folder)
        write_tokenizer(folder / "tokenizer")
        speeds: dict[str, list[float]] = {"one": [], "side by side": [], "weak": [], "strong": []}
        waited = []
        for number in range(options.rounds):
            job = Job(folder / f"round{number}", folder, setting, options.batches, options.sharding)
            speeds["one"].append(job.train("one", [cores[:1]], setting.batch)[0])
            speeds["side by side"].append(
                statistics.mean(job.train("beside", [[core] for core in cores], setting.batch))
            )
            waited.append(waiting([job.steps(f"beside{training}") for training in range(2)]))
            speeds["weak"].append(job.train("weak", [cores], 2 * setting.batch)[0])
            speeds["strong"].append(job.train("strong", [cores], setting.batch)[0])
            print({name: round(values[-1]) for name, values in speeds.items()}, flush=True)
        median = {name: statistics.median(values) for name, values in speeds.items()}
        alpha, beta, timed = fit(folder)
    show(setting, median, statistics.median(waited), alpha, beta, timed)


class Job:
    """Trainings of one round, each with folders of its own."""

    def __init__(self, out: Path, data: Path, setting: Setting, batches: int, sharding: str) -> None:
        self._out, self._data, self._setting, self._batches, self._sharding = out, data, setting, batches, sharding
        out.mkdir()

    def train(self, name: str, trainings: Sequence[Sequence[int]], batch: int) -> list[float]:
        """Tokens a second of trainings that run at once. trainings: the cores of each, one rank on every core."""
        running = [self._start(f"{name}{number}", cores, batch) for number, cores in enumerate(trainings)]
        speeds = []
        for processes in running:
            for process in processes:
                said, _ = process.communicate()
                if process.returncode:
                    sys.exit(f"{name}: a rank ended with {process.returncode}")
                speeds += [float(line.split()[1]) for line in said.splitlines() if line.startswith("tokens_per_s:")]
        return speeds

    def steps(self, name: str) -> list[float]:
        """Seconds of each step of a training, but for the first, which allocate."""
        lines = map(json.loads, self._journal(name).read_text().splitlines())
        return np.diff([line["time"] for line in lines if "train/loss" in line.get("values", {})])[WARM:].tolist()

    def _journal(self, name: str) -> Path:
        return self._out / f"{name}.journal"

    def _start(self, name: str, cores: Sequence[int], batch: int) -> list[subprocess.Popen[str]]:
        config = self._out / f"{name}.json"
        settings = {
            "model": {"family": "llama", **model_of(self._setting)},
            "duration": f"{self._batches} batches",
            "global_batch_tokens": batch * self._setting.length,
            "evaluate_every": f"{self._batches} batches",
            "checkpoint_every": f"{self._batches} batches",
            "keep_state": "none",
            "guard": {"enabled": False},
        }
        config.write_text(json.dumps(settings))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(PROJECT),
            "WORLD_SIZE": str(len(cores)),
            "LOCAL_WORLD_SIZE": str(len(cores)),
            "NODE_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        launch = {
            "processes": len(cores),
            "threads": 1,
            "compile": "off",
            "precision": "fp32",
            "sharding": self._sharding,
        }
        command = [sys.executable, "-m", "training.pretrain", "--config", str(config), "--out", str(self._out / name)]
        command += [
            "--input",
            f"shards={self._data / self._setting.name}",
            "--input",
            f"tokenizer={self._data / 'tokenizer'}",
        ]
        command += [part for key, value in launch.items() for part in ("--launch", f"{key}={value}")]
        return [
            subprocess.Popen(
                ["taskset", "-c", str(core), *command],
                stdout=subprocess.PIPE,
                # Rank 0 writes its journal there, other ranks nothing that is looked at.
                stderr=subprocess.DEVNULL if rank else self._journal(name).open("w"),
                text=True,
                env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=PROJECT,
            )
            for rank, core in enumerate(cores)
        ]


def waiting(trainings: Sequence[Sequence[float]]) -> float:
    """Seconds by which a step would be longer if each waited for the slower of two; that of one being their mean."""
    return statistics.mean(map(max, *trainings)) - statistics.mean(map(statistics.mean, trainings))


def model_of(setting: Setting) -> dict[str, int]:
    values = llama_values(setting)
    return {
        "layers": values["num_hidden_layers"],
        "width": values["hidden_size"],
        "heads": values["num_attention_heads"],
        "mlp_width": values["intermediate_size"],
        "positions": values["max_position_embeddings"],
    }


def parameters(setting: Setting) -> int:
    layer = 4 * setting.width**2 + 3 * setting.width * setting.mlp_width
    return setting.layers * layer + 4096 * setting.width


def fit(folder: Path) -> tuple[float, float, dict[int, float]]:
    """α in seconds and β in bytes a second of two ranks' all-reduce over loopback, and the seconds by size.

    A ring of two sends each byte once: t = 2 α + size / β, fitted with weights of 1/t so that small sizes count.
    """
    multiprocessing.spawn(_time_all_reduce, args=(str(folder / "meeting"), str(folder / "timed.json")), nprocs=2)
    timed = {int(size): seconds for size, seconds in json.loads((folder / "timed.json").read_text()).items()}
    sizes, seconds = np.array(list(timed)), np.array(list(timed.values()))
    columns = np.stack([np.full(len(sizes), 2.0), sizes.astype(float)], axis=1) / seconds[:, None]
    (alpha, per_byte), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    return float(alpha), 1 / float(per_byte), timed


def _time_all_reduce(rank: int, meeting: str, out: str) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found = {}
    for size in SIZES:
        tensor, times = torch.ones(size // 4), []
        for _ in range(REPEATS):
            distributed.barrier()
            start = time.perf_counter()
            distributed.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        found[size] = statistics.median(times)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    distributed.destroy_process_group()


def show(
    setting: Setting, speed: dict[str, float], waited: float, alpha: float, beta: float, timed: dict[int, float]
) -> None:
    size = 4 * parameters(setting)
    tokens = setting.batch * setting.length
    step, beside = tokens / speed["one"], tokens / speed["side by side"]
    sending = 2 * alpha + size / beta
    one, side_by_side, weak, strong = (speed[name] for name in ("one", "side by side", "weak", "strong"))
    rows = [
        ("one rank", one, one),
        ("one of two trainings side by side", side_by_side, one),
        ("two ranks, twice the batch (weak)", weak, 2 * one),
        ("two ranks, the same batch (strong)", strong, 2 * one),
        ("weak, over two side by side", weak, 2 * side_by_side),
    ]
    shown = [{"what": what, "speed": f"{has:,.0f}", "share": f"{has / of:.3f}"} for what, has, of in rows]
    print_table(shown, {"what": "", "speed": "tokens/s", "share": "efficiency"})
    print(f"all-reduce over loopback: α {1e6 * alpha:.0f} µs, β {beta / 1e9:.2f} GB/s; by size: ", end="")
    print(", ".join(f"{size:,} B {1e3 * seconds:.2f} ms" for size, seconds in timed.items()))
    weak_step = 2 * tokens / speed["weak"]
    print(
        f"step of one rank {step:.3f} s, beside another {beside:.3f} s, of two ranks {weak_step:.3f} s; gradients of "
        f"{size / 1e6:.1f} MB take {sending:.3f} s alone, {100 * sending / weak_step:.1f} % of the step; "
        f"the step is {max(0.0, weak_step - beside):.3f} s longer than beside another; to wait for the slower of two "
        f"that send nothing would make it {waited:.3f} s longer"
    )
    print(f"\nPredicted for nodes of one rank each on {GBIT:g} Gbit/s, half of the sending hidden, weak scaling:")
    network = Network(link=beta, network=GBIT * 1e9 / 8, node=1, start_s=alpha, far_start_s=alpha)
    predicted = []
    for nodes in NODES:
        whole = step + network.all_reduce(size, nodes, 1) / 2 + step * network.straggling(nodes)
        predicted.append({"nodes": f"{nodes}", "efficiency": f"{step / whole:.3f}"})
    print_table(predicted, {"nodes": "nodes", "efficiency": "efficiency"})


if __name__ == "__main__":
    main()
