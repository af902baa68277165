"""stemma review export, import: people review a sample of a corpus and mark problems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.completion import artifacts
from cli.common.options import SEED, new_folder_option, root_of, root_option
from cli.common.output import as_json, print_table


@click.group("review")
def command() -> None:
    """Have people review a sample of a corpus, and count the problems they mark by source.

    \b
    stemma review export clean --out look1        200 documents and a page to mark them
    stemma review import look1 judgements-*.jsonl
    """


@command.command("export", short_help="Write documents for people to review.")
@click.argument("artifact", shell_complete=artifacts)
@new_folder_option
@click.option("--documents", "count", type=click.IntRange(1), default=200, show_default=True)
@click.option("--by-source", is_flag=True, help="Draw equally from each source, so that small sources are seen too.")
@click.option("--seed", type=SEED, default=17, show_default=True, help="Seed for drawing documents.")
@root_option
@as_json
def export(
    artifact: str, out: Path, count: int, by_source: bool, seed: int, root: str | None, as_json: bool
) -> tuple[dict[str, Any], int]:
    """Draw documents from ARTIFACT, such as clean or dedupe/1f2e, and write them as JSON lines and as a keyboard-driven
    page that works offline (review.html)."""
    from evaluation.people.pairs import require_free
    from evaluation.people.sample import Review, sample
    from infra.errors import stage_error
    from infra.store.reference import opened
    from infra.store.store import Store
    from tasks.stages import STAGES

    require_free(out)
    holding = {name for name, stage in STAGES.items() if stage.makes == "documents"}
    folder, manifest = opened(Store(root_of(root), reading=True), artifact, sorted(holding))
    address = f"{manifest.stage}/{manifest.fingerprint}"
    if manifest.stage not in holding:
        raise stage_error(
            "no_documents", artifact, f"{address} holds no documents", f"name one of {', '.join(holding)}"
        )
    documents, sizes = sample(folder, count, seed, by_source=by_source)
    drawn = {
        "artifact": address, "digest": manifest.digest, "by_source": by_source, "seed": seed, "documents": sizes,
    }  # fmt: skip
    created = Review(documents, drawn)
    created.write(out, f"What is odd in {manifest.step or manifest.stage}?")
    if not as_json:
        click.echo(f"{len(documents)} of {sum(sizes.values()):,} documents in {out}")
        click.echo(f"review them: open {out / 'review.html'} in a browser")
        click.echo(f"then:        stemma review import {out} FILE …")
    return {"status": "done", "review": created.id, "documents": len(documents), "out": str(out.absolute())}, 0


@command.command("import", short_help="Read marks: rates by source, and flagged documents.")
@click.argument("folder", metavar="REVIEW", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument(
    "files", nargs=-1, required=True, metavar="FILE …", type=click.Path(path_type=Path, exists=True, dir_okay=False)
)
@as_json
def import_(folder: Path, files: tuple[Path, ...], as_json: bool) -> tuple[dict[str, Any], int]:
    """Read the marks of a REVIEW from files of its page, and report the share of marked documents per source and how
    well people agree. Writes marks.jsonl, flagged.jsonl, quarantine.jsonl and summary.json to marked/ in REVIEW."""
    from evaluation.people.judgements import Judgements
    from evaluation.people.marks import write_outcome
    from evaluation.people.sample import Review

    review = Review.read(folder)
    marks = Judgements.read(files, review)
    target = folder / "marked"
    summary = write_outcome(review, marks, target)
    if not as_json:
        counts = f"{summary['marks']} marks of {summary['marked_documents']} of {summary['documents']} documents"
        click.echo(f"{counts} by {len(summary['annotators'])} people, {summary['quarantined']} quarantined")
        if agreement := summary["agreement"]:
            click.echo(f"agreement: Krippendorff's α {agreement['value']:.2f}; 0 is chance, 1 perfect")
        rows = [
            {**row, "share": f"{row['value']:.1%} ({row['low']:.1%} to {row['high']:.1%})"}
            for row in [*summary["rates"], *summary["by_source"]]
        ]
        print_table(rows, {"source": "source", "mark": "mark", "n": "documents", "share": "share, 95 % interval"})
        click.echo(f"{summary['flagged']} flagged documents in {target / 'flagged.jsonl'}")
        for row in marks.aside[:5]:
            click.echo(f"quarantined: {row.where}: {row.reason}", err=True)
    return {"status": "done", **summary, "out": str(target.absolute())}, 0
