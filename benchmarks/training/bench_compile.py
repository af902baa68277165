"""What torch.compile costs and saves where two ranks share a model out: all of its forward pass compiled at once, or
each block by itself.

python benchmarks/training/bench_compile.py [--layers 4] [--steps 12] [--limit 600] [--sharding fsdp]

A Llama of width 256 on documents in sequences of 256 tokens, two gloo ranks of one thread each, nothing cached from one
way to the next. Seconds are processor time of one rank with what it starts, so that it does not matter what else the
machine does. `compiling` is what the steps before the last third took beyond as many of the last third's median.
A way that gives no answer within the limit (of wall time) is ended, and where its ranks stood is printed. With
`--backend aot_eager --ranks 1` graphs are counted in a fraction of the time: it makes no kernels.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch._dynamo.utils import counters

from cli.common.output import print_table
from infra.launch.config import LaunchConfig
from training.config import ModelConfig
from training.core.hardware import prepare
from training.distributed.parallel import parallelize
from training.model.documents import positions_within
from training.model.models import build, hf_config
from training.train_modules.language_model import LanguageModel

LENGTH, VOCABULARY, BATCH = 256, 4096, 4
KEYS = ("layers", "steps", "limit", "sharding", "ranks", "backend")
WAYS = ("uncompiled", "by block", "whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--sharding", default="fsdp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--backend", default="inductor", help="aot_eager finds the graphs and makes no kernels")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options)
        return
    rows: list[dict[str, Any]] = []
    for way in options.ways:
        found = race(options, way)
        if found is None:
            rows.append({"way": way, "compiling": f"no answer in {options.limit:.0f}"})
            continue
        compiling, step = costs(found["seconds"])
        rows.append(found | {"way": way, "compiling": f"{compiling:.1f}", "step": f"{1000 * step:.0f}"})
        print(f"{way}: steps of {' '.join(f'{one:.2f}' for one in found['seconds'])} s", flush=True)
    columns = {"compiling": "compiling, s", "step": "a step, ms", "graphs": "graphs", "breaks": "graph breaks"}
    print_table(rows, {"way": "way", **columns, "loss": "last loss"})


def costs(seconds: list[float]) -> tuple[float, float]:
    """Seconds beyond those of usual steps, and those of a usual step."""
    last = seconds[-(len(seconds) // 3) :]
    usual = statistics.median(last)
    first = seconds[: -len(last)]
    return sum(first) - len(first) * usual, usual


def race(options: argparse.Namespace, way: str) -> dict[str, Any] | None:
    """What the first rank told; None where there was no answer."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as cache:
        probe.bind(("127.0.0.1", 0))
        env = os.environ | {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(probe.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            # In the rank itself, whose processor time then has it.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        probe.close()
        given = [f"--{name}={getattr(options, name)}" for name in KEYS]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *given, "--ways", way, "--rank", str(number)],
                env=env | {"RANK": str(number), "LOCAL_RANK": str(number)},
                stdout=subprocess.PIPE if number == 0 else None,
                text=True,
            )
            for number in range(options.ranks)
        ]
        said, _ = ranks[0].communicate()
        codes = [one.wait() for one in ranks]
    lines = [line for line in said.splitlines() if line.startswith("{")]
    if any(codes) or not lines:
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def rank(options: argparse.Namespace) -> None:
    """One of the ranks: trains, and tells how long each step took."""
    faulthandler.dump_traceback_later(options.limit, exit=True)
    way, compiler = options.ways[0], torch.compile
    torch.compile = lambda function: compiler(function, backend=options.backend)
    launch = LaunchConfig(
        device="cpu",
        threads=1,
        precision="fp32",
        processes=options.ranks,
        sharding=options.sharding,
        offload=options.ranks == 1,  # as which one process is sharded too
        compile="off",
    )
    hardware = prepare(launch)
    config = ModelConfig(family="llama", layers=options.layers, width=256, heads=4, positions=LENGTH)
    model = LanguageModel(build(hf_config(config, VOCABULARY, {}), 1), hardware)
    model.model.set_attn_implementation("eager")
    model.compiles_blocks = way == "by block"
    if way == "whole":
        model._outputs = torch.compile(model._outputs)
    parallelize(model, launch, hardware)
    model.compiles_blocks = way != "uncompiled"  # and so its loss is compiled
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(options.rank)
    seconds, loss = [], torch.zeros(())
    for _ in range(options.steps):
        began = processor_s()
        batch = some_batch()
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        seconds.append(processor_s() - began)
    told = {
        "seconds": seconds,
        "loss": round(loss.item(), 4),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }
    print(json.dumps(told), flush=True)
    faulthandler.cancel_dump_traceback_later()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def processor_s() -> float:
    """Of this process and of those that it started and that ended, as compilers."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def some_batch() -> dict[str, torch.Tensor]:
    """Random tokens in documents that begin at random places."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    begins = torch.randint(1, LENGTH, (BATCH, 1))
    documents = (torch.arange(LENGTH)[None] >= begins).int()
    return {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "documents": documents,
        "position_ids": positions_within(documents),
    }


if __name__ == "__main__":
    main()
