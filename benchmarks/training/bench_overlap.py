"""How much of the sending of gradients hides behind the backward pass.

python benchmarks/training/bench_overlap.py [--model B] [--batch 2] [--steps 8]

About 2 minutes on 2 quiet cores. Two gloo ranks, each pinned to a core with one thread, compute a Llama's gradients
under DDP as trainings do. DDP sums them in buckets of at most 25 MB, each as soon as its gradients are there. Told are
when each bucket was handed over and when its sum was there: what was sent before the last one was handed over is
hidden, since until then the backward pass computed. In turn with it, steps of the same ranks that send all gradients
after the backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import distributed, multiprocessing
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training.train_setting import SETTINGS, VOCABULARY, Setting, llama_values
from cli.common.output import print_table

WARM = 2
"""Steps that are not looked at: DDP lays its buckets out after the first."""
Span = tuple[float, float, int]
"""When a bucket was handed over, when its sum was there, and its bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=sorted(SETTINGS), default="B")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("expected two cores")
    with tempfile.TemporaryDirectory() as place:
        given = (place, SETTINGS[options.model], options.batch, options.steps)
        multiprocessing.spawn(measure, args=given, nprocs=2)
        told = json.loads((Path(place) / "told.json").read_text())
    show(told)


def measure(rank: int, place: str, setting: Setting, batch: int, steps: int) -> None:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **llama_values(setting)))
    spread = DistributedDataParallel(model)
    spans: list[Span] = []
    # torch reads the hook's annotations, which are words in this file.
    spread.register_comm_hook(spans, lambda noted, bucket: summed(noted, bucket))
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCABULARY, (batch, setting.length), generator=random)
    told: dict[str, list[Any]] = {"behind": [], "after": [], "spans": []}
    for step in range(WARM + steps):
        for way in ("behind", "after"):
            spans.clear()
            distributed.barrier()
            begun = time.perf_counter()
            if way == "behind":
                spread(input_ids=ids, labels=ids).loss.backward()
            else:
                with spread.no_sync():
                    spread(input_ids=ids, labels=ids).loss.backward()
                send_all(model)
            took = time.perf_counter() - begun
            if step >= WARM:
                told[way].append(took)
                if way == "behind":
                    told["spans"].append(list(spans))
            model.zero_grad(set_to_none=True)
    if rank == 0:
        (Path(place) / "told.json").write_text(json.dumps(told))
    distributed.destroy_process_group()


def summed(spans: list[Span], bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP does with a bucket by itself, with the times noted."""
    begun, buffer = time.perf_counter(), bucket.buffer().div_(2)
    size = buffer.numel() * buffer.element_size()

    def there(future: torch.futures.Future[Any]) -> torch.Tensor:
        spans.append((begun, time.perf_counter(), size))
        found: torch.Tensor = future.value()[0]
        return found

    return distributed.all_reduce(buffer, async_op=True).get_future().then(there)


def send_all(model: torch.nn.Module) -> None:
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / 2
    distributed.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def hidden_and_seen(spans: list[Span]) -> tuple[float, float]:
    """Seconds in which something was sent while the backward pass computed, and afterwards."""
    last = max(begun for begun, _, _ in spans)
    end = max(there for _, there, _ in spans)
    hidden, at = 0.0, 0.0
    for begun, there, _ in sorted(spans):
        hidden += max(0.0, min(there, last) - max(begun, at))
        at = max(at, there)
    return hidden, end - last


def show(told: dict[str, list[Any]]) -> None:
    parts = [hidden_and_seen(spans) for spans in told["spans"]]
    hidden, seen = (statistics.median(part) for part in zip(*parts, strict=True))
    first = sorted(told["spans"][-1])
    sizes = ", ".join(f"{size / 1e6:.1f}" for _, _, size in first)
    print(f"buckets of {sizes} MB, in the order in which they were handed over")
    behind, after = (statistics.median(told[way]) for way in ("behind", "after"))
    rows = [
        {"what": "sent while the backward pass computed", "ms": f"{1000 * hidden:.0f}"},
        {"what": "sent afterwards", "ms": f"{1000 * seen:.0f}"},
        {"what": "hidden share of the sending", "ms": f"{100 * hidden / (hidden + seen):.0f} %"},
        {"what": "forward and backward pass, gradients sent behind it", "ms": f"{1000 * behind:.0f}"},
        {"what": "the same, gradients sent after it", "ms": f"{1000 * after:.0f}"},
    ]
    print_table(rows, {"what": "", "ms": "ms"})


if __name__ == "__main__":
    main()
