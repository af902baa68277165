"""stemma check CONFIG and why CONFIG STAGE: what a run would build and reuse, or did, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.options import CONFIG, root_of, root_option, selection_of, selection_options, set_option, settings_of
from cli.common.output import as_json, print_table, with_short_artifacts


@click.command("check")
@CONFIG
@selection_options
@set_option
@click.option("--needs", is_flag=True, help="Show which stages each stage reads or waits for.")
@root_option
@as_json
def command(
    config: Path,
    only_: tuple[str, ...],
    from_: tuple[str, ...],
    until_: tuple[str, ...],
    force_: tuple[str, ...],
    strict_versions: bool,
    settings: tuple[str, ...],
    needs: bool,
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Show what a run would build and reuse, and why, without starting it.

    All mistakes in the config are reported at once, as are problems with the first record of each source.
    """
    from flows.config.graph import graph
    from flows.config.read import load
    from flows.deployment.start import runs_on_worker
    from flows.planning.branches import branch_notes, chat_notes, file_notes, refuse_removed_states
    from flows.planning.needs import (
        GpusHere,
        check_hardware,
        model_folder_problems,
        refuse,
        stage_needs,
        steps_to_build,
    )
    from flows.planning.plan import plan
    from flows.planning.small_data import heldout_notes
    from flows.runs.journal import latest
    from infra.errors import ConfigError, StageError
    from infra.store.store import Store

    pipeline = load(config, settings_of(settings), lambda: root_of(root))
    nodes = graph(pipeline)
    selection = selection_of(only_, from_, until_, force_, strict_versions)
    chosen = selection.choose(nodes)
    store = Store(root_of(root), reading=True)
    built = steps_to_build(nodes, chosen, store, selection.force)
    problems = [*check_hardware(pipeline, built), *model_folder_problems(nodes, built)]
    if not runs_on_worker(store.root):  # the worker has its own environment, with the password in it
        store.check_leases()
    try:
        rows = plan(nodes, store, selection.force, look=True, strict_versions=strict_versions)
    except StageError as error:
        if not problems:
            raise
        raise ConfigError(*problems, *error.problems) from error
    if problems:
        raise ConfigError(*problems)
    refuse_removed_states(nodes, rows, chosen, store)
    building = {name: nodes[name] for name in chosen if rows[name].status == "build"}
    notes: dict[str, str] = {}
    for more in (chat_notes(building), file_notes(building), branch_notes(nodes, rows), heldout_notes(building)):
        notes |= {name: "\n".join(filter(None, (notes.get(name), note))) for name, note in more.items()}
    resources = stage_needs(pipeline, nodes, {name: rows[name] for name in chosen}, store)
    refuse(pipeline, nodes, resources)
    gpus = GpusHere.of(pipeline.launch, nodes, built)
    unfit = [*gpus.problems(), *gpus.memory_problems(nodes, resources)] if gpus else []
    stage_rows = [
        {
            **rows[name].as_json(),
            "needs": list(nodes[name].upstream),
            "note": notes.get(name, ""),
            "plan": resources[name].as_json() if name in resources else None,
        }
        for name in chosen
    ]
    document = {"status": "done", "config": str(config), "root": store.place, "stages": stage_rows}
    document["this_machine"] = [problem.as_json() for problem in unfit]
    if not as_json:
        never_run = next(latest(store.runs(), pipeline.name), None) is None
        _print(stage_rows, store.root, needs, never_run)
        _print_plans(stage_rows)
        _print_made_by(stage_rows)
        for row in filter(lambda row: row["note"], stage_rows):
            click.echo(row["note"])
        for problem in unfit:
            click.echo(f"\nthis machine cannot train it: {problem}")
    return document, 0


def _print(rows: list[dict[str, Any]], root: Path, needs: bool, never_run: bool) -> None:
    """never_run: do not list how the stages differ from those of other pipelines, which is noise before a first run."""
    builds = [row for row in rows if row["status"] == "build"]
    new = never_run or all(change["what"] in ("upstream", "none") for row in builds for change in row["changes"])
    if new and len(builds) == len(rows) and not needs:
        click.echo(f"nothing is built yet: all {len(rows)} stages would be built in {root}")
        return
    columns = {"stage": "stage", "status": "would", "artifact": "artifact", "because": "because"}
    print_table(with_short_artifacts(rows), {**columns, **({"needs": "needs"} if needs else {})})
    click.echo(f"\n{len(builds)} to build, {len(rows) - len(builds)} to reuse in {root}")


def _print_made_by(rows: list[dict[str, Any]]) -> None:
    """Print which reused artifacts were built with other versions of packages."""
    steps: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["made_by"]:
            steps.setdefault(tuple(row["made_by"]), []).append(row["stage"])
    for causes, step_names in steps.items():
        click.echo(f"\n{', '.join(step_names)}: {'; '.join(causes)}")
    if steps:
        click.echo("they are reused; --strict-versions rebuilds them")


def _print_plans(rows: list[dict[str, Any]]) -> None:
    """Print the plans for training, one row per step."""
    from evaluation.pages.planning import dollars
    from evaluation.pages.words import size

    table = [
        {
            "stage": row["stage"],
            "on": f"{plan['devices']} × {plan['device']}",
            "time": _time(plan),
            "cost": dollars(plan["cost_usd"]) if plan["cost_usd"] else "",
            "memory": f"{size(plan['memory_gb'] * 1e9)} of {plan['memory_limit_gb']:,.0f} GB",
            "disk": size(plan["disk_gb"] * 1e9),
        }
        for row in rows
        if (plan := row["plan"])
    ]
    if table:
        click.echo("\ntraining would take about")
        print_table(table, {name: name for name in ("stage", "on", "time", "cost", "memory", "disk")})
        if built := [row["stage"] for row in rows if row["plan"] and row["plan"]["builds_here"]]:
            others = "; others are estimated from sizes" if len(built) < len(table) else ""
            click.echo(f"times of {', '.join(built)} are from their last builds here{others}")


def _time(plan: dict[str, Any]) -> str:
    from evaluation.pages.planning import hours, span

    if plan["hours"] is None:
        return "by its data"
    # The start of a program and the overhead of small operations are in no estimate by sizes.
    if plan["hours_high"] < 1 / 60 and not plan["builds_here"]:
        return "under 1 min"
    return f"{hours(plan['hours'])} ({span(hours(plan['hours_low']), hours(plan['hours_high']))})"


@click.command("why")
@CONFIG
@click.argument("stage")
@set_option
@root_option
@as_json
def why(
    config: Path, stage: str, settings: tuple[str, ...], root: str | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Explain why a stage was built, reused or skipped in the last run of this pipeline that included it.

    With --set: in the last run with these settings or, if there was none, in a run that would have them.
    """
    from flows.config.graph import graph, known
    from flows.config.read import load
    from flows.planning.plan import plan, run_command
    from flows.runs.journal import latest
    from infra.errors import ConfigError, Problem
    from infra.store.store import Store

    pipeline = load(config, settings_of(settings), lambda: root_of(root))
    nodes = graph(pipeline)
    known(nodes, [stage], "STAGE")
    store = Store(root_of(root), reading=True)
    planned = plan(nodes, store)[stage] if settings else None
    for journal in latest(store.runs(), pipeline.name):
        rows = [line for line in journal.read() if line["kind"] == "stage" and line["stage"] == stage]
        if not rows or rows[-1]["status"] in ("waiting", "running"):
            continue
        if planned is None or (planned.fingerprint and rows[-1]["fingerprint"] == planned.fingerprint):
            document = {"status": "done", "run_id": journal.run_id, "stage": stage, **_account(rows[-1])}
            if not as_json:
                did = "failed" if document["did"] == "failed" else f"was {document['did']}"
                click.echo(f"{stage} {did} in run {journal.run_id}: {document['why']}")
            return document, 0
    if planned is not None:
        account = {**planned.as_json(), "headline": "", "status": _WOULD[planned.status]}
        document = {"status": "done", "run_id": None, "stage": stage, **_account(account)}
        if not as_json:
            click.echo(f"{stage} would be {document['did']}; no run had these settings: {document['why']}")
        return document, 0
    fix = run_command(str(config), store, "--until", stage)
    raise ConfigError(Problem("never_run", stage, f"no run of {pipeline.name} has reached this stage", fix))


_WOULD = {"build": "built", "reuse": "reused"}


def _account(row: dict[str, Any]) -> dict[str, Any]:
    from tasks.building.explain import NEVER_BUILT

    match row["status"]:
        case "reused":
            reason = f"nothing that affects it changed; its artifact {row['fingerprint']} existed and was intact"
        case "built":
            # `check` words this for stages that are yet to be built.
            reason = "; ".join(row["because"]).replace(NEVER_BUILT, "the store had none to reuse")
        case _:
            reason = row["headline"]
    return {"did": row["status"], "why": reason, "because": row["because"], "fingerprint": row["fingerprint"]}
