"""stemma export MODEL DIR: a model as a folder for the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common.completion import artifacts
from cli.common.options import root_of, root_option
from cli.common.output import as_json, print_warnings
from cli.models.chat import model_folder, refused_by_gates

if TYPE_CHECKING:
    from evaluation.release.adapters import LoadedAdapters


@click.command("export")
@click.argument("model", shell_complete=artifacts)
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Export even if a gate rejected the model; its card states the rejection.")
@click.option(
    "--quantize",
    type=click.Choice(["int8", "fp8", "gguf", "awq", "gptq"]),
    help="int8, fp8: 8-bit weights of linear layers, by torchao, as transformers loads them. gguf: also write a file "
    "for llama.cpp, if its convert_hf_to_gguf.py is on the PATH or in $LLAMA_CPP. awq, gptq: print how to write "
    "them with another tool.",
)
@click.option("--adapters", is_flag=True, help="Export only the LoRA adapters of an sft model, in PEFT's format.")
@click.option(
    "--base",
    default="",
    help="With --adapters: the base model's folder, or its name on the Hub, for adapter_config.json.",
)
@root_option
@as_json
def command(
    model: str,
    folder: Path,
    force: bool,
    quantize: str | None,
    adapters: bool,
    base: str,
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Write MODEL to FOLDER in the Hub's layout: weights, tokenizer with its chat template, generation config, and the
    model card as README.md. Before FOLDER appears, a new process without this project loads it with transformers,
    runs generate, the chat template and a pipeline, and its logits are compared with the model's.

    With --adapters, PEFT loads the adapters onto the base model instead, and the logits must equal those of the
    merged model up to rounding.

    MODEL is an artifact such as sft/1f2e, or a stage id such as rlhf for its newest artifact. FOLDER must be new or
    empty. A model that a gate rejected is not written unless --force is given.
    """
    if adapters and quantize:
        raise click.UsageError("--adapters and --quantize exclude each other: adapters are not quantized")
    if base and not adapters:
        raise click.UsageError("--base needs --adapters")
    from evaluation.release.export import REGISTERED_CARD, card_of, export
    from evaluation.release.quantized import written_here
    from evaluation.release.registrations import newest_registration
    from evaluation.results.artifacts import read_artifacts
    from infra.errors import GateRefused
    from infra.store.reference import require_whole
    from infra.store.store import Store

    quantization = written_here(quantize)
    store = Store(root_of(root), reading=True)
    source = model_folder(model, store.root)
    if (manifest := store.read(source)) is not None:
        require_whole(store, source, manifest)
    refused = refused_by_gates(source)
    if refused and not force:
        fix = "--force exports it anyway; stemma chat works without it"
        raise GateRefused(*(replace(problem, fix=f"{problem.fix}; {fix}") for problem in refused))
    print_warnings(refused)
    artifact = read_artifacts({source.parent.name: source})[source.parent.name]
    registered = newest_registration(store, manifest.digest) if manifest else None
    if registered:
        card_folder, registration = registered
        registered = store.peek(registration, REGISTERED_CARD, folder=card_folder), registration
    card, card_from = card_of(artifact, registered)
    document: dict[str, Any] = {
        "status": "done",
        "model": str(source),
        "path": str(folder.absolute()),
        "card_from": card_from,
        "warnings": [problem.as_json() for problem in refused],
    }
    if adapters:
        from evaluation.release.adapters import export_adapters

        written = export_adapters(artifact, card, folder, base)
        if not as_json:
            _print_adapters(written, folder)
        return {**document, "adapters": asdict(written)}, 0
    loaded = export(artifact, card, folder, quantization)
    if not as_json:
        chat = "with" if loaded.chat_template else "without"
        click.echo(f"{loaded.architecture}, {loaded.parameters:,} parameters, {chat} a chat template")
        owner = "those of the quantized model" if loaded.deviation else "those of the model"
        click.echo(f"tried in a new process that has only transformers; its logits equal {owner}:")
        for check in loaded.checks:
            click.echo(f"  {check}")
        if loaded.deviation:
            reference = f"the model's largest is {loaded.largest_logit:.3g} in magnitude"
            click.echo(f"quantized to {quantize}: a logit differs by up to {loaded.deviation:.3g}; {reference}")
        click.echo(f"card: {card_from or 'without evaluations, since the model was not registered'}")
        click.echo(f"written to {folder}")
    return {**document, "loaded": asdict(loaded)}, 0


def _print_adapters(written: LoadedAdapters, folder: Path) -> None:
    click.echo(f"{written.weights:,} weights of adapters, {written.rows:,} rows of tokens among them")
    for other in written.others:
        click.echo(f"not tried with {other}")
    if written.checks:
        click.echo(f"tried in a new process, with PEFT and {written.tried_with}:")
        for check in written.checks:
            click.echo(f"  {check}")
        click.echo(
            f"a logit differs from the merged model's by up to {written.deviation:.3g}; "
            f"its largest is {written.largest_logit:.3g} in magnitude"
        )
    else:
        click.echo("not tried: PEFT is not installed (pip install peft)")
    click.echo(f"base model in adapter_config.json: {written.base}")
    click.echo(f"written to {folder}")
