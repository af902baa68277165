"""The page of a plan: its figures, curves, memory by part, and sliders that compute in the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from evaluation.pages.charts import Bar, Line, bar_chart, line_chart
from evaluation.pages.parts import Figure, KeyFigure, Opening, Section, Table, render_page
from evaluation.pages.planning import dollars, hours, rows, span, title, verdict_title
from evaluation.pages.words import compact, size

_SLIDERS = (
    # key, label, least, most (powers of ten)
    ("parameters", "parameters", 6, 12.3),
    ("tokens", "tokens", 7, 13.5),
    ("gpus", "devices", 0, 4.5),
    ("mfu", "share of the peak (MFU)", -2, -0.1),
    ("price", "USD per device-hour", -1, 1.3),
)
_COLUMNS = "minmax(0,9em) minmax(0,1fr) 4.5em"
_SCRIPT = """
(function () {
  const given = JSON.parse(document.getElementById('plan-data').textContent);
  const box = document.getElementById('plan-sliders');
  const said = {
    parameters: v => short(v), tokens: v => short(v), gpus: v => Math.round(v).toLocaleString('en'),
    mfu: v => (100 * v).toFixed(1) + ' %', price: v => v.toFixed(2),
  };
  function short(v) {
    const units = [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']];
    for (const [size, unit] of units) if (v >= size) return (v / size).toPrecision(3) + unit;
    return v.toPrecision(3);
  }
  function span(h) {
    if (3600 * h < 1) return 'under 1 s';
    if (60 * h < 1) return (3600 * h).toFixed(0) + ' s';
    if (h < 1) return (60 * h).toFixed(0) + ' min';
    return h < 48 ? h.toFixed(1) + ' h' : (h / 24).toFixed(1) + ' days';
  }
  function value(key) {
    const v = Math.pow(10, parseFloat(box.querySelector('[name=' + key + ']').value));
    return key === 'gpus' ? Math.max(1, Math.round(v)) : v;
  }
  function update() {
    const v = {};
    for (const input of box.querySelectorAll('input')) {
      v[input.name] = value(input.name);
      input.nextElementSibling.textContent = said[input.name](v[input.name]);
    }
    const flops = v.parameters * v.tokens * given.flops_per_parameter_and_token;
    const hours = flops / (v.gpus * given.peak * v.mfu) / 3600;
    const loss = given.law.length ? given.law[0] + given.law[1] / Math.pow(v.parameters * given.passed, given.law[3])
      + given.law[2] / Math.pow(v.tokens, given.law[4]) : NaN;
    const cost = hours * v.gpus * v.price;
    const bytes = given.state_gb * v.parameters / given.parameters + given.other_gb;
    const out = {
      compute: flops.toExponential(2) + ' FLOPs', time: span(hours),
      cost: cost < 0.01 ? 'under 0.01 USD'
        : (cost < 100 ? cost.toFixed(2) : Math.round(cost).toLocaleString('en')) + ' USD',
      energy: short(hours * v.gpus * given.kw) + ' kWh',
      carbon: short(hours * v.gpus * given.kw * given.carbon) + ' kg CO2',
      loss: !given.law.length ? 'the law has none' : loss > given.guessing ? 'none: the law does not hold for so little'
        : loss.toFixed(3) + ' nats per token',
      memory: (bytes < 1 ? (1000 * bytes).toFixed(1) + ' MB' : bytes.toFixed(1) + ' GB')
        + ' per device, in the layout of the plan',
    };
    for (const key in out) document.getElementById('plan-' + key).textContent = out[key];
  }
  box.addEventListener('input', update);
  update();
})();
"""


def planning_page(plan: Mapping[str, Any], curves: Mapping[str, Any]) -> str:
    """Return a self-contained page.

    Args:
        plan: the document of `stemma plan --json`.
        curves: from training/planner/laws/curves.py.
    """
    table_rows = [(label, value, span) for label, value, span in rows(plan)]
    sections = [
        Section(
            "plan",
            "The plan",
            "",
            _figures(plan, curves),
            [Table("Figures", ["", "plan", "range"], table_rows)],
        ),
        Section("what-if", "Other sizes, devices and prices", figures=[_sliders(plan, curves)]),
        Section(
            "verdict",
            verdict_title(plan),
            " ".join(f"{reason[0].upper()}{reason[1:]}." for reason in plan["verdict"]["because"]),
        ),
        Section(
            "layouts",
            "Other layouts",
            tables=[
                Table(
                    "Why they were not chosen",
                    ["layout", "time per step", "why"],
                    [
                        [alternative["layout"], f"{alternative['step_s']:.3g} s", alternative["why"]]
                        for alternative in plan["others"]
                    ],
                    numeric=(1,),
                )
            ]
            if plan["others"]
            else (),
        ),
        Section(
            "assumptions",
            "What this rests on",
            tables=[Table("Assumptions", ["about", "assumption"], [_assumption(text) for text in plan["assumptions"]])],
        ),
    ]
    facts = [("model", plan["model"]), ("devices", f"{plan['gpus']} {plan['gpu']}"), ("kernels", plan["kernels"])]
    head = Opening([title(plan)], key_figures=_key_figures(plan))
    return render_page(
        f"Plan: {plan['model']}",
        "training plan",
        facts,
        sections,
        opening=head,
        script=_SCRIPT,
        footer="Made by Stemma.",
    )


def _assumption(text: str) -> tuple[str, str]:
    about, colon, assumption = text.partition(": ")
    return (about, assumption) if colon else ("", text)


def _key_figures(plan: Mapping[str, Any]) -> list[KeyFigure]:
    memory, available = plan["memory_gb_per_gpu"], plan["memory_gb_of_device"]
    cost = span(dollars(plan["cost_usd_low"]), dollars(plan["cost_usd_high"]))
    figures = [
        KeyFigure(hours(plan["hours"]), "time", span(hours(plan["hours_low"]), hours(plan["hours_high"]))),
        KeyFigure(dollars(plan["cost_usd"]), "cost", cost),
        KeyFigure(size(memory * 1e9), "memory per device", f"of {size(available * 1e9)}"),
    ]
    if plan["loss"]:
        figures.append(KeyFigure(f"{plan['loss']:.2f}", "loss, nats per token", "by the scaling law"))
    return figures


def _figures(plan: Mapping[str, Any], curves: Mapping[str, Any]) -> list[Figure]:
    drawn = []
    devices = curves["devices"]
    chart = line_chart(
        "cost over devices",
        [Line("cost", [(math.log2(point["gpus"]), point["cost_usd"]) for point in devices], "train")],
        x_label="devices",
        y_label="USD",
        x_format=lambda power: compact(round(2**power)),
        from_zero=True,
    )
    if chart:
        ends = ", ".join(f"{hours(point['hours'])} on {point['gpus']}" for point in (devices[0], devices[-1]))
        weak = "Prices are taken as the same for any number; failures are not counted."
        drawn.append(Figure("Cost against devices", chart, f"Same model and tokens: {ends}.", weak))
    losses = [(flops, loss) for flops, loss in curves["loss"] if loss < math.log(plan["vocabulary"])]
    chart = line_chart(
        "loss over compute",
        [Line("best size and length", [(math.log10(flops), loss) for flops, loss in losses], "train")],
        x_label="FLOPs",
        y_label="loss (nats per token)",
        x_format=lambda power: f"1e{power:g}",
    )
    if chart:
        caption = f"This plan spends {plan['flops']:.1e} FLOPs.".replace("e+", "e")
        if plan["loss"]:
            caption += f" At its own size and length the law gives {plan['loss']:.3f}."
        drawn.append(
            Figure("Loss against compute", chart, caption, "Of the text that the law was fitted on, not of yours.")
        )
    parts = {name: value for name, value in plan["memory_parts_gb"].items() if value > plan["memory_gb_per_gpu"] / 200}
    chart = bar_chart(
        "memory by part",
        [(name, [Bar(value)]) for name, value in parts.items()],
        value_format=lambda value: size(value * 1e9),
    )
    drawn.append(
        Figure(
            "Memory by part",
            chart,
            f"{size(plan['memory_gb_per_gpu'] * 1e9)} at the fullest moment of a step.",
            "Counted, not measured on the device.",
        )
    )
    return drawn


def _sliders(plan: Mapping[str, Any], curves: Mapping[str, Any]) -> Figure:
    begin = {
        "parameters": plan["parameters"],
        "tokens": plan["tokens"],
        "gpus": plan["gpus"],
        "mfu": plan["mfu"],
        "price": plan["cost_usd"] / (plan["hours"] * plan["gpus"]),
    }
    state_gb = sum(plan["memory_parts_gb"].get(part, 0.0) for part in ("weights", "gradients", "optimizer"))
    data = {
        "flops_per_parameter_and_token": plan["flops"] / plan["parameters"] / plan["tokens"],
        "peak": plan["tokens_per_s"] * plan["flops"] / plan["tokens"] / (plan["gpus"] * plan["mfu"]),
        "kw": plan["energy_kwh"] / (plan["hours"] * plan["gpus"]),
        "carbon": plan["carbon_kg"] / plan["energy_kwh"],
        "law": curves["law"],
        "guessing": math.log(plan["vocabulary"]),
        "parameters": plan["parameters"],
        "state_gb": state_gb,
        "other_gb": plan["memory_gb_per_gpu"] - state_gb,
        "passed": plan["parameters_of_a_token"] / plan["parameters"],
    }
    inputs = [
        f'<label style="display:grid;grid-template-columns:{_COLUMNS};gap:12px;align-items:center">{label}'
        f'<input type="range" style="min-width:0" name="{key}" step="any" '
        f'min="{min(least, math.log10(begin[key])):.9f}" max="{max(most, math.log10(begin[key])):.9f}" '
        f'value="{math.log10(begin[key]):.9f}"><output></output></label>'
        for key, label, least, most in _SLIDERS
    ]
    outputs = [
        f'<tr><th style="text-align:left">{key}</th><td id="plan-{key}"></td></tr>'
        for key in ("compute", "time", "cost", "energy", "carbon", "loss", "memory")
    ]
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    html = (
        f'<div id="plan-sliders">{"".join(inputs)}</div><table>{"".join(outputs)}</table>'
        f'<script type="application/json" id="plan-data">{text}</script>'
    )
    caption = "Move the sliders: all figures are computed in this page, by the formulas of docs/planning/index.md."
    weak = "MFU does not follow the other sliders: take it from a plan of that size."
    return Figure("What if", Markup(html), caption, weak, wide=True)
