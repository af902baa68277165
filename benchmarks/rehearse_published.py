"""Published layouts in rehearsal: what a rank of each holds and sends, next to the plan.

python -m benchmarks.rehearse_published [NAME…]

A layout of more than 1,024 devices, and its batch, are folded along the data dimension; a step has as many microbatches
as its pipeline has ranks. What `launch:` has no key for is named.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from infra.launch.config import LaunchConfig
from training.config import ModelConfig
from training.core.devices import DEVICES
from training.planner.hardware.kernels import KERNELS
from training.planner.hardware.network import network_of
from training.planner.stages import layout_of, of_model
from training.planner.step_time import Training
from training.rehearsal.__main__ import rehearsed
from training.rehearsal.compare import comparison, on_device
from training.rehearsal.job import Rehearsal, folded


@dataclass(frozen=True)
class Published:
    """A layout in print. devices: of the publication. nodes: of 8 devices, in rehearsal. differs: from the
    publication."""

    source: str
    devices: int
    gpu: str
    nodes: int
    model: dict[str, Any]
    vocabulary: int
    length: int
    microbatch: int
    launch: dict[str, Any] = field(default_factory=dict)
    differs: str = ""


def _llama(layers: int, width: int, heads: int, length: int, **sizes: Any) -> dict[str, Any]:
    """A model with Llama's parts, and as many parameters in its MLP as one of four times the width without a gate."""
    inner = -(-width * 8 // 3 // 256) * 256
    return {
        "family": "llama", "layers": layers, "width": width, "heads": heads, "mlp_width": inner, "positions": length,
        "tie_embeddings": True, **sizes,
    }  # fmt: skip


def _megatron(tp: int, pp: int, pieces: int = 1) -> dict[str, Any]:
    keys = {"pipeline_parallel": pp} if pp > 1 else {}
    more = {"pipeline_pieces": pieces} if pieces > 1 else {}
    return {"trainer": "native", "tensor_parallel": tp, "recompute": "full", **keys, **more}


_NO_GPT2 = "Llama's parts for GPT-2's: tensor and pipeline parallelism know no GPT-2"
CASES = {
    "mosaic-7b": Published(
        "llm-foundry, MPT 7B on 128 A100 40 GB", 128, "a100-40", 16,
        {"family": "gpt2", "layers": 32, "width": 4096, "heads": 32, "positions": 2048}, 50_432, 2048, 18,
        {"sharding": "fsdp", "recompute": "full"}, "GPT-2's parts, with learned positions and biases",
    ),
    "korthikanti-22b": Published(
        "Korthikanti et al. 2022, 22B", 8, "a100-80", 1, _llama(48, 6144, 64, 2048), 51_200, 2048, 4,
        _megatron(8, 1), _NO_GPT2,
    ),
    "korthikanti-175b": Published(
        "Korthikanti et al. 2022, 175B", 64, "a100-80", 8, _llama(96, 12288, 96, 2048), 51_200, 2048, 1,
        _megatron(8, 8), f"{_NO_GPT2}; one piece a rank for 3",
    ),
    "korthikanti-530b": Published(
        "Korthikanti et al. 2022, 530B", 280, "a100-80", 35, _llama(105, 20480, 128, 2048), 51_200, 2048, 1,
        _megatron(8, 35), f"{_NO_GPT2}; one piece a rank for 3",
    ),
    "korthikanti-1t": Published(
        "Korthikanti et al. 2022, 1T", 512, "a100-80", 64, _llama(128, 25600, 160, 2048), 51_200, 2048, 1,
        _megatron(8, 64), _NO_GPT2,
    ),
    "llama-405b": Published(
        "Llama 3 405B on 16,384 H100 (dp 128 × tp 8 × pp 16)", 16_384, "h100", 128,
        _llama(126, 16384, 128, 8192, kv_heads=8, mlp_width=53248, tie_embeddings=False), 128_256, 8192, 1,
        {"trainer": "native", "tensor_parallel": 8, "pipeline_parallel": 16, "recompute": "full"},
        "folded to dp 8; gradients and optimizer state not sharded: launch.sharding beside tensor and pipeline "
        "parallelism is ddp alone",
    ),
}  # fmt: skip


def lines(name: str) -> list[str]:
    """Rows of a table in Markdown."""
    case = CASES[name]
    begin = time.monotonic()
    launch = LaunchConfig(processes=8, nodes=case.nodes, hardware=case.gpu, microbatch=case.microbatch, **case.launch)
    model, device = ModelConfig.model_validate(case.model), DEVICES[case.gpu]
    arch = of_model(model, case.vocabulary)
    assert arch is not None
    count = folded(1 << 20, launch)
    job = Rehearsal(
        model=model, vocabulary=case.vocabulary, length=case.length, launch=launch, microbatch=case.microbatch,
        microbatches=count,
    )  # fmt: skip
    document = rehearsed(job)
    head = f"{case.source}: {arch.parameters / 1e9:.1f}B, {case.devices:,} devices, rehearsed on {launch.ranks:,}"
    if "problems" in document:
        return [f"| {head} | refused: {document['problems'][0]} | | | |"]
    at = layout_of(launch, case.microbatch, *launch.shares_of_examples, launch.expert_parallel)
    batch = case.microbatch * count * at.dp
    planned = Training(arch, device, KERNELS["flash"], network_of(device), case.length, batch)
    rows = comparison(planned, at, document["ranks"])
    fullest = max(map(on_device, document["ranks"])) / 1e9
    fits = "fits" if fullest <= device.memory / 1e9 else "REFUSED"
    summary = f"{fits}: {fullest:.1f} of {device.memory / 1e9:.1f} GB; {time.monotonic() - begin:.0f} s; {case.differs}"
    table = [f"| **{head}** | {summary} | | | |"]
    for row in rows:
        links = f"{row['node_gb']:.4g}, {row['network_gb']:.4g}" if "node_gb" in row else ""
        what = f"{row['what']}, rank {row['rank']}"
        table.append(f"| {what} | {row['planned_gb']:.4g} | {row['rehearsed_gb']:.4g} | {row['ratio']:.3f} | {links} |")
    return table


def main() -> None:
    print("| layout, figure | planned, GB | rehearsed, GB | ratio | in the node, between nodes, GB |")
    print("|---|---:|---:|---:|---|")
    for name in sys.argv[1:] or CASES:
        try:
            print("\n".join(lines(name)), flush=True)
        except ValidationError as error:
            print(f"| {CASES[name].source} | refused: {error.errors()[0]['msg']} | | | |", flush=True)


if __name__ == "__main__":
    main()
