"""stemma cost [MODEL or RUN]: device time, money, energy and emissions, and what the time was spent on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from cli.common.completion import artifacts
from cli.common.options import root_of, root_option
from cli.common.output import as_json, print_table

if TYPE_CHECKING:
    from infra.ledger.account import Account
    from infra.store.store import Store


@click.command("cost")
@click.argument("target", metavar="[MODEL|RUN]", required=False, shell_complete=artifacts)
@root_option
@as_json
def command(target: str | None, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Show the cost of MODEL and all of its ancestors, or of RUN, and how device time was used.

    MODEL is any artifact, as for `stemma lineage`. RUN is the id of a run, as listed by `stemma ls runs`; by default
    the newest run. Artifacts built by versions that kept no record are listed as unknown.
    """
    from infra.store.store import Store

    store = Store(root_of(root), reading=True)
    runs = store.runs()
    if target is None:
        folders = sorted(folder.name for folder in runs.iterdir()) if runs.is_dir() else []
        if not folders:
            raise click.UsageError(f"there is no run in {store.place}: give an artifact")
        target = folders[-1]
    if (runs / target).is_dir() and "/" not in target:
        return _of_run(store, target, as_json)
    return _of_artifact(store, target, as_json)


def _of_run(store: Store, run_id: str, as_json: bool) -> tuple[dict[str, Any], int]:
    from flows.runs.ledger import read_ledger

    ledger = read_ledger(store.root, run_id)
    document: dict[str, Any] = {"status": "done", "root": store.place, "kind": "run", "run_id": run_id}
    if ledger is None:
        if not as_json:
            click.echo(f"the cost of run {run_id} is unknown: the version that ran it kept no record of time")
        return {**document, "known": False, "account": None, "stages": {}}, 0
    if not as_json:
        click.echo(f"run {run_id} of {ledger.pipeline}, {ledger.wall_s:,.1f} s\n")
        _print_account(ledger.account)
        rows = [{"stage": name, **_row(account)} for name, account in ledger.stages.items()]
        if ledger.idle.device_s:
            rows.append({"stage": "(between stages)", **_row(ledger.idle)})
        click.echo()
        print_table(rows, {"stage": "stage", **_COLUMNS})
    stages = {name: account.as_json() for name, account in ledger.stages.items()}
    account = ledger.account.as_json()
    idle_s = round(ledger.idle.device_s, 3)
    wall_s = round(ledger.wall_s, 3)
    return {**document, "known": True, "wall_s": wall_s, "account": account, "idle_s": idle_s, "stages": stages}, 0


def _of_artifact(store: Store, target: str, as_json: bool) -> tuple[dict[str, Any], int]:
    from infra.ledger.ancestors import cost_over_ancestors
    from infra.store.reference import resolve

    folder, manifest = resolve(store, target)
    cost = cost_over_ancestors(store, folder, manifest)
    if not as_json:
        click.echo(f"{manifest.stage}/{manifest.fingerprint[:8]} and its {len(cost.costs) - 1} ancestors\n")
        if cost.is_known:
            _print_account(cost.account)
        else:
            click.echo("unknown: no artifact has a record of its time")
        rows = []
        for of_one in cost.costs:
            row: dict[str, str] = {"step": of_one.step or of_one.artifact}
            if of_one.account is None:
                row |= {"device_s": "unknown", "planned": of_one.why}
            elif of_one.within:
                row |= {"device_s": f"in {of_one.within.partition('/')[0]}"}
            else:
                row |= _row(of_one.account)
            if of_one.planned_s and of_one.measured_s is not None:
                row["planned"] = f"{of_one.planned_s[1]:,.1f} s, measured {of_one.measured_s:,.1f} s"
            rows.append(row)
        click.echo()
        print_table(rows, {"step": "step", **_COLUMNS, "planned": "planned steps"})
    document = {
        "status": "done",
        "root": store.place,
        "kind": "artifact",
        "artifact": f"{manifest.stage}/{manifest.fingerprint}",
        "known": cost.is_known,
        "account": cost.account.as_json() if cost.is_known else None,
        "unknown": [of_one.artifact for of_one in cost.unknown],
        "artifacts": [of_one.as_json() for of_one in cost.costs],
    }
    return document, 0


_COLUMNS = {"device_s": "device time", "ettr": "effective", "usd": "USD", "energy": "energy", "restarts": "restarts"}


def _row(account: Account) -> dict[str, str]:
    from infra.ledger.builds import energy, hours, money

    return {
        "device_s": hours(account.device_s),
        "ettr": "" if account.ettr is None else f"{100 * account.ettr:.1f} %",
        "usd": money(account.usd),
        "energy": energy(account.energy_j),
        "restarts": str(account.restarts) if account.attempts else "",
    }


def _print_account(account: Account) -> None:
    from infra.ledger.builds import EFFECTIVE_TIME, EFFECTIVE_TIME_MEANS, hours, parts, summary

    for subject, value in summary(account):
        click.echo(f"{subject:>22}  {value}")
    click.echo(f"\n{EFFECTIVE_TIME}: {EFFECTIVE_TIME_MEANS}\n")
    for kind, cause, seconds in parts(account):
        share = seconds / account.device_s if account.device_s else 0.0
        click.echo(f"{f'{kind} {cause}'.strip():>22}  {hours(seconds):>12}  {100 * share:5.1f} %")
    for cause, (count, mean) in account.mttr_by_cause().items():
        recovered = "not recovered from" if mean is None else f"{mean:.1f} s to new work"
        click.echo(f"{f'fault: {cause}':>22}  {count}  {recovered}")
