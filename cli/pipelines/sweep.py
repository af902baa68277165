"""stemma sweep CONFIG: runs over values of config keys, which share every artifact they can."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from cli.common.options import CONFIG, root_of, root_option, say_local, set_option, settings_of
from cli.common.output import as_json, print_problems, print_table


@click.command("sweep")
@CONFIG
@click.option(
    "--key", "keys", multiple=True, metavar="KEY=VALUES", help="Values to try: 1e-4,3e-4 or a range 1e-4..1e-2[@log]."
)
@click.option(
    "--ablate",
    multiple=True,
    metavar="'NAME: KEY=VALUE …'",
    help="Named settings to compare with the unchanged config.",
)
@click.option(
    "--ablations", type=click.Path(path_type=Path, dir_okay=False), help="YAML file of ablations, {NAME: {KEY: VALUE}}."
)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs per setting, each with a different seed.",
)
@click.option("--measure", default="", metavar="STEP.FIGURE", help="Metric to compare; by default the training loss.")
@click.option("--maximise/--minimise", default=None, help="Direction of the metric; by default derived from its name.")
@click.option(
    "--sampler", type=click.Choice(["grid", "random", "tpe"]), help="grid for lists, tpe (Optuna's) for ranges."
)
@click.option("--trials", type=click.IntRange(1), help="Number of settings to draw, for random and tpe.")
@click.option(
    "--pruner",
    type=click.Choice(["none", "median", "hyperband"]),
    default="none",
    show_default=True,
    help="Stop drawn trials early if their intermediate validation is poor.",
)
@click.option("--law", is_flag=True, help="Fit a scaling law to sizes and durations, and predict the largest run.")
@click.option("--at-once", type=click.IntRange(1), default=1, show_default=True, help="Trials to run in parallel.")
@click.option(
    "--page", type=click.Path(path_type=Path, dir_okay=False), help="Path of the page; by default in sweeps/."
)
@set_option
@root_option
@as_json
def command(
    config: Path,
    keys: tuple[str, ...],
    ablate: tuple[str, ...],
    ablations: Path | None,
    at_once: int,
    law: bool,
    page: Path | None,
    settings: tuple[str, ...],
    root: str | None,
    as_json: bool,
    **options: Any,
) -> tuple[dict[str, Any], int]:
    """Run a pipeline with several values of its keys, and report the best.

    Each trial is a run like `stemma run --set`, up to the measured stage, and shares every possible artifact with the
    others. The same command continues where a killed one stopped.

    \b
    stemma sweep CONFIG --key pretrain.optimizer.learning_rate=1e-4,3e-4 --seeds 3
    stemma sweep CONFIG --key pretrain.optimizer.learning_rate=1e-4..1e-2@log --trials 16 --pruner median
    stemma sweep CONFIG --ablate 'no warm-up: pretrain.schedule.warmup="0 batches"' --seeds 3
    """
    from flows.sweeps.definition import Wishes, define
    from flows.sweeps.law import check
    from flows.sweeps.space import read_ablation, read_space
    from flows.sweeps.whole import whole_sweep
    from infra.store.store import Store

    named_ablations = _by_name([*map(read_ablation, ablate), *_of_file(ablations).items()])
    wishes = Wishes(
        config, settings_of(settings), read_space(keys), named_ablations, root=lambda: root_of(root), **options
    )
    sweep = define(wishes)
    if law:
        check(sweep)
    folder = root_of(root)
    say_local(folder, "the trials of this sweep are recorded")
    document = whole_sweep(sweep, Store(folder), at_once, law, page, partial(click.echo, err=True))
    if not as_json:
        _print(document)
    return document, {"done": 0, "cancelled": 130}.get(document["status"], 1)


def _by_name(pairs: list[tuple[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Ablations by name. Raises ConfigError for a name that is used twice."""
    from infra.errors import ConfigError, Problem

    names = [name for name, _ in pairs]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        fix = "rename one; several settings of one ablation are separated by spaces: 'NAME: KEY=VALUE KEY=VALUE'"
        raise ConfigError(
            *(Problem("bad_ablation", f"--ablate {name}", "the name is given twice", fix) for name in repeated)
        )
    return dict(pairs)


def _of_file(path: Path | None) -> dict[str, dict[str, Any]]:
    """Ablations from a YAML file. Raises ConfigError if it has another form."""
    if path is None:
        return {}
    from flows.config.read import read_yaml
    from infra.errors import ConfigError, Problem

    content = read_yaml(path)
    bad = [name for name, ablation in content.items() if not isinstance(ablation, dict) or not ablation]
    if bad:
        fix = "{NAME: {KEY: VALUE}}, such as {no clipping: {pretrain.optimizer.gradient_clip: 1e9}}"
        raise ConfigError(Problem("bad_ablation", f"{path}: {bad[0]}", "expected a mapping of settings", fix))
    return {str(name): ablation for name, ablation in content.items()}


def _print_law(law: dict[str, Any]) -> None:
    from evaluation.pages.sweep_page import isoflop_sentences, law_sentences

    click.echo()
    for sentence in [*law_sentences(law), *isoflop_sentences(law["isoflop"])]:
        click.echo(sentence)
    click.echo(f"for stemma plan --law {law['file']}")


def _print(document: dict[str, Any]) -> None:
    from evaluation.pages.sweep_page import bounds, number

    rows = [
        {**row, "mean": number(row["mean"]), "sd": number(row["sd"]), "span": bounds(row)}
        for row in document["settings"]
    ]
    click.echo()
    columns = {"name": "settings", "mean": document["measure"], "sd": "sd", "span": "95 % interval", "status": ""}
    print_table(rows, columns)
    if document["ablations"]:
        click.echo("\nminus the base, with the same seeds")
        table = [
            {
                **row,
                "difference": number(row["difference"]),
                "span": bounds(row),
                "so": "more than chance" if row["shown"] else "no difference is shown",
            }
            for row in document["ablations"]
        ]
        print_table(
            table, {"name": "", "figure": "figure", "difference": "difference", "span": "95 % interval", "so": ""}
        )
    if document["law"]:
        _print_law(document["law"])
    click.echo(f"\n{document['status']}; page: {document['page']}")
    for warning in document["warnings"]:
        click.echo(f"warning: {warning['path']}: {warning['message']}", err=True)
    print_problems(document["errors"])
