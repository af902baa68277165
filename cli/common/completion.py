"""stemma completion SHELL: the script that completes commands, options and names of artifacts in a shell."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

VARIABLE = "_STEMMA_COMPLETE"
FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "fish": "~/.config/fish/config.fish"}


@click.command("completion")
@click.argument("shell", type=click.Choice(list(FILES)), required=False)
def command(shell: str | None) -> None:
    """Print the script that completes commands, options and artifacts in SHELL, by default that of $SHELL.

    \b
    eval "$(stemma completion bash)"    in ~/.bashrc
    stemma completion fish | source     in ~/.config/fish/config.fish
    """
    shell_name = shell or Path(os.environ.get("SHELL", "")).name
    made_for = get_completion_class(shell_name) if shell_name in FILES else None
    if made_for is None:
        raise click.UsageError(f"expected one of {', '.join(FILES)}: stemma completion bash")
    from cli.commands import stemma

    click.echo(made_for(stemma, {}, "stemma", VARIABLE).source())


def artifacts(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Stages with artifacts; after a slash the artifacts of that stage. Empty where there is no store."""
    from cli.common.options import root_of
    from infra.errors import StemmaError
    from infra.store.layout import MIRROR, Layout

    stage, slash, _beginning = incomplete.partition("/")
    candidates: list[Any] = []
    try:
        layout = Layout(root_of(ctx.params.get("root")))
        if layout.url:  # only artifacts in the local cache: completion never queries a server
            files = sorted((layout.root / MIRROR).glob(f"{stage}/*.json" if slash else "*"))
            candidates = [f"{stage}/{file.stem[:8]}" for file in files] if slash else [file.name for file in files]
        else:
            candidates = [f"{stage}/{path.name[:8]}" for path in layout.artifacts(stage)] if slash else layout.stages()
    except StemmaError:
        return []
    return [CompletionItem(name) for name in candidates if name.startswith(incomplete)]
