"""stemma feedback export, import: people choose between answers, and their choices become data to train on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.chat import writing_model
from cli.completion import artifacts
from cli.options import root_of, root_option
from cli.output import as_json, print_table
from infra.servers.environment import OFFLINE, QUIET

if TYPE_CHECKING:
    from evaluation.feedback.pairs import Export


@click.group("feedback")
def command() -> None:
    """People choose between two answers, and what they choose becomes data to train on.

    \b
    stemma feedback export rlhf --out round1          two answers of one model a prompt
    stemma feedback export sft rlhf --out blind       two models, side by side and blind
    stemma feedback import round1 judgements-*.jsonl  agreement, win rates, preference pairs
    """


@command.command("export")
@click.argument("models", nargs=-1, required=True, metavar="MODEL …", shell_complete=artifacts)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="A new folder.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON lines with a prompt each; by default the held-out side of the newest instructions.",
)
@click.option("--pairs", "count", type=click.IntRange(1), default=100, show_default=True, help="Pairs at most.")
@click.option("--temperature", type=click.FloatRange(0), default=0.7, show_default=True, help="0 is greedy.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--seed", type=int, default=17, show_default=True, help="Draws prompts, answers and their order.")
@root_option
@as_json
def export(
    models: tuple[str, ...],
    out: Path,
    prompts: Path | None,
    count: int,
    temperature: float,
    max_new_tokens: int,
    seed: int,
    root: Path | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Draw two answers a prompt and write them for people to judge: a page that works offline, by keyboard and blind
    (judge.html), tasks for Label Studio (tasks.json, labelling.xml), and plain JSON lines (pairs.jsonl).

    MODEL is a Hugging Face folder, an artifact such as sft/1f2e, or a stage id such as rlhf for its newest. Of one
    model both answers are its own; of several every two meet equally often.
    """
    store = root_of(root)
    folders = {model: writing_model(model, store).absolute() for model in dict.fromkeys(models)}
    asked = _prompts(prompts, store)
    os.environ.update(QUIET | OFFLINE)
    from evaluation.feedback import label_studio
    from evaluation.feedback.page import judging_page
    from evaluation.feedback.pairs import Export, blind
    from infra.run import Run
    from training.candidates import Drawing, answer_pairs

    with tempfile.TemporaryDirectory(prefix="stemma-feedback-") as work:
        drawing = Drawing(temperature, max_new_tokens, seed)
        answered = answer_pairs(folders, asked, count, drawing, Run(Path(work)))
    drawn = {"temperature": temperature, "max_new_tokens": max_new_tokens, "seed": seed}
    pairs, given_by = blind(answered, seed)
    made = Export(pairs, given_by, {name: _known_of(folder) for name, folder in folders.items()}, drawn)
    pages = {
        "judge.html": judging_page(made, "Which answer is better?"),
        "tasks.json": json.dumps(label_studio.tasks(pairs.values(), made.id), indent=1, ensure_ascii=False),
        "labelling.xml": label_studio.LABELLING,
    }
    made.write(out, pages)
    if not as_json:
        click.echo(f"{len(pairs)} pairs in {out}")
        click.echo(f"judge them: open {out / 'judge.html'} in a browser, or import tasks.json into Label Studio")
        click.echo(f"then:       stemma feedback import {out} FILE …")
    return {"status": "done", "export": made.id, "pairs": len(pairs), "out": str(out.absolute())}, 0


@command.command("import")
@click.argument("folder", metavar="EXPORT", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE …", type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Where to write; by default judged/ in EXPORT."
)
@as_json
def import_(folder: Path, files: tuple[Path, ...], out: Path | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Read judgements of an EXPORT, files of its page or of Label Studio, and say how far people agree and which model
    they prefer.

    Writes preferences.jsonl and instructions.jsonl (corrected answers), which `preferences.read` and
    `instructions.read` take as files, judgements.jsonl with the models, quarantine.jsonl with what cannot be used and
    why, and summary.json.
    """
    from evaluation.feedback.judgements import Judgements
    from evaluation.feedback.outcome import outcome
    from evaluation.feedback.pairs import Export

    exported = Export.read(folder)
    found = outcome(exported, Judgements.read(files, exported))
    place = out or folder / "judged"
    found.write(place)
    if not as_json:
        _print(found.summary, exported, place)
        for row in found.aside[:5]:
            click.echo(f"put aside: {row['where']}: {row['reason']}", err=True)
    return {"status": "done", **found.summary, "out": str(place.absolute())}, 0


def _prompts(path: Path | None, store: Path) -> Sequence[str]:
    """The prompts to answer, each once. Raises StageError for a file without any, ConfigError where none is known."""
    from infra.store.reference import resolve
    from infra.store.store import Store
    from training.chat import read_rows

    path = path or resolve(Store(store, reading=True), "instructions", ["instructions"])[0] / "heldout.jsonl"
    return list(dict.fromkeys(row["prompt"] for row in read_rows(path, ("prompt",))))


def _known_of(folder: Path) -> dict[str, str]:
    """Where a model is, and of an artifact what it is."""
    from infra.store.manifest import Manifest

    try:
        manifest = Manifest.read(folder)
    except FileNotFoundError:
        return {"path": str(folder)}
    return {"path": str(folder), "artifact": f"{manifest.stage}/{manifest.fingerprint}", "digest": manifest.digest}


def _print(summary: dict[str, Any], exported: Export, place: Path) -> None:
    said = f"{summary['judgements']} judgements of {summary['judged_pairs']} of {summary['pairs']} pairs"
    click.echo(f"{said} by {len(summary['annotators'])} people, {summary['quarantined']} put aside")
    if agreement := summary["agreement"]:
        click.echo(f"agreement: Krippendorff's α {_shown(agreement)}; 0 is chance, 1 perfect")
    if left := summary["left_preferred"]:
        click.echo(f"the answer on the left was preferred in {_shown(left)} of those decided")
    if rows := summary["win_rates"]:
        shown = [{**row, "rate": _shown(row)} for row in rows]
        print_table(shown, {"model": "model", "over": "preferred to", "rate": "share, 95 % interval", "pairs": "pairs"})
    if len(exported.models) > 2:
        shown = [{"model": row["model"], "points": _shown(row, 0)} for row in summary["strengths"]]
        print_table(shown, {"model": "model", "points": "strength in Elo points, 95 % interval"})
    click.echo(f"{summary['preferences']} preference pairs and {summary['corrections']} corrected answers in {place}")


def _shown(row: dict[str, float], digits: int = 2) -> str:
    return f"{row['value']:.{digits}f} ({row['low']:.{digits}f} to {row['high']:.{digits}f})"
