"""stemma adopt STAGE FOLDER: import a corpus, shards or a model that was made elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common.options import root_of, root_option
from cli.common.output import as_json


@click.command("adopt")
@click.argument("stage")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--note", default="", help="Origin of the artifact, to record in its lineage.")
@root_option
@as_json
def command(stage: str, folder: Path, note: str, root: str | None, as_json: bool) -> tuple[dict[str, Any], int]:
    """Copy FOLDER into the store as an artifact of STAGE, its provenance marked as imported.

    FOLDER contains the files that the stage would have written: documents/part-*.parquet for ingest and clean; train/,
    validation/ and meta.json for shard; a Hugging Face folder with safetensors for a model or a tokenizer; train.jsonl
    and heldout.jsonl for pairs. Prints the config lines that use it.
    """
    from infra.store.store import Store
    from tasks.building.adopted import adopt

    store = Store(root_of(root))
    target, manifest, new = adopt(store, stage, folder, note)
    lines = f'adopted:\n  {stage}: "{manifest.fingerprint}"'
    if not as_json:
        message = "imported as" if new else "already in the store:"
        click.echo(f"{message} {store.location(manifest)}\n\nadd to the config:\n\n{lines}")
    document = {
        "status": "done",
        "root": store.place,
        "stage": stage,
        "fingerprint": manifest.fingerprint,
        "digest": manifest.digest,
        "path": str(target),
        "new": new,
        "adopted": dict(manifest.adopted or {}),
        "config": lines,
    }
    return document, 0
