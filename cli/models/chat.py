"""stemma chat MODEL: chat with a model in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.common.completion import artifacts
from cli.common.options import SEED, FiniteRange, root_of, root_option, template_option
from cli.common.output import as_json, print_warnings
from cli.common.progress import working
from infra.io.json import read_own_json

if TYPE_CHECKING:
    from infra.errors import Problem


@click.command("chat")
@click.argument("model", shell_complete=artifacts)
@click.option("--prompt", help="Send one prompt, print the answer and exit.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--temperature", type=FiniteRange(0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=SEED, default=17, show_default=True)
@template_option
@root_option
@as_json
def command(
    model: str,
    prompt: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    chat_template_kwargs: dict[str, Any],
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Chat with MODEL: a Hugging Face folder with safetensors and a chat template, an artifact such as sft/1f2e, or a
    stage id such as rlhf for its newest artifact. Prints a warning if a gate rejected the model. The reasoning of a
    model with channels (gpt-oss) is printed on stderr, or returned as reasoning_content with --json.
    """
    model_dir = writing_model(model, root_of(root))
    refused = refused_by_gates(model_dir)
    print_warnings(refused)
    with working(f"loading {model_dir.parent.name}/{model_dir.name}", quiet=as_json):
        from training.chat.channels import Reasoning
        from training.generation.session import answer, loaded

        loaded(model_dir)

    messages: list[dict[str, str]] = []
    interactive = prompt is None and sys.stdin.isatty()
    if interactive:
        click.echo(f"{model_dir.parent.name}/{model_dir.name}; an empty line or Ctrl-D exits", err=True)
    turns = iter([prompt]) if prompt is not None else _lines(interactive)
    for question in turns:
        messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        reasoning: list[str] = []
        for piece in answer(model_dir, messages, max_new_tokens, temperature, seed, chat_template_kwargs):
            if isinstance(piece, Reasoning):
                reasoning.append(piece.text)
                if not as_json:
                    click.secho(piece.text, nl=False, dim=True, err=True)
                continue
            if reasoning and not pieces and not as_json:
                click.echo(err=True)
            pieces.append(piece)
            if not as_json:
                click.echo(piece, nl=False)
        if not as_json:
            click.echo()
        thoughts = {"reasoning_content": "".join(reasoning)} if reasoning else {}
        messages.append({"role": "assistant", "content": "".join(pieces), **thoughts})
    document = {"status": "done", "model": str(model_dir), "messages": messages}
    return {**document, "warnings": [problem.as_json() for problem in refused]}, 0


def model_folder(model: str, root: Path) -> Path:
    """The folder of a model, given as a folder, an artifact, or a stage (for its newest artifact).

    Raises ConfigError `unknown_artifact`, `no_model`.
    """
    from infra.errors import ConfigError, Problem
    from infra.io.foreign import ADAPTERS, MERGE
    from infra.store.reference import opened
    from infra.store.store import Store
    from tasks.stages import STAGES

    models = [name for name, stage in STAGES.items() if stage.makes == "model"]
    folder = Path(model) if Path(model).is_dir() else opened(Store(root, reading=True), model, models)[0]
    if not (folder / "config.json").is_file():
        if (folder / ADAPTERS).is_file():
            raise ConfigError(Problem("adapter", str(folder), "it contains adapters, not a model", MERGE))
        raise ConfigError(
            Problem("no_model", str(folder), "expected a Hugging Face model folder, but it has no config.json")
        )
    return folder


def writing_model(model: str, root: Path) -> Path:
    """The folder of a model that generates text, resolved like `model_folder`. Raises ConfigError `writes_no_text` for
    reward models and classifiers.
    """
    from infra.errors import ConfigError, Problem
    from infra.io.foreign import WRITES_TEXT

    folder = model_folder(model, root)
    kinds = read_own_json(folder / "config.json").get("architectures") or []
    if kinds and not any(kind.endswith(WRITES_TEXT) for kind in kinds):
        message = f"it is a {kinds[0]}, which scores or labels text and does not generate any"
        raise ConfigError(Problem("writes_no_text", model, message, _suggestion(folder)))
    return folder


def refused_by_gates(folder: Path) -> list[Problem]:
    """Reasons why gates rejected the model in a folder of a store; empty if the folder is not in a store."""
    from evaluation.release.registrations import refusals_of
    from infra.errors import ConfigError
    from infra.store.manifest import Manifest, store_root
    from infra.store.store import Store

    path = folder.absolute()
    try:
        return refusals_of(Store(store_root(path), reading=True), Manifest.read(path).digest)
    except (FileNotFoundError, ValueError, ConfigError):
        return []


def _suggestion(folder: Path) -> str:
    from infra.store.manifest import Manifest

    try:
        made_from = Manifest.read(folder).inputs.get("model")
    except FileNotFoundError:
        made_from = None
    suggestion = (
        f"stemma chat {made_from.stage}/{made_from.fingerprint[:8]}, which it was made from" if made_from else ""
    )
    return suggestion or "name a model that generates text, such as sft or rlhf"


def _lines(interactive: bool) -> Any:
    while True:
        if interactive:
            click.echo("> ", nl=False, err=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line
