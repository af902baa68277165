"""stemma show-chat MODEL [FILE]: conversations as the model's tokens, marking those that fine-tuning learns."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from cli.common.completion import artifacts
from cli.common.options import root_of, root_option, template_option
from cli.common.output import as_json
from cli.models.chat import model_folder


@click.command("show-chat")
@click.argument("model", shell_complete=artifacts)
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--limit", type=click.IntRange(1), default=3, show_default=True, help="Conversations of FILE to print.")
@click.option("--ids", is_flag=True, help="Print one token per line, with its id.")
@template_option
@root_option
@as_json
def command(
    model: str,
    file: Path | None,
    limit: int,
    ids: bool,
    chat_template_kwargs: dict[str, Any],
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Print conversations as MODEL reads them, with its own chat template if it has one. Tokens that fine-tuning learns
    are green, or in ⟦ ⟧ without colours.

    FILE: JSON lines with `messages`, or `prompt` and `response`, and optionally `tools`, such as train.jsonl of an
    instructions artifact; without FILE a short conversation is shown.
    """
    folder = model_folder(model, root_of(root))
    from training.chat.base import Chat
    from training.chat.shown import SAMPLE, in_line, read_conversations, shown

    chat = Chat.load(folder, chat_template_kwargs)
    colours = sys.stdout.isatty()
    conversations = [(SAMPLE, [])] if file is None else read_conversations(file, limit)
    rendered = [shown(chat, messages, tools) for messages, tools in conversations]
    for tokens in () if as_json else rendered:
        if ids:
            for token in tokens:
                line = f"{token.id:>8} {'learnt' if token.learnt else '      '} {token.text!r}"
                click.echo(click.style(line, fg="green") if colours and token.learnt else line)
        elif colours:
            click.echo(
                "".join(click.style(token.text, fg="green" if token.learnt else "bright_black") for token in tokens)
            )
        else:
            click.echo(in_line(tokens))
        learnt = sum(token.learnt for token in tokens)
        click.echo(f"{len(tokens):,} tokens, {learnt:,} learnt", err=True)
    document = [[asdict(token) for token in tokens] for tokens in rendered]
    return {"status": "done", "model": str(folder), "conversations": document}, 0
