"""Curves around a plan: time and cost over devices, loss over compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from infra.errors import ConfigError
from training.planner.plan import PlanRequest, plan

_TIMES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


def curves(request: PlanRequest, document: dict[str, Any]) -> dict[str, Any]:
    """Return curves for the plan `document` of `request`: the same model and tokens on fewer and more devices, and the
    best loss at each compute by the chosen law.

    {"devices": [{"gpus", "hours", "cost_usd"}], "loss": [(FLOPs, nats)], "law": its parts}
    """
    rows = []
    for times in _TIMES:
        gpus = round(request.gpus * times)
        if gpus < 1 or gpus > 16_384 or (gpus == 1 and times < 1 and request.gpus > 8):
            continue
        same = replace(
            request, gpus=gpus, tokens=document["tokens"], budget=type(request.budget)(),
            parameters=None if request.preset or request.arch else document["parameters"],
            batch_tokens=document["batch_tokens"] if document["batch_tokens"] // request.length % gpus == 0 else None,
        )  # fmt: skip
        try:
            other = document if times == 1 else plan(same)
        except ConfigError:
            continue  # it does not fit so few
        rows.append({"gpus": gpus, "hours": other["hours"], "cost_usd": other["cost_usd"]})
    loss = []
    for power in range(-8, 9):
        flops = document["flops"] * 10 ** (power / 4)
        best = request.law.loss(*request.law.optimum(flops))
        if best is not None:
            loss.append((flops, best))
    return {"devices": rows, "loss": loss, "law": list(request.law.parts or ())}
