"""stemma init DATA…: a first config for the user's files."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common.output import as_json, print_table

if TYPE_CHECKING:
    from corpus.recognition.fitting_rules import FittingRules
    from flows.planning.first_config import InspectedSource


@click.command("init")
@click.argument("data", nargs=-1, required=True)
@click.option(
    "--to", "out", type=click.Path(path_type=Path, dir_okay=False), default=Path("pipeline.yaml"), show_default=True
)
@click.option("--name", default=None, help="Name of the pipeline; by default that of the file.")
@click.option(
    "--as",
    "kinds",
    multiple=True,
    metavar="[PATH=]KIND",
    help="Treat one PATH, or all, as documents, instructions or preferences.",
)
@click.option(
    "--text-field",
    "text_fields",
    multiple=True,
    metavar="[PATH=]FIELD",
    help="Dotted field that holds a document's text.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Train this open model further on DATA instead of pretraining a new one.",
)
@as_json
def command(
    data: tuple[str, ...],
    out: Path,
    name: str | None,
    kinds: tuple[str, ...],
    text_fields: tuple[str, ...],
    model: Path | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Inspect DATA (files, folders or globs of any format, or folders with Hugging Face datasets) and write a config.

    Documents, instructions and preferences are recognised from a sample of the records of all files, with the reason.
    If two interpretations are equally likely, the command asks in a terminal; elsewhere it lists both with the option
    that decides. Sizes are chosen to fit the text; tokens, disk and time are estimates. An existing file is not
    overwritten.

    With --model, a downloaded Hugging Face model is trained further: continued pretraining on documents, LoRA on
    instructions, DPO on preferences.
    """
    from evaluation.pages.words import compact, seconds, size
    from flows.config.read import load
    from flows.planning.config_sections import split_notes
    from flows.planning.first_config import (
        first_config,
        fit,
        inspect_sources,
        longest_read,
        refuse_two,
        source_problems,
        tried_rules,
        tried_split,
        tuning_config,
    )
    from flows.planning.small_data import fitting_vocabulary
    from infra.errors import ConfigError, Problem
    from infra.io.files import write_whole

    wishes = _wishes(data, kinds, text_fields)
    if out.exists():
        raise ConfigError(Problem("file_exists", str(out), "the file exists already", "choose another file with --to"))
    folder = out.absolute().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            Problem("unwritable", str(out), f"{folder} is not a writable folder", "choose another file with --to")
        )
    # Paths in a config are relative to its folder.
    paths = {path: path if folder == Path.cwd() else str(Path(path).absolute()) for path in data}
    is_asked = not as_json and sys.stdin.isatty() and sys.stdout.isatty()
    sources, notes = inspect_sources(
        list(paths.values()),
        {paths[path]: wish for path, wish in wishes.items()},
        _ask_reading if is_asked else refuse_two,
        has_model=model is not None,
    )
    rules = tried_rules(sources)
    text_bytes = sum(source.text_bytes for source in sources)
    fitted = None if model else fit(text_bytes)
    split = tried_split(sources, rules, fitted.sequence_length if fitted else longest_read(model or Path()))
    notes += split_notes(split)
    if fitted and split and split.documents:
        fitted = fit(text_bytes, split.sequence_length)
        vocabulary = fitting_vocabulary(split.documents, split.heldout_share, fitted.vocab_size)
        fitted = replace(fitted, vocab_size=vocabulary)
    pipeline_name = name or re.sub(r"[^a-z0-9._-]", "-", out.stem.lower()).lstrip("._-") or "pipeline"
    if fitted:
        text = first_config(pipeline_name, sources, fitted, rules, split)
    else:
        assert model is not None
        model_path = str(model if folder == Path.cwd() else model.absolute())
        text = tuning_config(pipeline_name, model_path, sources, rules, split)
    write_whole(out, text)
    try:
        if problems := source_problems(load(out)):
            raise ConfigError(*problems)
    except ConfigError:
        out.unlink()  # e.g. an invalid pipeline name
        raise
    if not as_json:
        rows = [
            {
                **asdict(source),
                "data": _data(source),
                "documents": f"{source.documents:,}",
                "text": size(source.text_bytes) if source.text_bytes else "",
            }
            for source in sources
        ]
        columns = {"data": "data", "kind": "is", "files": "files", "documents": "records, about"}
        print_table(rows, {**columns, "text": "text"})
        click.echo()
        for source in sources:
            click.echo(f"  {_data(source)}: {source.kind}; {source.why}")
        for note in notes:
            click.echo(f"  {note}")
        for line in _tried(rules):
            click.echo(f"  {line}")
        if fitted:
            duration = seconds(fitted.seconds) if fitted.seconds else "an unknown time"
            click.echo(
                f"\nabout {compact(fitted.tokens)} tokens: {fitted.preset} ({compact(fitted.parameters)} parameters) "
                f"for {compact(fitted.trained_tokens)} tokens\nabout {size(fitted.disk_bytes)} of disk; "
                f"pretraining on this machine: about {duration}"
            )
        click.echo(f"\nwritten to {out}; next: stemma check {out}")
    document = {
        "status": "done",
        "config": str(out),
        "sources": [asdict(source) for source in sources],
        "fit": asdict(fitted) if fitted else None,
        "clean": rules.keys if rules else {},
    }
    return {**document, "notes": notes}, 0


def _data(source: InspectedSource) -> str:
    """Return the path, or what of it a source reads if it reads a part."""
    paths = source.source.get("paths", [source.path])
    return ", ".join(paths) if len(paths) < 4 else f"{paths[0]} and {len(paths) - 1} more"


def _tried(rules: FittingRules | None) -> list[str]:
    """The outcome of the cleaning rules on the sampled documents."""
    if rules is None or not rules.documents:
        return []
    tried = f"{rules.documents:,} sampled documents"
    if not rules.left_out:
        return [f"cleaning: the default rules drop {rules.dropped:.0%} of {tried}"]
    off = [f"  {left.rule}: {left.share:.0%}" for left in rules.left_out]
    return [
        f"cleaning: of {tried} these default rules would drop too many, so the config turns them off:",
        *off,
        f"  the other rules drop {rules.dropped:.0%}",
    ]


def _wishes(data: tuple[str, ...], kinds: tuple[str, ...], text_fields: tuple[str, ...]) -> dict[str, Any]:
    """Values of a `[PATH=]VALUE` option, by path."""
    from corpus.recognition.readings import KINDS, Wish

    wishes = dict.fromkeys(data, Wish())
    for option, values in (("--as", kinds), ("--text-field", text_fields)):
        for text in values:
            path, _, value = text.rpartition("=")
            if path and path not in wishes:
                raise click.UsageError(f"{option} {text}: expected one of DATA before =, found {path}")
            if option == "--as" and value not in KINDS:
                raise click.UsageError(f"{option} {text}: expected {', '.join(KINDS)}, found {value}")
            wish: dict[str, Any] = {"kind" if option == "--as" else "text_field": value}
            wishes |= {target: replace(wishes[target], **wish) for target in ([path] if path else data)}
    return wishes


def _ask_reading(path: str, readings: Any) -> Any:
    """Ask in the terminal which of several interpretations is meant."""
    click.echo(f"{path} can be read as:")
    for number, reading in enumerate(readings, 1):
        click.echo(f"  {number}. {reading}")
    number = click.prompt("which one", type=click.IntRange(1, len(readings)), default=1)
    return readings[number - 1]
