"""stemma compare A B …: compare runs, configs or models by settings, figures and curves."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cli.common.completion import artifacts
from cli.common.options import root_of, root_option
from cli.common.output import as_json, print_table, print_warnings, short_artifact

SHOWN = 30


@click.command("compare")
@click.argument("sides", nargs=-1, required=True, metavar="A B …", shell_complete=artifacts)
@click.option(
    "--all", "all_rows", is_flag=True, help=f"Print all rows, not only the first {SHOWN} and figures that differ."
)
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Path of the page with the curves; by default in comparisons/ in the store.",
)
@root_option
@as_json
def command(
    sides: tuple[str, ...], all_rows: bool, page: Path | None, root: str | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Compare runs, configs or models with the first: differences in settings, data, code and versions, figures side
    by side, and paired differences with their intervals. Also writes a page with curves.

    Each argument is an artifact such as sft/1f2e, a stage id for its newest artifact, the id of a run (see stemma ls
    runs) or a prefix of it, or a YAML file, whose built stages are compared. Sides that differ only in seeds are also
    summarised by mean and spread.
    """
    if len(sides) < 2:
        raise click.UsageError("expected two or more, e.g. stemma compare sft rlhf")
    from evaluation.pages.comparison import comparison_page
    from flows.compare.compare import compare
    from flows.compare.compared import find
    from infra.errors import Problem
    from infra.store.store import Store

    store = Store(root_of(root), reading=True)
    compared = find(store, sides)
    document = compare(compared)
    names = _short_names([side.name for side in compared])
    built = [{name: step.artifact for name, step in side.steps.items() if step.artifact} for side in compared]
    page_path = page or store.root / "comparisons" / f"{_file_name(names)}.html"
    print_warnings([Problem(**warning) for warning in document["warnings"]])
    trouble = _write(page_path, comparison_page(document, names, built))
    if not as_json:
        _print(document, names, all_rows)
        click.echo(f"\npage: {page_path}" if not trouble else f"\nthe page was not written: {trouble}")
    document = {"status": "done", "root": store.place, **document}
    return {**document, "page": None if trouble else str(page_path.absolute())}, 0


def _write(path: Path, text: str) -> str:
    """Write the page and return the reason if it could not be written, else "": the store may be another user's."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf8")
    except OSError as error:
        return f"{path}: {error.strerror} (choose another path with --page)"
    return ""


def _short_names(names: Sequence[str]) -> list[str]:
    """Names as typed, shortened as far as they stay unique."""
    short = [short_artifact(name) if re.fullmatch(r"[a-z_]+/[0-9a-f.]+", name) else name for name in names]
    short = [name[:15] if re.match(r"\d{8}-\d{6}-", name) else name for name in short]
    short = [Path(name).name if name.endswith((".yaml", ".yml")) else name for name in short]
    return short if len(set(short)) == len(set(names)) else list(names)


def _file_name(names: Sequence[str]) -> str:
    """The names as part of a file name."""
    joined = re.sub(r"[^\w.-]+", "-", "_".join(names))
    return joined if len(joined) <= 100 else f"{joined[:80]}_{hashlib.sha256(joined.encode()).hexdigest()[:8]}"


def _print(document: dict[str, Any], names: Sequence[str], show_all: bool) -> None:
    from evaluation.pages.comparison import differs, number_with_bounds, seeds_sentence

    columns = {name: name for name in names}
    for name, entry in zip(names, document["compared"], strict=True):
        measured = f" ({', '.join(entry['evaluations'])})" if entry["evaluations"] else ""
        click.echo(f"{entry['kind']} {name}: {entry['headline']}{measured}")
    for group in document["seeds"]:
        click.echo(seeds_sentence(group))
    differences = [
        {"key": row["key"], **dict(zip(names, map(str, row["values"]), strict=True))} for row in document["differences"]
    ]
    click.echo(f"\n{len(differences)} settings, sources or versions differ")
    _print_rows(differences, {"key": "key", **columns}, show_all)
    if document["steps"]:
        click.echo(f"\n{len(document['steps'])} steps are part of some of them only")
        steps = [{"step": row["step"], **dict(zip(names, row["values"], strict=True))} for row in document["steps"]]
        _print_rows(steps, {"step": "step", **columns}, show_all)
    rows = []
    for row in document["figures"]:
        if show_all or len(document["figures"]) <= SHOWN or differs(row["values"]):
            cells = map(number_with_bounds, row["values"], row["intervals"])
            spread = {
                f"seeds {number}": f"{spread['mean']:.4g} ± {spread['sd']:.2g}"
                for number, spread in enumerate(row["spread"])
            }
            rows.append({"figure": row["figure"], **dict(zip(names, cells, strict=True)), **spread})
    spread_columns = {f"seeds {n}": f"mean ± sd of {len(group['names'])}" for n, group in enumerate(document["seeds"])}
    click.echo(f"\n{len(rows)} figures" + ("" if len(rows) == len(document["figures"]) else " differ"))
    _print_rows(rows, {"figure": "figure", **columns, **spread_columns}, show_all)
    if document["paired"]:
        click.echo(f"\npaired over the same items, minus {names[0]}")
        displayed_names = dict(zip((entry["name"] for entry in document["compared"]), names, strict=True))
        paired = [
            {
                "name": displayed_names[row["name"]],
                "figure": row["figure"],
                "change": number_with_bounds(row["difference"], [row["low"], row["high"]]),
                "so": "more than chance" if row["shown"] else "no difference is shown",
            }
            for row in document["paired"]
        ]
        print_table(paired, {"name": "", "figure": "figure", "change": "difference, 95 % interval", "so": "so"})


def _print_rows(rows: list[dict[str, Any]], columns: dict[str, str], show_all: bool) -> None:
    visible = rows if show_all else rows[:SHOWN]
    if visible:
        print_table(visible, columns)
    if len(rows) > len(visible):
        click.echo(f"{len(rows) - len(visible)} more: --all")
