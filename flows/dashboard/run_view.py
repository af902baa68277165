"""One run as its page shows it: states of its steps, curves of what is being built, the log, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

from markupsafe import Markup

from evaluation.config import FIRST_SCREEN
from evaluation.pages.charts import Line, line_chart, smoothed
from evaluation.pages.pipeline import BoxState, Drawing, draw
from evaluation.pages.words import seconds
from flows.dashboard.curves import METRICS, Curves
from flows.runs.journal import PICTURE, RunJournal, latest
from flows.runs.ledger import RunLedger, read_ledger
from infra.errors import StemmaError
from infra.io.json import parse_own_json, read_own_json
from infra.ledger.builds import hours, parts, summary
from infra.process.tail import Tail, tail
from infra.run import messages_in
from infra.store.layout import AUX
from tasks.processes.supervisor import FORKED
from tasks.stages import STAGES

MOST_BYTES = 20_000_000
"""Size of the metrics of a finished training up to which its curves are read."""
LEDGER_S = 5.0
LOG_LINES, PRINTED_LINES, ANSWERS, SAMPLE_LINES = 60, 12, 3, 200
RETRY_PATIENCE_S = 120.0
"""Time within which a worker begins a run that is retried; Prefect may still end the attempt before it."""
SPEED, LEFT, MEMORY = "train/tokens_per_s", "train/time_left_s", "train/memory_gb"
CHARTS = (
    ("reward of sampled answers", "rlhf/reward", "round"),
    ("KL from the SFT model, nats per answer", "rlhf/kl", "round"),
    ("training loss, nats", "train/loss", "batch"),
)
"""Charts of a stage that is being built: title, metric, and the unit of its steps."""
UTILISATION = "GPU utilisation, %"
GPU_WORDS = {
    "utilisation_percent": "{:.0f} %",
    "memory_gb": "{:.1f} GB",
    "power_w": "{:.0f} W",
    "temperature_c": "{:.0f} °C",
}
GPU_STYLES = ("train", "validation", "base", "sft", "rlhf")
VALIDATION = "validation/sample_loss"
ENDED = ("built", "reused", "failed", "skipped", "cancelled")


@dataclass
class RunStep:
    """A step in a run. began: seconds since 1970 when it started to run; None before."""

    name: str
    status: str = "waiting"
    headline: str = ""
    took_s: float | None = None
    path: Path | None = None
    began: float | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    left_s: float | None = None

    @property
    def ratio(self) -> float | None:
        total = self.progress.get("total")
        return self.progress["done"] / total if self.status == "running" and total else None

    def words(self, waits_for: Sequence[str]) -> str:
        """Return its state for a box: how far it is, what it waits for, or the first line of why it failed."""
        match self.status:
            case "waiting":
                return f"waits for {waits_for[0]}" if waits_for else "waiting"
            case "running":
                percent = f"{self.ratio:.0%} · " if self.ratio is not None else ""
                since = time.time() - (self.began or time.time())
                return percent + (f"{seconds(self.left_s)} left" if self.left_s else f"for {seconds(since)}")
            case "built":
                return f"built · {seconds(self.took_s or 0.0)}"
            case "failed":
                return f"failed: {self.headline.splitlines()[0] if self.headline else 'see below'}"[:60]
            case other:
                return other


class RunView:
    """A run, followed from its journal. `follow` reads what is new; every property describes what was read by then."""

    def __init__(self, root: Path, run_id: str) -> None:
        self.root = root
        self.journal = RunJournal(root / "runs", run_id)
        self.begun = self.journal.start_record()
        self.steps: dict[str, RunStep] = {}
        self.log: list[dict[str, Any]] = []
        self.result: dict[str, Any] | None = None
        self.retried_at = -RETRY_PATIENCE_S
        self.awaits_end = False
        self._tail = Tail(self.journal.path)
        self._curves: dict[Path, Curves] = {}
        self._work: dict[str, Path] = {}
        self._corrections: dict[str, list[tuple[float, str]]] = {}
        self._ledger: RunLedger | None = None
        self._ledger_at, self._ledger_is_final = -LEDGER_S, False
        self._drawing = self._read_drawing()

    @property
    def status(self) -> str:
        """The status of the run: running, lost (its process is gone without a result), or the status it ended with."""
        if self.result is not None:
            return "retrying" if self.awaits_retry or self.awaits_end else str(self.result["status"])
        return "lost" if self.journal.has_died() else "running"

    @property
    def awaits_retry(self) -> bool:
        """True after a retry was accepted, until the run begins again or Prefect has let it wait for too long."""
        return time.monotonic() - self.retried_at < RETRY_PATIENCE_S

    @property
    def has_ended(self) -> bool:
        """True if nothing of it can change any more."""
        return self.result is not None and not self.awaits_retry and not self.awaits_end

    @property
    def seconds(self) -> float:
        if self.result is not None:
            return float(self.result.get("seconds") or 0.0)
        return time.time() - float(self.begun.get("time", time.time()))

    def follow(self) -> None:
        """Read what the run and its running stages have written since the last call."""
        for line in messages_in(self._tail.lines()):
            self._take(line)
        with suppress(StemmaError):  # a damaged result is reported by every command that needs it
            self.result = self.journal.result()
        for step in self.running():
            if journal := self._journal_of(step):
                curves = self._followed(journal)
                step.left_s = curves.newest(LEFT) or _time_left(step)
            else:
                step.left_s = _time_left(step)

    def running(self) -> list[RunStep]:
        return [step for step in self.steps.values() if step.status == "running" and self.status == "running"]

    def picture(self) -> Markup:
        """Return the pipeline as a drawing with the state of each box; empty for a run without one."""
        if self._drawing is None:
            return Markup("")
        sources: dict[str, list[str]] = {}
        for source, target in self._drawing.arrows:
            sources.setdefault(target, []).append(source)
        states = {}
        for box in self._drawing.boxes:
            members = [self.steps[name] for name in (box.name, *box.within) if name in self.steps]
            if not members:
                states[box.name] = BoxState("unselected", "not part of this run")
                continue
            # A box shows its own step, unless a validation or measurement of it runs or has failed.
            shown = next((step for step in members if step.status == "failed"), members[0])
            shown = next((step for step in members if step.status == "running"), shown)
            waits_for = [name for name in sources.get(box.name, ()) if self._is_open(name)]
            prefix = f"{shown.name}: " if shown is not members[0] else ""
            states[box.name] = BoxState(shown.status, prefix + shown.words(waits_for), shown.ratio)
        # draw() escapes what it is given.
        return Markup(draw(self._drawing, states))

    def ledger(self) -> RunLedger | None:
        """Return what the run cost so far, read again after LEDGER_S at the earliest; None if that is unknown."""
        now = time.monotonic()
        if now - self._ledger_at > LEDGER_S or (self.has_ended and not self._ledger_is_final):
            self._ledger_at = now
            with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged record hides nothing else
                self._ledger = read_ledger(self.root, self.journal.run_id)
            self._ledger_is_final = self.has_ended
        return self._ledger

    def cost(self) -> list[tuple[str, str]]:
        """Return what the run cost so far as (subject, value); empty if that is unknown."""
        ledger = self.ledger()
        return summary(ledger.account) if ledger and ledger.account.device_s else []

    def spent(self) -> list[tuple[str, str, str]]:
        """Return what the time of its devices was spent on: (kind and cause, device time, share)."""
        ledger = self.ledger()
        if ledger is None or not ledger.account.device_s:
            return []
        total_s = ledger.account.device_s
        return [
            (f"{kind} {cause}".strip(), hours(seconds), f"{seconds / total_s:.1%}")
            for kind, cause, seconds in parts(ledger.account)
        ]

    def figures(self) -> list[tuple[str, str]]:
        """Return the newest figures of the training that runs: its speed, memory, reward."""
        known: list[tuple[str, str]] = []
        for step in self.running():
            journal = self._journal_of(step)
            if journal is None:
                continue
            curves = self._followed(journal)
            named = (
                ("tokens/s", SPEED, lambda value: f"{value:,.0f}"),
                ("memory", MEMORY, lambda value: f"{value:.1f} GB"),
                ("reward", "rlhf/reward", lambda value: f"{value:.2f}"),
                ("KL", "rlhf/kl", lambda value: f"{value:.2f}"),
                ("loss", "train/loss", lambda value: f"{value:.3f}"),
            )
            known += [
                (f"{step.name}: {label}", words(value))
                for label, metric, words in named
                if (value := curves.newest(metric)) is not None
            ]
            known += [(f"{step.name}: GPU {number}", words) for number, words in _gpus(curves)]
        return known

    def charts(self, steps: tuple[float, float] = (-inf, inf)) -> list[tuple[str, Markup]]:
        """Return the curves of the trainings that run or were built, over those of the run before, as (title, SVG).

        Args:
            steps: the first and the last to draw.
        """
        drawn = []
        for step in [*self.running(), *self._trained()]:
            journal = self._curves_of(step)
            if journal is None:
                continue
            curves, before = self._followed(journal), self._before(step.name)
            for title, metric, unit in CHARTS:
                now = curves.between(metric, *steps)
                if not now:
                    continue
                half_life = max(3.0, len(now) / 60)
                lines = []
                if before and (earlier := before.between(metric, *steps)):
                    lines.append(Line("the run before", smoothed(earlier, half_life), "base"))
                lines += [Line("each step", now, "train", faint=True), Line("now", smoothed(now, half_life), "train")]
                marks = [mark for mark in self._corrections.get(step.name, ()) if now[0][0] <= mark[0] <= now[-1][0]]
                if metric == "train/loss" and (validated := curves.between(VALIDATION, *steps)):
                    lines.append(Line("validation", validated, "validation"))
                name = f"{step.name}: {title}"
                chart = line_chart(name, lines, x_label=unit, y_label="", marks=marks, width=640, can_zoom=True)
                drawn.append((name, chart))
            gpus = [
                Line(f"GPU {number}", points, GPU_STYLES[at % len(GPU_STYLES)])
                for at, number in enumerate(_gpu_numbers(curves))
                if (points := curves.between(f"gpu/{number}/utilisation_percent", *steps))
            ]
            if len({step for line in gpus for step, _ in line.points}) > 1:
                name = f"{step.name}: {UTILISATION}"
                chart = line_chart(name, gpus, x_label="step", y_label="", width=640, from_zero=True, can_zoom=True)
                drawn.append((name, chart))
        return drawn

    def legend(self, chart: str) -> list[tuple[str, str]]:
        """Return the styles and labels of the lines of a chart, by its title."""
        if not chart.endswith(UTILISATION):
            names = [("train", "now"), ("base", "the run before"), ("validation", "validation")]
            return [*names, ("happened", "correction by the guard")]
        stage = chart.removesuffix(f": {UTILISATION}")
        steps = [step for step in [*self.running(), *self._trained()] if step.name == stage]
        journals = [journal for step in steps if (journal := self._curves_of(step))]
        numbers = _gpu_numbers(self._followed(journals[0])) if journals else []
        return [(GPU_STYLES[at % len(GPU_STYLES)], f"GPU {number}") for at, number in enumerate(numbers)]

    def log_lines(self) -> list[dict[str, Any]]:
        """Return the log, newest first, without the beginnings of steps that were reused a moment later."""
        reused = {step.name for step in self.steps.values() if step.status == "reused"}
        return [line for line in reversed(self.log) if line.get("status") != "running" or line["stage"] not in reused]

    def printed(self) -> list[tuple[str, list[str]]]:
        """Return the last lines that each running stage has printed."""
        logs = [(step.name, self._journal_of(step)) for step in self.running()]
        printed = [(name, tail(journal.parent / "stage.log", PRINTED_LINES)) for name, journal in logs if journal]
        return [(name, [line for line in lines if line.rstrip() != FORKED]) for name, lines in printed]

    def answers(self) -> list[dict[str, Any]]:
        """Return prompts with the answers of several models: those of the newest step that has any, joined by the
        answers to the same prompts in the steps before."""
        rows: dict[str, dict[str, Any]] = {}
        for step in reversed(list(self.steps.values())):
            samples = step.path / AUX / "samples.jsonl" if step.path else None
            if samples is None or not samples.is_file():
                continue
            is_first = not rows
            with open(samples, encoding="utf8") as file:
                for line in islice(file, SAMPLE_LINES):
                    with suppress(ValueError):
                        row = parse_own_json(line)
                        if not (isinstance(row, dict) and isinstance(row.get("answers"), dict)):
                            continue
                        prompt = str(row.get("prompt", ""))
                        if prompt in rows:
                            rows[prompt] = {**row["answers"], **rows[prompt]}
                        elif is_first and len(rows) < ANSWERS and len(row["answers"]) > 1:
                            rows[prompt] = row["answers"]
        return [
            {
                "prompt": prompt,
                "reference": "",
                "answers": [
                    {"model": name, "label": name, "text": str(text), "score": "", "mark": ""}
                    for name, text in answers.items()
                ],
            }
            for prompt, answers in rows.items()
        ]

    def first_screen(self) -> dict[str, Any]:
        """Return the three numbers and the samples of the report; both empty before there is one."""
        for step in self.steps.values():
            path = step.path / FIRST_SCREEN if step.path else None
            if path is not None and path.is_file():
                first: dict[str, Any] = read_own_json(path)
                return first
        return {"key_figures": [], "samples": []}

    def claims(self) -> list[dict[str, str]]:
        """Return the claims of the report: state, sign, title, text; none before there is one."""
        for step in self.steps.values():
            path = step.path / AUX / "claims.json" if step.path else None
            if path is not None and path.is_file():
                claims: list[dict[str, str]] = read_own_json(path)
                return claims
        return []

    def report(self) -> str:
        """Return the address of the run's report below /artifact; empty before there is one."""
        for step in self.steps.values():
            if step.path is not None and (step.path / "report.html").is_file():
                return f"{step.path.parent.name}/{step.path.name}/report.html"
        return ""

    def page_of(self, step: RunStep) -> str:
        """Return the address of the page of what a step made; "" for a step that made neither a model nor shards."""
        if step.path is None:
            return ""
        stage = step.path.parent.name
        kind = "model" if stage in STAGES and STAGES[stage].makes_weights else "data" if stage == "shard" else ""
        return f"/{kind}/{stage}/{step.path.name}" if kind else ""

    def _take(self, line: dict[str, Any]) -> None:
        name = line.get("stage", "")
        match line["kind"]:
            case "begin":
                # A retry records every step again.
                self.begun, self.steps, self.retried_at = line, {}, -RETRY_PATIENCE_S
                self._corrections = {}
            case "stage":
                step = self.steps.setdefault(name, RunStep(name))
                if line["status"] == "running" and step.status != "running":
                    step.began, step.progress, step.left_s = line["time"], {}, None
                step.status, step.headline = line["status"], line.get("headline", "")
                step.took_s = line.get("seconds")
                step.path = self._inside(line.get("path"))
                if line["status"] != "waiting":
                    self.log.append(line)
            case "progress" if name in self.steps:
                self.steps[name].progress = line
            case "event":
                self.log.append(line)
                if line.get("name") == "correction" and isinstance(batch := line.get("back_to"), int):
                    self._corrections.setdefault(name, []).append((float(batch), str(line.get("message", ""))))
        del self.log[:-LOG_LINES]

    def _inside(self, path: str | None) -> Path | None:
        """Return the folder of an artifact in this store, wherever the store was when the run wrote its path."""
        return self.root / Path(*Path(path).parts[-2:]) if path else None

    def _is_open(self, name: str) -> bool:
        return name in self.steps and self.steps[name].status not in ENDED

    def _journal_of(self, step: RunStep) -> Path | None:
        """Return the journal that a running stage writes."""
        if step.name not in self._work or not self._work[step.name].exists():
            self._work.pop(step.name, None)
            jobs = sorted((self.root / ".work").glob("*/*/scratch/job.json"), key=_changed, reverse=True)
            for job in jobs:
                with suppress(OSError, ValueError, AttributeError):
                    if read_own_json(job).get("node") == step.name and _changed(job) >= (step.began or 0.0) - 1:
                        self._work[step.name] = job.parent / "journal.jsonl"
                        break
        return self._work.get(step.name)

    def _trained(self) -> list[RunStep]:
        """Return the trainings that this run has built, the newest first; those that it reused if it built none."""
        ended = [step for step in reversed(list(self.steps.values())) if step.path is not None]
        trained = [step for step in ended if step.path and _is_training(step.path.parent.name)]
        built = [step for step in trained if step.status == "built"]
        return built or ([step for step in trained if step.status == "reused"] if self.has_ended else [])

    def _curves_of(self, step: RunStep) -> Path | None:
        """Return the file with the metrics of a step that runs or was built."""
        if step.status == "running":
            return self._journal_of(step)
        path = step.path / AUX / METRICS if step.path else None
        # Longer curves are in the report, drawn once: the page of a finished run opens at once.
        return path if path is not None and path.is_file() and path.stat().st_size <= MOST_BYTES else None

    def _followed(self, path: Path) -> Curves:
        curves = self._curves.setdefault(path, Curves(path))
        curves.follow()
        return curves

    def _before(self, name: str) -> Curves | None:
        """Return the curves of a step in the newest earlier run of this pipeline that built or reused it."""
        for journal in latest(self.root / "runs", str(self.begun.get("pipeline", ""))):
            if journal.run_id >= self.journal.run_id:
                continue
            for line in reversed(journal.read()):
                if line["kind"] == "stage" and line["stage"] == name and line.get("path"):
                    folder = self._inside(line["path"])
                    if folder is not None and (folder / AUX / METRICS).is_file():
                        return self._followed(folder / AUX / METRICS)
        return None

    def _read_drawing(self) -> Drawing | None:
        with suppress(OSError, ValueError, LookupError, TypeError):
            return Drawing.from_json(read_own_json(self.journal.folder / PICTURE))
        return None


def _is_training(stage: str) -> bool:
    return stage in STAGES and STAGES[stage].trains


def _time_left(step: RunStep) -> float | None:
    """Return the seconds that a step still takes at its mean pace, once a hundredth of it is done."""
    if step.began is None or not step.ratio or step.ratio < 0.01:
        return None
    return (float(step.progress["time"]) - step.began) * (1 - step.ratio) / step.ratio


def _gpu_numbers(curves: Curves) -> list[str]:
    numbers = {parts[1] for name in curves.points if len(parts := name.split("/")) == 3 and parts[0] == "gpu"}
    return sorted(numbers, key=lambda number: (len(number), number))


def _gpus(curves: Curves) -> list[tuple[str, str]]:
    """Return the number of each GPU and its newest use in words, such as `93 % · 61.2 GB · 540 W · 61 °C`."""
    rows = []
    for number in _gpu_numbers(curves):
        newest = [(curves.newest(f"gpu/{number}/{name}"), words) for name, words in GPU_WORDS.items()]
        rows.append((number, " · ".join(words.format(value) for value, words in newest if value is not None)))
    return rows


def _changed(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0
