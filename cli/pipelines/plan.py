"""stemma plan: resources and cost of a training run, before any money is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.options import set_option, settings_of
from cli.common.output import as_json, print_table


@click.command("plan")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--preset", help="Model preset, e.g. gpt-1.3b.")
@click.option("--parameters", type=float, help="Number of parameters, e.g. 3e9, instead of a preset.")
@click.option("--tokens", type=float, help="Tokens to train on, e.g. 20e9.")
@click.option("--compute", type=float, metavar="FLOPS", help="Budget in model FLOPs.")
@click.option("--money", type=float, metavar="USD", help="Budget in USD.")
@click.option("--days", type=float, help="Budget in days on these devices.")
@click.option("--gpu", help="Device, e.g. h100; see docs/planning/index.md. By default CONFIG's, or a100-80.")
@click.option("--gpus", type=int, help="Number of devices; by default CONFIG's, or 8.")
@click.option("--price", type=float, help="USD per device-hour; by default a range of public list prices.")
@click.option("--capital", type=float, help="Purchase price of one device in USD; by default a list price.")
@click.option("--kernels", help="plain, flash, compiled or megatron; by default as in the device's published figures.")
@click.option(
    "--law",
    default="besiroglu",
    show_default=True,
    help="Scaling law that derives omitted values: a name or a JSON file.",
)
@click.option("--batch-tokens", type=int, help="Tokens per optimizer step; by default as in GPT-3 at that size.")
@click.option("--sequence-length", type=int, help="Tokens per sequence; by default CONFIG's, or 2048.")
@click.option("--vocabulary", type=int, help="Vocabulary size; by default the preset's.")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32", "fp8"]), default="bf16", show_default=True)
@click.option("--gbit", type=float, help="Bandwidth between nodes, in Gbit/s.")
@click.option(
    "--pod", type=int, metavar="DEVICES", help="Devices per pod, within which nodes have --gbit; needs --pod-gbit."
)
@click.option("--pod-gbit", type=float, help="Bandwidth between pods per node, in Gbit/s.")
@click.option(
    "--own-tokens", type=float, help="Tokens in your corpus; used to judge whether training from scratch is worthwhile."
)
@click.option(
    "--used-tokens",
    type=float,
    help="Tokens per month that the model will process, to compare its cost with an API's price.",
)
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Write a page with curves and sliders.")
@click.option(
    "--write", type=click.Path(path_type=Path, dir_okay=False), help="Write a config that stemma check accepts."
)
@click.option("--rehearse", is_flag=True, help="Set up the layout without its devices, and compare memory and traffic.")
@set_option
@as_json
def command(
    config: Path | None,
    settings: tuple[str, ...],
    as_json: bool,
    page: Path | None,
    write: Path | None,
    rehearse: bool,
    **options: Any,
) -> tuple[dict[str, Any], int]:
    """Plan a pretraining run: time, cost, energy, memory and layout, with ranges and their assumptions.

    Give two of: a model size (--preset, --parameters or the model of CONFIG), --tokens, and a budget (--compute,
    --money or --days). With only one, a scaling law derives the rest. CONFIG also sets tokens, batch, sequence length
    and devices; options override it.

    \b
    stemma plan --preset gpt-1.3b --tokens 20e9 --gpu a100-80 --gpus 8
    stemma plan --money 5000 --gpu h100
    stemma plan CONFIG --gpu h100 --gpus 64

    --rehearse sets up the layout of CONFIG's launch:, or that of the plan, on meta tensors and runs one step of the
    actual training code for each rank that holds different layers. A layout that cannot be set up or does not fit is
    rejected.
    """
    from training.planner.plan import plan, request

    wishes = {name.replace("sequence_length", "length"): value for name, value in options.items() if value is not None}
    plan_request = request(**_merge_wishes(config, settings, wishes))
    document = plan(plan_request)
    if rehearse:
        from flows.planning.rehearsal import rehearse as rehearsal_of

        document["rehearsal"] = rehearsal_of(document, config, settings_of(settings))
    if write:
        from flows.planning.planned_config import write_config

        write_config(document, write)
        document["config"] = str(write)
    if page:
        from evaluation.pages.planning_page import planning_page
        from training.planner.laws.curves import curves

        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(planning_page(document, curves(plan_request, document)), encoding="utf8")
        document["page"] = str(page.absolute())
    if not as_json:
        _print(document)
        if write:
            click.echo(f"\nwritten to {write}; next: stemma check {write}")
        if page:
            click.echo(f"\npage: {page}")
    return document, 0


def _merge_wishes(config: Path | None, settings: tuple[str, ...], wishes: dict[str, Any]) -> dict[str, Any]:
    """The request from the options, merged with that of a config. Raises ConfigError for --set without a config."""
    if config is None:
        if settings:
            from infra.errors import ConfigError, Problem

            raise ConfigError(
                Problem("no_config", "--set", "--set needs a CONFIG whose keys it sets", "add the path of a config")
            )
        return wishes
    from flows.planning.planned_config import wishes_of

    merged = wishes_of(config, settings_of(settings))
    if wishes.keys() & {"compute", "money", "days"}:
        merged.pop("tokens", None)  # the budget replaces the duration
    return merged | wishes


def _print(document: dict[str, Any]) -> None:
    from evaluation.pages.planning import rows, title, verdict_title

    click.echo(title(document))
    print_table(
        [{"what": label, "plan": value, "range": span} for label, value, span in rows(document)],
        {"what": "", "plan": "plan", "range": "range"},
    )
    click.echo(f"\n{verdict_title(document)}")
    for reason in document["verdict"]["because"]:
        click.echo(f"  {reason}")
    if "rehearsal" in document:
        _print_rehearsal(document["rehearsal"])
    click.echo("\nother layouts")
    for entry in document["others"]:
        click.echo(f"  {entry['layout']}: {entry['why']}")
    click.echo("\nassumptions")
    for entry in document["assumptions"]:
        click.echo(f"  {entry}")


def _print_rehearsal(rehearsal: dict[str, Any]) -> None:
    ranks = ", ".join(map(str, rehearsal["rehearsed_ranks"]))
    click.echo(
        f"\nrehearsed: a step of {rehearsal['microbatches']} of {rehearsal['microbatches_of_a_step']} microbatches, on "
        f"rank {ranks} of {rehearsal['ranks']}; at most {rehearsal['memory_gb']:.2f} of "
        f"{rehearsal['memory_gb_of_device']:.1f} GB"
    )
    table = [
        {
            "what": f"{row['what']}, rank {row['rank']}",
            "planned": f"{row['planned_gb']:.4g}",
            "rehearsed": f"{row['rehearsed_gb']:.4g}",
            "ratio": "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            "links": f"{row['node_gb']:.4g} in the node, {row['network_gb']:.4g} between nodes"
            if "node_gb" in row
            else "",
        }
        for row in rehearsal["rows"]
    ]
    heads = {"what": "", "planned": "planned, GB", "rehearsed": "rehearsed, GB", "ratio": "ratio", "links": "by link"}
    print_table(table, heads)
