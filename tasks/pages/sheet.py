"""The sheet of one stage in the Prefect page: what came out of it, or what went wrong, in markdown."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corpus.validation.page import grouped
from evaluation.pages.charts import Level, Line, Point, data_uri, line_chart
from evaluation.pages.parts import loss_lines
from evaluation.pages.words import compact, seconds
from infra.errors import StemmaError
from infra.io.json import parse_own_json, read_own_json
from infra.process.tail import tail
from infra.store.manifest import Manifest, store_root
from infra.store.measurements import newest_measurement

Curves = dict[str, list[Point]]

PICTURE_WIDTH, PICTURE_HEIGHT = 420, 230
OF_PAIRS = ("reward_model", "preference_tuning")
"""Stages whose loss is a mean over pairs."""


@dataclass(frozen=True)
class Chart:
    """One picture: its metrics with their labels. The first metric is drawn as noisy training figures with their moving
    mean; `levels` are figures of the result that serve as baselines. y_label: by stage, "" for all others."""

    title: str
    metrics: Mapping[str, str]
    y_label: Mapping[str, str]
    noisy: bool = False
    from_zero: bool = False
    levels: Mapping[str, str] = field(default_factory=dict)


CHARTS = (
    Chart(
        "Reward",
        {"rlhf/reward": "answers sampled in training"},
        {"": "reward of an answer"},
        levels={"heldout_reward_sft": "SFT, held out"},
    ),
    Chart(
        "Judge",
        {"rlhf/judge": "answers sampled in training"},
        {"": "score of an answer by the judge, which trains nothing"},
        levels={"heldout_judge_sft": "SFT, held out"},
    ),
    Chart(
        "Margin",
        {"preference/margin": "training", "validation/sample_margin": "held-out sample"},
        {"": "nats by which the chosen answer rose more"},
        noisy=True,
    ),
    Chart("KL", {"rlhf/kl": "KL"}, {"": "nats per answer, from the SFT model"}, from_zero=True),
    Chart(
        "Loss",
        {"train/loss": "training", "validation/sample_loss": "held-out sample"},
        {"": "nats per token", **dict.fromkeys(OF_PAIRS, "nats per pair"), "rlhf": "of policy and value"},
        noisy=True,
        levels={"unigram_loss": "unigrams", "bigram_loss": "bigrams", "heldout_loss_base": "before tuning"},
    ),
    Chart("Learning rate", {"train/lr": "learning rate"}, {"": "learning rate"}, from_zero=True),
    Chart("Gradient norm", {"train/grad_norm": "norm"}, {"": "before clipping"}, noisy=True, from_zero=True),
)
GUESSING = Level("guessing", math.log(2))
"""The loss of an untrained reward model, in nats per pair."""


def read_curves(lines: Iterable[str]) -> Curves:
    """Metric name → (step, value) points, from JSON lines {"step", "values"}; lines without a step are left out, and
    values that are not finite, such as the gradient norm of a batch whose loss scale was too high."""
    curves: Curves = defaultdict(list)
    for text in lines:
        line = parse_own_json(text)
        if line.get("step") is None:
            continue
        for name, value in line["values"].items():
            if math.isfinite(float(value)):
                curves[name].append((float(line["step"]), float(value)))
    return dict(curves)


def curves_of(artifact: Path) -> Curves:
    """The curves of a finished artifact; none for a stage that wrote no metrics."""
    path = artifact / "aux" / "metrics.jsonl"
    if not path.exists():
        return {}
    with path.open(encoding="utf8") as lines:
        return read_curves(lines)


def drawings(stage: str, curves: Curves, figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (title, picture as a data URI) of each chart that has points."""
    made = []
    for chart in CHARTS:
        lines: list[Line] = []
        legend: list[tuple[str, str]] = []
        for index, (name, label) in enumerate(chart.metrics.items()):
            style, points = "train" if index == 0 else "validation", curves.get(name, [])
            noisy = chart.noisy and index == 0
            lines += loss_lines(points) if noisy else [Line(label, points, style)]
            if points:
                legend += [(f"{label}, each batch", f"{style} faint"), (f"{label}, smoothed", style)] if noisy else []
                legend += [] if noisy else [(label, style)]
        levels = [Level(label, figures[name]) for name, label in chart.levels.items() if name in figures]
        levels += [GUESSING] if stage == "reward_model" and chart.title == "Loss" else []
        svg = line_chart(
            f"{chart.title} of {stage}",
            lines,
            x_label="batch",
            y_label=chart.y_label.get(stage, chart.y_label[""]),
            levels=levels,
            width=PICTURE_WIDTH,
            height=PICTURE_HEIGHT,
            from_zero=chart.from_zero,
        )
        if svg:
            made.append((chart.title, data_uri(svg, legend if len(legend) > 1 or levels else ())))
    return made


LOG_LINES = 15
BOUNDS = ("_low", "_high")


def built_sheet(manifest: Manifest, folder: Path, mlflow_url: str | None, links: Mapping[str, str]) -> str:
    """The sheet of a finished stage in the page: headline, pictures, its verdict or results, figures, its location.

    Args:
        links: file → its page in MLflow.
    """
    result = manifest.result
    parts = [f"# {manifest.step or manifest.stage}", f"**{result['headline']}**" if result["headline"] else ""]
    measured = newest_measurement(store_root(folder), manifest)
    figures = {**result["figures"], **(measured[1].result["figures"] if measured else {})}
    pictures = drawings(manifest.stage, curves_of(folder), figures)
    parts += [f"### {title}\n\n![{title}]({picture})" for title, picture in pictures]
    parts += [section(folder) for section in _SECTIONS]
    parts.append(_to_open(links))
    parts.append(_figures(result["figures"]))
    parts.append(_facts(manifest, folder, mlflow_url))
    return "\n\n".join(filter(None, parts)) + "\n"


def failed_sheet(stage: str, error: StemmaError, log: Path | None, links: Mapping[str, str]) -> str:
    """The sheet of a failed stage: what failed, where, what to do, and the last lines of the log.

    Args:
        links: file → its page in MLflow.
    """
    rows = [(problem.code, problem.path, problem.message, problem.fix) for problem in error.problems]
    parts = [f"# {stage} failed", _table(("code", "where", "what", "what to do"), rows)]
    if links:
        parts.append(_to_open(links))
    if log and (log_lines := tail(log, LOG_LINES)):
        parts.append("### The end of its log\n\n" + _as_it_is("\n".join(log_lines)))
    parts.append(f"All of it: `stemma logs {stage}`")
    return "\n\n".join(parts) + "\n"


def _validation(folder: Path) -> str:
    verdict = _json(folder / "verdict.json")
    if not verdict:
        return ""
    rows = [
        ("holds" if item["success"] else "**fails**", item["sentence"], grouped(item["observed"]))
        for item in verdict["expectations"]
    ]
    page = folder / "aux" / "validation.html"
    message = f"The page with the rows: `{page}`" if page.exists() else ""
    title = f"### {verdict['rows']:,} rows against the suite {verdict['suite']}"
    return "\n\n".join(filter(None, [title, _table(("", "expected", "found"), rows), message]))


def _gates(folder: Path) -> str:
    registration = _json(folder / "registration.json")
    if not registration:
        return ""
    gates = registration.get("gates", [])
    if not gates:
        return "### Gates\n\nNo gates are set: `register.gates` in the config sets what a model must reach."
    columns = tuple(gates[0])
    return "### Gates\n\n" + _table(columns, [[str(gate.get(name, "")) for name in columns] for gate in gates])


def _card(folder: Path) -> str:
    card = folder / "MODEL_CARD.md"
    if not card.exists():
        return ""
    text = card.read_text(encoding="utf8")
    shown = text.split("---\n", 2)[-1] if text.startswith("---\n") else text  # without the front matter
    return f"### Model card\n\n`{card}`\n\n{shown.strip()}"


def _report(folder: Path) -> str:
    report = folder / "report.html"
    return f"Report, to open in a browser: `{report}`" if report.exists() else ""


_SECTIONS: tuple[Callable[[Path], str], ...] = (_validation, _gates, _report, _card)


def _to_open(links: Mapping[str, str]) -> str:
    return "\n".join(["### To open", "", *(f"- [{name}]({url})" for name, url in links.items())]) if links else ""


def _figures(figures: Mapping[str, float]) -> str:
    """Figures with their intervals in one row each."""
    rows = []
    for name, value in figures.items():
        if name.endswith(BOUNDS) and name.rsplit("_", 1)[0] in figures:
            continue
        low, high = (figures.get(name + bound) for bound in BOUNDS)
        between = f"{_number(low)} to {_number(high)}" if low is not None and high is not None else ""
        rows.append((name, _number(value), between))
    return "### Figures\n\n" + _table(("figure", "value", "95 % interval"), rows) if rows else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e6 else compact(value)


def _facts(manifest: Manifest, folder: Path, mlflow_url: str | None) -> str:
    rows = [
        ("artifact", f"`{folder}`"),
        ("digest", f"`{manifest.digest[:16]}`"),
        ("built in", seconds(manifest.seconds)),
        ("on", f"{manifest.host}, {manifest.device or 'cpu'}"),
        (
            "code",
            f"`{str(manifest.code.get('commit') or 'unknown')[:12]}`"
            + (" (changed)" if manifest.code["dirty"] else ""),
        ),
    ]
    if mlflow_url:
        rows.append(("MLflow", f"[metrics and lineage]({mlflow_url})"))
    return "### Where it is\n\n" + _table(("", ""), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(text) for text in row) + " |" for row in rows]
    return "\n".join(lines)


def _as_it_is(text: str) -> str:
    """Text in a fence with more backticks than any run in the text, so that the text cannot close it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}\n{fence}"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = read_own_json(path)
    return content if isinstance(content, dict) else {}
