"""Cost of the pipeline's artifacts, and the use of the devices' time."""

from __future__ import annotations

from evaluation.pages.parts import Section, Table
from evaluation.pages.words import percent
from evaluation.results.pipeline import PipelineResults
from infra.ledger.account import Account
from infra.ledger.builds import EFFECTIVE_TIME_MEANS, Cost, CostOfAll, cost_of, energy, hours, money, parts, summary


def costs_of(pipeline: PipelineResults) -> CostOfAll:
    """Return the cost of every artifact of a pipeline, those of separate measurements included."""
    folders = {}
    for id, artifact in pipeline.artifacts.items():
        folders[artifact.folder] = (id, artifact.manifest)
        if artifact.measured is not None:
            folders[artifact.measured.folder] = (artifact.measured.id, artifact.measured.manifest)
    return CostOfAll(
        [
            cost_of(folder, id, id, is_imported=manifest is not None and manifest.adopted is not None)
            for folder, (id, manifest) in folders.items()
        ]
    )


def cost(pipeline: PipelineResults) -> Section:
    """Return the cost of the pipeline by stage and by what the time was spent on; empty if nothing was recorded."""
    every = costs_of(pipeline)
    if not every.is_known:
        return Section("cost", "Cost")
    account = every.account
    lead = "; ".join(f"{subject}: {value}" for subject, value in summary(account))
    spent = [
        [kind, cause, hours(seconds), percent(seconds / account.device_s)] for kind, cause, seconds in parts(account)
    ]
    recovered = [
        [cause, str(count), "not yet" if mean is None else f"{mean:.1f} s"]
        for cause, (count, mean) in account.mttr_by_cause().items()
    ]
    tables = [
        Table("What the time was spent on", ["kind", "cause", "device time", "share"], spent, numeric=(2, 3)),
        Table(
            "By stage",
            ["stage", "device time", "effective time", "USD", "energy", "restarts", "planned steps", "measured"],
            [_row(of_one) for of_one in every.costs],
            f"Effective time is {EFFECTIVE_TIME_MEANS}. Energy is an estimate where no driver reports it, and so are "
            "prices and emissions: see docs/cost.md. Planned as stemma check does.",
            numeric=tuple(range(1, 8)),
        ),
    ]
    if recovered:
        columns = ["fault", "times", "mean time to new work"]
        tables.append(Table("Faults", columns, recovered, numeric=(1, 2)))
    return Section("cost", "Cost", f"{lead}.", tables=tables)


def ettr_of(pipeline: PipelineResults) -> str:
    """Return the effective training time ratio of all artifacts as percent; empty if it is unknown."""
    ettr = costs_of(pipeline).account.ettr
    return "" if ettr is None else percent(ettr)


def _row(of_one: Cost) -> list[str]:
    account: Account | None = of_one.account
    if account is None:
        return [of_one.step, "unknown", *[""] * 6]
    if of_one.within:
        return [of_one.step, f"in {of_one.within.partition('/')[0]}", *[""] * 6]
    planned = of_one.planned_s
    return [
        of_one.step,
        hours(account.device_s),
        "" if account.ettr is None else percent(account.ettr),
        money(account.usd),
        energy(account.energy_j),
        str(account.restarts),
        f"{planned[1]:,.1f} s" if planned else "",
        f"{of_one.measured_s:,.1f} s" if planned and of_one.measured_s is not None else "",
    ]
