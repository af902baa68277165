"""Figures in print, and what the plan makes of each: the table of docs/planning/accuracy.md.

python -m training.planner.published    writes the table into docs/planning/accuracy.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from training.config.presets import MIXTURES
from training.core.devices import DEVICES, Device
from training.planner.architecture import Architecture, of_preset
from training.planner.failures import DEVICE_HOURS
from training.planner.hardware.kernels import KERNELS
from training.planner.hardware.network import network_of
from training.planner.laws.scaling_laws import LAWS
from training.planner.plan import HOST, PUE, plan, request
from training.planner.step_time import RankLayout, Training, step_time

ALLOWED = 0.15
"""Tolerance of a planned figure."""
BEGIN, END = "<!-- the table of print: python -m training.planner.published -->", "<!-- end of the table -->"
_T = 2048


_NEOX = (
    "the plan's kernels are Megatron-LM's; GPT-NeoX ran DeepSpeed's pipeline, and rotary positions and attention in "
    "operations that were not fused, which is probably the reason"
)
_MT_NLG = (
    "the plan has Megatron-LM's pipeline; this training ran DeepSpeed's, and the difference grows as each stage has "
    "fewer microbatches, so that its schedule is probably the reason"
)
_TITAN = (
    "its H100 are limited to 500 W instead of 700, by its own page, which states that more power would speed it up and "
    "that their peak is not known; the plan has their slower memory, and the peak of the SXM5"
)
_DEEPEP = (
    "its DeepEP sends a token to a device once, however many of the experts there it chose, where the plan sends it "
    "for each, as training here does; with 5.25 of 8, which even choices amount to, the plan would be 12 % below"
)


@dataclass(frozen=True)
class PublishedTraining:
    """A published figure and the planned one.

    fitted: True if constants of training/planner were chosen to match this figure. miss: the reason if the error is
    larger than ALLOWED."""

    source: str
    what: str
    published: float
    planned: float
    fitted: bool = False
    miss: str = ""

    @property
    def off(self) -> float:
        return self.planned / self.published - 1


def rows() -> list[PublishedTraining]:
    return [*_mosaic(), *_foundry(), *_megatron(), *_large(), *_mixtures(), *_scaling(), *_others()]


def _gpt(layers: int, width: int, heads: int, vocabulary: int = 51_200) -> Architecture:
    return Architecture("gpt", layers, width, heads, heads, width // heads, 4 * width, vocabulary, learned_positions=_T)


def _run(
    arch: Architecture,
    device: str | Device,
    kernels: str,
    at: RankLayout,
    batch: int,
    length: int = _T,
    gbit: float | None = None,
) -> tuple[float, float]:
    """Return (MFU, seconds per step)."""
    hardware = DEVICES[device] if isinstance(device, str) else device
    job = Training(arch, hardware, KERNELS[kernels], network_of(hardware, gbit), length, batch, "bf16", half_sent=True)
    seconds = step_time(job, at).total
    return arch.flops_per_token(length) * batch * length / seconds / at.devices / job.peak, seconds


def _mosaic() -> Iterator[PublishedTraining]:
    source = "MosaicML, Mosaic LLMs (Part 1), A100 40 GB"

    def hours(preset: str, tokens: float, gpus: int) -> float:
        return float(plan(request(preset=preset, tokens=tokens, gpu="a100-40", gpus=gpus))["hours"])

    few, many = hours("gpt-1.3b", 1e9, 8), hours("gpt-1.3b", 1e9, 128)
    yield PublishedTraining(source, "1.3B, 1B tokens, 8 GPUs: hours", 7.1, few, fitted=True)
    yield PublishedTraining(source, "the same on 128: hours", 0.5, many)
    yield PublishedTraining(source, "faster on 16 times as many GPUs: times", 14.4, few / many)
    yield PublishedTraining(source, "faster on 32 than on 8: times", 3.9, few / hours("gpt-1.3b", 1e9, 32))
    yield PublishedTraining(source, "1.3B, 20B tokens, 8 GPUs: days", 6, hours("gpt-1.3b", 20e9, 8) / 24)
    yield PublishedTraining(source, "the same on 32: days", 1.5, hours("gpt-1.3b", 20e9, 32) / 24)
    yield PublishedTraining(source, "the same on 128: hours", 10, hours("gpt-1.3b", 20e9, 128))
    low, high = (hours("gpt-1.3b", 20e9, 8) * 8 * price for price in DEVICES["a100-40"].price)
    yield PublishedTraining(source, "its cost, the lowest rent: USD", 1400, low, fitted=True)
    yield PublishedTraining(source, "its cost, the highest rent: USD", 4600, high)
    yield PublishedTraining(
        source, "time of 1.3B over that of 125M (10 times the size): times", 5, few / hours("gpt-125m", 1e9, 8)
    )
    at = RankLayout(dp=8, microbatch=4)
    kept, again = (
        _run(of_preset("gpt-1.3b"), "a100-80", "plain", RankLayout(**{**vars(at), "recompute": how}), 512)[1]
        for how in ("none", "full")
    )
    yield PublishedTraining(source, "time with activations computed again over without: times", 1.33, again / kept)


_FOUNDRY = {
    "125M": (12, 768, 12), "350M": (24, 1024, 16), "760M": (24, 1536, 12), "1B": (24, 2048, 16), "3B": (32, 2560, 20),
    "7B": (32, 4096, 32), "13B": (40, 5120, 40), "30B": (48, 7168, 56), "70B": (80, 8192, 64),
}  # fmt: skip


def _foundry() -> Iterator[PublishedTraining]:
    """Model, device, GPUs, sequences at once and of a batch, whether activations are computed again, MFU in percent."""
    for name, device, gpus, at_once, batch, again, mfu, fitted, miss in (
        ("125M", "a100-80", 8, 32, 512, False, 44.45, True, ""),
        ("350M", "a100-80", 8, 32, 512, False, 51.62, False, ""),
        ("760M", "a100-80", 8, 24, 384, False, 56.85, False, ""),
        ("1B", "a100-80", 8, 14, 448, False, 59.86, True, ""),
        ("3B", "a100-80", 8, 10, 160, False, 62.11, False, ""),
        ("7B", "a100-80", 8, 6, 96, False, 64.23, True, ""),
        ("13B", "a100-80", 8, 2, 48, False, 59.57, False, ""),
        ("30B", "a100-80", 8, 3, 504, True, 55.3, False, ""),
        ("70B", "a100-80", 64, 8, 2048, True, 53.33, False, ""),
        ("1B", "a100-40", 8, 8, 512, False, 56.23, False, ""),
        ("1B", "a100-40", 128, 10, 1280, False, 54.41, False, ""),
        ("7B", "a100-40", 128, 18, 2304, True, 50.14, False, ""),
        ("760M", "h100", 8, 24, 384, False, 34.9, False, ""),
        ("1B", "h100", 8, 14, 112, False, 41.82, True, ""),
        ("1B", "h100", 64, 20, 1280, False, 40.85, False, ""),
        ("3B", "h100", 16, 10, 480, False, 43.73, False, ""),
        ("7B", "h100", 8, 6, 48, False, 46.44, True, ""),
        ("13B", "h100", 8, 2, 16, False, 39.79, False, ""),
        ("30B", "h100", 32, 14, 1344, True, 43.92, False, ""),
        ("70B", "h100", 64, 8, 2048, True, 42.57, False, ""),
    ):
        at = RankLayout(dp=gpus, microbatch=at_once, recompute="full" if again else "none", sharding="zero3")
        gbit = 1600 if device != "h100" else None
        planned = 100 * _run(_gpt(*_FOUNDRY[name], 50_368), device, "flash", at, batch, gbit=gbit)[0]
        what = f"{name}, {gpus} × {device}{', recompute' * again}: MFU, %"
        yield PublishedTraining("llm-foundry, training benchmarks", what, mfu, planned, fitted, miss)


def _megatron() -> Iterator[PublishedTraining]:
    source = "Narayanan et al. 2021, table 1, A100 80 GB, recompute"
    for size, layers, width, heads, tp, pp, gpus, batch, at_once, tflops in (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 16, 137),
        ("3.6B", 30, 3072, 32, 2, 1, 64, 512, 8, 138),
        ("7.5B", 36, 4096, 32, 4, 1, 128, 512, 4, 142),
        ("18.4B", 40, 6144, 48, 8, 1, 256, 1024, 4, 135),
        ("39.1B", 48, 8192, 64, 8, 2, 512, 1536, 2, 138),
        ("76.1B", 60, 10240, 80, 8, 4, 1024, 1792, 2, 140),
        ("145.6B", 80, 12288, 96, 8, 8, 1536, 2304, 1, 148),
        ("310.1B", 96, 16384, 128, 8, 16, 1920, 2160, 1, 155),
        ("529.6B", 105, 20480, 128, 8, 35, 2520, 2520, 1, 163),
        ("1008B", 128, 25600, 160, 8, 64, 3072, 3072, 1, 163),
    ):
        at = RankLayout(
            gpus // tp // pp, tp, pp, microbatch=at_once, recompute="full", sequence_parallel=False,
            interleave=2 if pp > 1 else 1,
        )  # fmt: skip
        seconds = _run(_gpt(layers, width, heads), "a100-80", "megatron", at, batch)[1]
        # Their equation 3, which counts what is computed again.
        flops = 96 * batch * _T * layers * width**2 * (1 + _T / (6 * width) + 51_200 / (16 * layers * width))
        what = f"{size}, {gpus} GPUs: TFLOP/s per GPU"
        yield PublishedTraining(source, what, tflops, flops / seconds / gpus / 1e12, size in ("1.7B", "145.6B"))
    source = "Korthikanti et al. 2022, table 5, A100 80 GB"
    for size, layers, width, heads, pp, batch, pieces, full, selective in (
        ("22B", 48, 6144, 64, 1, 4, 1, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 64, 3, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 280, 3, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 512, 1, 94.42, 71.49),
    ):
        at_once = 4 if pp == 1 else 1
        for how, seconds in (("full", full), ("selective", selective)):
            at = RankLayout(
                1, 8, pp, microbatch=at_once, recompute=how, sequence_parallel=how == "selective", interleave=pieces  # type: ignore[arg-type]
            )  # fmt: skip
            planned = _run(_gpt(layers, width, heads), "a100-80", "megatron", at, batch)[1]
            yield PublishedTraining(
                source, f"{size}, {8 * pp} GPUs, {how} recompute: seconds per step", seconds, planned
            )


def _large() -> Iterator[PublishedTraining]:
    gpt3 = of_preset("gpt-175b")
    # Such a model does not fit one V100: the printed figure is the computing alone, as that of one of a group of eight.
    mfu, _ = _run(
        gpt3, "v100", "megatron", RankLayout(tp=8, microbatch=4, recompute="full", sequence_parallel=False), 4
    )
    years = gpt3.flops_per_token(_T) * 300e9 / (mfu * 125e12) / (365.25 * 86_400)
    yield PublishedTraining(
        "Narayanan et al. 2021, section 1", "GPT-3 175B, 300B tokens: years on one V100", 288, years
    )
    # TFLOP/s of hardware: what is computed again counts, a third more.
    at = RankLayout(124, 8, microbatch=8, recompute="full", sharding="zero3", sequence_parallel=False)
    mfu, _ = _run(_gpt(96, 12288, 96, 50_272), "a100-80", "megatron", at, 1024)
    yield PublishedTraining(
        "Zhang et al. 2022 (OPT), section 2.4", "OPT-175B, 992 A100 80 GB: TFLOP/s per GPU", 147, mfu * 312 * 4 / 3
    )
    at = RankLayout(12, 2, 4, microbatch=4, recompute="full", sharding="zero1", sequence_parallel=False)
    neox = _gpt(44, 6144, 64, 50_432)
    mfu, _ = _run(neox.with_size(tied=False, learned_positions=0), "a100-40", "megatron", at, 1538)
    source = "Black et al. 2022 (GPT-NeoX-20B), section 2.3"
    yield PublishedTraining(source, "20B, 96 A100 40 GB: TFLOP/s per GPU", 117, mfu * 312 * 4 / 3, miss=_NEOX)
    for nodes, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        at = RankLayout(nodes // 35, 8, 35, microbatch=1, recompute="full", sequence_parallel=False)
        planned = _run(_gpt(105, 20480, 128), "a100-80", "megatron", at, 1920)[1]
        source = "Smith et al. 2022 (MT-NLG 530B), section 2.4"
        yield PublishedTraining(
            source, f"530B, {nodes} nodes of 8 A100 80 GB: seconds per step", seconds, planned, miss=_MT_NLG
        )
    palm = Architecture("PaLM", 118, 18432, 48, 1, 256, 73728, 256_000, gated=True)
    yield PublishedTraining(
        "Chowdhery et al. 2022 (PaLM), table 1", "PaLM: parameters, billions", 540, palm.parameters / 1e9
    )
    mfu, _ = _run(
        palm, "tpu-v4", "compiled", RankLayout(512, 12, microbatch=4, recompute="full", sharding="zero3"), 2048
    )
    yield PublishedTraining("Chowdhery et al. 2022 (PaLM), table 3", "PaLM 540B, 6,144 TPU v4: MFU, %", 46.2, 100 * mfu)
    llama = Architecture("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128_256, gated=True, tied=False)
    for kernels, speed in (("flash", 5762), ("compiled", 6667)):
        # Table 1 there: two sequences per GPU, selective activation checkpointing; the memory of its H100 is HBM2e.
        h100 = replace(DEVICES["h100"], memory_gib=96, bandwidth=2.4e12)
        at = RankLayout(8, microbatch=2, recompute="selective", sharding="zero3")
        seconds = _run(llama, h100, kernels, at, 16, 8192)[1]
        what = f"Llama 3.1 8B, 8 H100, {kernels}: tokens/s per GPU"
        source = "torchtitan, benchmarks/llama3_h100_202412, table 1"
        yield PublishedTraining(source, what, speed, 2 * 8192 / seconds, miss=_TITAN)


def _mixtures() -> Iterator[PublishedTraining]:
    for name, mixture in MIXTURES.items():
        arch = of_preset(name)
        yield PublishedTraining(
            f"{name}, as released", "parameters, billions", mixture.parameters / 1e9, arch.parameters / 1e9
        )
        yield PublishedTraining(
            f"{name}, its report", "active per token, billions", mixture.active, arch.of_a_token / 1e9
        )
    # Both spread tokens evenly: Megatron Core by its balancing loss, NeMo AutoModel by a router that is made to.
    at = RankLayout(16, pp=4, ep=8, microbatch=1, sharding="zero1", interleave=8)
    mfu, _ = _run(of_preset("mixtral-8x7b"), "h100", "compiled", at, 256, 4096)
    source = "Megatron Core 0.8, its README on mixtures"
    yield PublishedTraining(source, "Mixtral 8x7B, 64 H100: TFLOP/s per GPU", 438, mfu * 989)
    at = RankLayout(8, ep=8, microbatch=4, recompute="full", sharding="zero3")
    _, seconds = _run(of_preset("qwen3-30b-a3b"), "h100", "compiled", at, 512, 4096)
    source, what = (
        "NeMo AutoModel, performance summary (October 2025)",
        "Qwen3 30B-A3B, 8 H100, recompute: tokens/s per GPU",
    )
    yield PublishedTraining(source, what, 12_040, 512 * 4096 / seconds / 8, miss=_DEEPEP)


def _scaling() -> Iterator[PublishedTraining]:
    gopher = 5.76e23
    source = "Hoffmann et al. 2022 (Chinchilla)"
    for law, flops, parameters, tokens, table in (
        ("chinchilla-1", 1.92e19, 0.4e9, 8.0e9, "3"),
        ("chinchilla-1", 1.23e22, 10e9, 205.1e9, "3"),
        ("chinchilla-1", 3.85e24, 175e9, 3.7e12, "3"),
        ("chinchilla-2", 1.32e22, 10e9, 219.5e9, "A3"),
        ("chinchilla-2", 4.54e24, 175e9, 4.3e12, "A3"),
        ("chinchilla-3", 2.46e22, 10e9, 410.1e9, "A3"),
        ("chinchilla-3", 1.26e25, 175e9, 12.0e12, "A3"),
    ):
        size, read = LAWS[law].optimum(flops)
        yield PublishedTraining(
            f"{source}, table {table}",
            f"{law} at {flops:.3g} FLOPs: parameters, billions",
            parameters / 1e9,
            size / 1e9,
        )
        yield PublishedTraining(
            f"{source}, table {table}", f"{law} at {flops:.3g} FLOPs: tokens, billions", tokens / 1e9, read / 1e9
        )
    later = LAWS["besiroglu"]
    size, read = later.optimum(gopher)
    yield PublishedTraining(source, "Gopher's compute, besiroglu: Gopher's size over best: times", 4, 280e9 / size)
    yield PublishedTraining(source, "Gopher's compute, besiroglu: best tokens over its: times", 4.6, read / 300e9)
    for more, printed in ((10, 3.1), (100, 10.0)):
        bigger, longer = later.optimum(more * gopher)
        yield PublishedTraining(source, f"{more} times the compute, besiroglu: larger, times", printed, bigger / size)
        yield PublishedTraining(
            source, f"{more} times the compute, besiroglu: more tokens, times", printed, longer / read
        )
    source = "Besiroglu et al. 2024"
    yield PublishedTraining(source, "tokens per parameter at Chinchilla's compute", 20, read / size)


def _others() -> Iterator[PublishedTraining]:
    megawatt_hours = 14.8 * 24 * 10_000 * DEVICES["v100"].power_w * HOST[1] * PUE[1] / 1e6
    source = "Patterson et al. 2021, table 4"
    yield PublishedTraining(source, "GPT-3: 10,000 V100 for 14.8 days: MWh", 1287, megawatt_hours, fitted=True)
    source = "Lecture on OPT (Perrotta)"
    yield PublishedTraining(
        source, "992 A100 80 GB to buy: million USD", 14.88, 992 * DEVICES["a100-80"].bought / 1e6, fitted=True
    )
    yield PublishedTraining(source, "one of them: power, W", 400, DEVICES["a100-80"].power_w, fitted=True)
    for source, what, printed, hours in (
        ("Zhang et al. 2022 (OPT), section 2.4", "992 A100 in two months: restarts by hand", 35, 992 * 60 * 24),
        ("Llama 3, section 3.3.4", "16,384 H100 in 54 days: failures", 419, 16_384 * 54 * 24),
    ):
        yield PublishedTraining(source, what, printed, hours / DEVICE_HOURS, fitted=True)


def table() -> str:
    """The rows in Markdown."""
    lines = ["| in print | figure | published | planned | off by |", "|---|---|---:|---:|---:|"]
    for row in rows():
        star = " \\*" if row.fitted else ""
        lines.append(f"| {row.source} | {row.what}{star} | {row.published:.4g} | {row.planned:.4g} | {row.off:+.0%} |")
    missed = [f"- {row.what} ({row.off:+.0%}): {row.miss}" for row in rows() if abs(row.off) > ALLOWED]
    return "\n".join(
        [*lines, "", *(["Off by more than 15 %:", "", *missed] if missed else ["None is off by more than 15 %."])]
    )


def with_table(text: str) -> str:
    """Return a page with the current table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    page = Path(__file__).parents[2] / "docs" / "planning" / "accuracy.md"
    page.write_text(with_table(page.read_text(encoding="utf8")), encoding="utf8")
    sys.exit(0)
