"""stemma drill CONFIG: inject faults into a pipeline in a scratch store, and check that nothing is lost."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click

from cli.common.options import CONFIG, SEED, names, set_option, settings_of
from cli.common.output import as_json


class Seconds(click.ParamType[float]):
    """A duration such as 60s, 2m or 1h; a bare number is seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip())
        if not match or float(match[1]) == 0:
            self.fail(f"expected a duration such as 60s, 2m or 1h, not {value!r}", param, ctx)
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


class StageMoment(click.ParamType[tuple[str, float]]):
    """STAGE+SECONDS."""

    name = "moment"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\w+)\+(\d+(?:\.\d+)?)", str(value))
        if not match:
            self.fail(f"expected STAGE+SECONDS such as pretrain+3.5, not {value!r}", param, ctx)
        return match[1], float(match[2])


@click.command("drill")
@CONFIG
@click.option("--faults", type=click.IntRange(1), default=20, show_default=True, help="Number of faults.")
@click.option("--mtbf", type=Seconds(), default="60s", show_default=True, help="Mean working time between faults.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Seed for drawing faults and their times.")
@click.option("--only", multiple=True, metavar="FAULT,…", help="Draw from these faults, such as kill-stage,full-disk.")
@click.option("--servers", is_flag=True, help="Run under `stemma up` and hit its servers too.")
@click.option("--for", "time_limit", type=Seconds(), help="Inject no new fault after this time, e.g. 15m.")
@click.option("--repeat", type=click.IntRange(1), metavar="N", help="Inject only fault N of the campaign.")
@click.option("--at", type=StageMoment(), metavar="STAGE+SECONDS", help="With --repeat: when the fault hits.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Scratch folder, in which the same campaign is continued. By default in the system's temporary folder.",
)
@set_option
@as_json
def command(
    config: Path,
    faults: int,
    mtbf: float,
    seed: int,
    only: tuple[str, ...],
    servers: bool,
    time_limit: float | None,
    repeat: int | None,
    at: tuple[str, float] | None,
    folder: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Run a pipeline in a scratch store while injecting faults, and check every guarantee about faults.

    Checked after each fault: exit code and messages, artifacts byte for byte, processes, leases, `check`; at the end of
    each pipeline also metrics, lineage, shared memory and temporary files. Your store is not touched.

    \b
    stemma drill CONFIG --faults 20 --mtbf 60s
    stemma drill CONFIG --only kill-stage,power-loss --seed 3
    """
    from flows.config.graph import graph
    from flows.config.read import load
    from flows.drill.drill import Drill, DrillRequest, figures, table
    from flows.drill.kinds import KINDS
    from infra.errors import Problem

    chosen = names(only)
    if unknown := [name for name in chosen if name not in KINDS]:
        raise click.UsageError(f"there is no fault {unknown[0]!r}; the faults are {', '.join(KINDS)}")
    if at and repeat is None:
        raise click.UsageError("--at needs --repeat: it sets when the repeated fault hits")
    pipeline = load(config, settings_of(settings))
    graph(pipeline)
    scratch = folder or Path(tempfile.gettempdir()) / f"stemma-drill-{pipeline.name}-{seed}"
    wish = DrillRequest(
        config,
        scratch if repeat is None else scratch / f"repeat-{repeat}",
        faults,
        mtbf,
        seed,
        settings,
        chosen,
        servers,
        time_limit and time_limit / 60,
        repeat,
        at,
        partial(click.echo, err=True),
    )
    drill = Drill(wish, pipeline)
    record = drill.run()
    text = table(record)
    (wish.folder / "drill.md").write_text(text, encoding="utf8")
    if not as_json:
        click.echo(text)
    problems = [
        Problem("violation", row["kind"], violation, drill.repeat(row))
        for row in record["faults"]
        for violation in row["violations"]
    ]
    problems += [
        Problem("violation", "the end", violation, f"the pipeline and its store are in {wish.folder}")
        for cycle in record["cycles"]
        for violation in cycle["violations"]
    ]
    document = {
        "status": "failed" if problems else "done",
        "errors": [problem.as_json() for problem in problems],
        "folder": str(wish.folder),
        **figures(record),
        "not_possible": record["not_possible"],
        "hits": record["faults"],
        "cycles": record["cycles"],
    }
    return document, 1 if problems else 0
