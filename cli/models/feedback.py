"""stemma feedback export, import: people choose between answers, and their choices become data to train on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common.completion import artifacts
from cli.common.options import (
    CONFIG,
    SEED,
    FiniteRange,
    new_folder_option,
    reach_server,
    root_of,
    root_option,
    say_local,
)
from cli.common.output import as_json, print_table
from cli.common.progress import ProgressJournal, working
from cli.models.chat import writing_model
from infra.servers.environment import OFFLINE, QUIET

if TYPE_CHECKING:
    from evaluation.people.pairs import Export


@click.group("feedback")
def command() -> None:
    """Collect human preferences between two answers as training data.

    \b
    stemma feedback export rlhf --out round1          two answers per prompt, from one model
    stemma feedback export sft rlhf --out blind       two models, side by side and blind
    stemma feedback import round1 judgements-*.jsonl  agreement, win rates, preference pairs
    stemma feedback round configs/quickstart.yaml     draw answers, wait for judgements, train
    """


@command.command("export", short_help="Write pairs of answers for people to judge.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL …", shell_complete=artifacts)
@new_folder_option
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON Lines file with one prompt per line; by default the held-out side of the newest instructions.",
)
@click.option("--pairs", "count", type=click.IntRange(1), default=100, show_default=True, help="Maximum pairs.")
@click.option("--temperature", type=FiniteRange(0), default=0.7, show_default=True, help="0 is greedy.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--seed", type=SEED, default=17, show_default=True, help="Seed for prompts, answers and their order.")
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
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Draw two answers per prompt and write them for people to judge: a blind, keyboard-driven page that works offline
    (judge.html), tasks for Label Studio (tasks.json, labelling.xml), and plain JSON lines (pairs.jsonl).

    MODEL is a Hugging Face folder, an artifact such as sft/1f2e, or a stage id such as rlhf for its newest artifact.
    With one model, both answers are from it; with several, each pair of models is compared equally often.
    """
    store = root_of(root)
    folders = {model: writing_model(model, store).absolute() for model in dict.fromkeys(models)}
    os.environ.update(QUIET | OFFLINE)
    from infra.run import Run
    from training.generation.candidates import CandidateSampling, held_out_prompts, prompts_in, write_export

    texts = prompts_in(prompts) if prompts else held_out_prompts(store)

    drawing = CandidateSampling(temperature, max_new_tokens, seed)
    with (
        tempfile.TemporaryDirectory(prefix="stemma-feedback-") as work,
        working(f"drawing answers of {', '.join(folders)}", quiet=as_json) as show,
    ):
        exported = write_export(folders, texts, count, drawing, out, Run(Path(work), journal=ProgressJournal(show)))
    if not as_json:
        click.echo(f"{len(exported.pairs)} pairs in {out}")
        click.echo(f"judge them: open {out / 'judge.html'} in a browser, or import tasks.json into Label Studio")
        click.echo(f"then:       stemma feedback import {out} FILE …")
    return {"status": "done", "export": exported.id, "pairs": len(exported.pairs), "out": str(out.absolute())}, 0


@command.command("import", short_help="Read judgements: agreement, win rates, data to train on.")
@click.argument("folder", metavar="EXPORT", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE …", type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Output folder; by default judged/ in EXPORT."
)
@click.option("--wait", is_flag=True, help="Keep the round waiting after this import, for further judgements.")
@root_option
@as_json
def import_(
    folder: Path, files: tuple[Path, ...], out: Path | None, wait: bool, root: str | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Read judgements of an EXPORT, from files of its page or of Label Studio, and report how well people agree and
    which model they prefer.

    Writes preferences.jsonl, ties.jsonl and instructions.jsonl (corrected answers), which `preferences.read` and
    `instructions.read` accept as files; judgements.jsonl with the models; quarantine.jsonl with unusable judgements
    and the reasons; and summary.json. A round of `stemma feedback round` that waits for the judgements continues.
    """
    from evaluation.people.judgements import Judgements
    from evaluation.people.outcome import outcome
    from evaluation.people.pairs import Export

    exported = Export.read(folder)
    judged = outcome(exported, Judgements.read(files, exported))
    target = out or folder / "judged"
    judged.write(target)
    resumed = "" if wait or not exported.drawn.get("flow_run") else _resume_round(exported, root_of(root))
    if not as_json:
        _print(judged.summary, exported, target)
        for row in judged.aside[:5]:
            click.echo(f"quarantined: {row['where']}: {row['reason']}", err=True)
        if resumed:
            click.echo(f"the round continues: {resumed}")
    return {"status": "done", **judged.summary, "out": str(target.absolute()), "resumed": resumed}, 0


@command.command("round", short_help="Draw answers, wait for judgements in the Prefect page, train on them.")
@CONFIG
@click.option("--model", default="rlhf", show_default=True, help="The step whose newest model answers.")
@click.option("--pairs", type=click.IntRange(1), default=100, show_default=True, help="Maximum pairs.")
@click.option("--temperature", type=FiniteRange(0, min_open=True), default=0.7, show_default=True)
@click.option("--max-new-tokens", type=click.IntRange(1), default=256, show_default=True)
@click.option("--cron", help='Schedule rounds, in UTC, e.g. "0 6 * * 1"; no round begins now.')
@root_option
@as_json
def round_(
    config: Path,
    model: str,
    pairs: int,
    temperature: float,
    max_new_tokens: int,
    cron: str | None,
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Start a round on the worker: draw two answers per prompt, pause in the Prefect page until judgements are
    imported, then run the pipeline with the new pairs among its preferences. Needs `stemma up`. Prints the gain of the
    previous round."""
    from flows.config.read import load

    pipeline, folder = load(config, root=lambda: root_of(root)), root_of(root)
    say_local(folder, "the round's answers and judgements are")
    page = reach_server(folder)
    from prefect.client.orchestration import get_client

    from flows.feedback.gain import as_line, last_comparison
    from flows.feedback.round import deploy_feedback
    from flows.prefect.schedules import Schedule

    parameters = {"model": model, "pairs": pairs, "temperature": temperature, "max_new_tokens": max_new_tokens}
    deployment = deploy_feedback(
        pipeline, folder, str(config), Schedule(cron) if cron is not None else None, **parameters
    )
    last = last_comparison(pipeline.name, folder)
    document: dict[str, Any] = {"status": "done", "deployment": str(deployment), "url": "", "flow_run_id": ""}
    document["last_round"] = last
    if cron is not None:
        document["url"] = f"{page}/deployments/deployment/{deployment}"
    else:
        with get_client(sync_client=True) as client:
            flow_run = client.create_flow_run_from_deployment(deployment)
        document |= {"flow_run_id": str(flow_run.id), "url": f"{page}/runs/flow-run/{flow_run.id}"}
    if not as_json:
        if last:
            click.echo(as_line(last))
        status = "the round waits for judgements at" if cron is None else "rounds will begin by"
        click.echo(f"{status} {document['url']}")
    return document, 0


def _resume_round(exported: Export, root: Path) -> str:
    """Page of the round that continues; "" if no round is waiting or no server is running."""
    from infra.servers.state import prefect_api_url

    if not prefect_api_url(root):
        return ""
    page = reach_server(root)
    from flows.feedback.round import go_on

    flow_run_id = go_on(exported)
    return f"{page}/runs/flow-run/{flow_run_id}" if flow_run_id else ""


def _print(summary: dict[str, Any], exported: Export, folder: Path) -> None:
    counts = f"{summary['judgements']} judgements of {summary['judged_pairs']} of {summary['pairs']} pairs"
    click.echo(f"{counts} by {len(summary['annotators'])} people, {summary['quarantined']} quarantined")
    if agreement := summary["agreement"]:
        click.echo(f"agreement: Krippendorff's α {_with_interval(agreement)}; 0 is chance, 1 perfect")
    if left_share := summary["left_preferred"]:
        click.echo(f"the answer on the left was preferred in {_with_interval(left_share)} of decided judgements")
    if rows := summary["win_rates"]:
        table = [{**row, "rate": _with_interval(row)} for row in rows]
        print_table(table, {"model": "model", "over": "preferred to", "rate": "share, 95 % interval", "pairs": "pairs"})
    if len(exported.models) > 2:
        table = [{"model": row["model"], "points": _with_interval(row, 0)} for row in summary["strengths"]]
        print_table(table, {"model": "model", "points": "strength in Elo points, 95 % interval"})
    pairs = f"{summary['preferences']} preference pairs, {summary['ties']} ties"
    click.echo(f"{pairs} and {summary['corrections']} corrected answers in {folder}")


def _with_interval(row: dict[str, float], digits: int = 2) -> str:
    return f"{row['value']:.{digits}f} ({row['low']:.{digits}f} to {row['high']:.{digits}f})"
