"""A plan's figures in words, for the terminal and for its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evaluation.pages.words import compact, size


def title(plan: Mapping[str, Any]) -> str:
    parameters = f"{compact(plan['parameters'])} parameters"
    if plan["parameters_of_a_token"] < plan["parameters"]:
        parameters += f", of which a token passes {compact(plan['parameters_of_a_token'])}"
    return (
        f"{plan['model']}: {parameters}, {compact(plan['tokens'])} tokens "
        f"({plan['because']}), on {plan['gpus']} {plan['gpu']}"
    )


def rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, planned value, its range) of each figure."""
    layout = plan["layout"]
    degrees = " × ".join(f"{name} {layout[name]}" for name in ("dp", "tp", "pp", "cp", "ep") if layout[name] > 1)
    together = f"{layout['microbatch']} sequence{'s' * (layout['microbatch'] > 1)} at once"
    kept = {"none": "all activations kept", "selective": "some activations computed again"}
    recompute = kept.get(layout["recompute"], "activations computed again")
    shape = ", ".join([degrees or "one device", *([layout["sharding"]] if degrees else []), together, recompute])
    power, carbon = (
        [least(plan[f"{key}{end}"]) for end in ("", "_low", "_high")] for key in ("energy_kwh", "carbon_kg")
    )
    halts = plan["failures"]
    checkpoint = f"every {hours(halts['checkpoint_every_s'] / 3600)}, {halts['checkpoint_every_batches']:,} batches"
    if halts["checkpoint_every_batches"] >= plan["batches"]:
        checkpoint = "at the end: failures are too rare for more"
    laws = [
        (name, f"{compact(best['parameters'])} parameters, {compact(best['tokens'])} tokens")
        for name, best in plan["optimal"].items()
    ]
    memory, fullest = plan["memory_gb_per_gpu"], plan["memory_gb_per_gpu_high"]
    needs_and_has = f"needs {size(memory * 1e9)}, has {size(plan['memory_gb_of_device'] * 1e9)}"
    rent = f"as much as {hours(plan['rent_as_dear_as_buying_hours'])} of rent"
    return [
        ("time", hours(plan["hours"]), span(hours(plan["hours_low"]), hours(plan["hours_high"]))),
        ("cost", dollars(plan["cost_usd"]), span(dollars(plan["cost_usd_low"]), dollars(plan["cost_usd_high"]))),
        ("to buy them instead", dollars(plan["cost_to_buy_usd"]), rent),
        *([("loss", f"{plan['loss']:.3f} nats per token", "by the scaling law")] if plan["loss"] else []),
        ("energy", f"{power[0]} kWh", f"{span(power[1], power[2])} kWh"),
        ("carbon", f"{carbon[0]} kg CO2", f"{span(carbon[1], carbon[2])} kg"),
        ("compute", f"{plan['flops']:.3g} FLOPs", ""),
        ("speed", f"{compact(plan['tokens_per_s'])} tokens/s, {plan['mfu']:.1%} of the peak (MFU)", ""),
        ("memory per device", needs_and_has, f"needs up to {size(fullest * 1e9)}" if fullest > memory else ""),
        ("layout", shape, ""),
        *((f"best for this compute, by {name}", best, "") for name, best in laws),
        ("failures", f"{fewest(halts['expected'])} expected, one in {hours(halts['hours_between'])}", ""),
        ("checkpoint", checkpoint, ""),
    ]  # fmt: skip


def verdict_title(plan: Mapping[str, Any]) -> str:
    """Return the answer to whether to train at all, as a heading."""
    words = {
        "api": "No: call a model by its API",
        "tune": "No: tune an open model",
        "continue": "In part: continue the pretraining of an open model",
        "scratch": "Yes: from scratch",
        "unknown": "Unknown without --own-tokens",
    }
    return f"Train at all? {words[plan['verdict']['choice']]}"


def span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def fewest(count: float) -> str:
    return f"{count:.2g}" if count >= 0.001 else "fewer than 0.001"


def least(amount: float) -> str:
    return compact(amount) if amount >= 0.001 else "under 0.001"


def hours(value: float) -> str:
    if value < 1 / 3600:
        return "under 1 s"
    if value < 1 / 60:
        return f"{value * 3600:.0f} s"
    if value < 1:
        return f"{value * 60:.0f} min"
    return (
        f"{value:.1f} h"
        if value < 48
        else f"{value / 24:.1f} days"
        if value < 24 * 700
        else f"{value / 8766:,.1f} years"
    )


def dollars(value: float) -> str:
    if 0 < value < 0.01:
        return "under 0.01 USD"
    return f"{value:,.2f} USD" if value < 100 else f"{value:,.0f} USD" if value < 1e6 else f"{value / 1e6:,.2f}M USD"
