"""stemma serve MODEL …: an OpenAI-compatible endpoint, and a page to chat with two models side by side."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cli.common.completion import artifacts
from cli.common.options import host_option, port_option, root_of, root_option
from cli.common.output import as_json, print_warnings
from cli.models.chat import refused_by_gates, writing_model


@click.command("serve")
@click.argument("models", nargs=-1, required=True, metavar="MODEL…", shell_complete=artifacts)
@host_option
@port_option("--port", 8000)
@click.option(
    "--engine",
    type=click.Choice(["auto", "own", "vllm"]),
    default="auto",
    show_default=True,
    help="vllm: one model for many users, on loopback; auto: vllm if it is installed and a GPU is available.",
)
@click.option(
    "--requests-per-minute",
    type=click.IntRange(1),
    help="Limit per API key, or per address if no key is required; further requests get HTTP 429. "
    "By default unlimited.",
)
@click.option(
    "--at-once",
    type=click.IntRange(1),
    help="Answers that a model generates concurrently, by default 16; up to 64 more wait.",
)
@click.option(
    "--cache-gb",
    type=click.FloatRange(0, min_open=True),
    help="Size limit of a model's KV cache in GB, which also limits the context. By default 1.07 (on a GPU half of the "
    "free memory), or as much as one answer needs.",
)
@root_option
@as_json
def command(
    models: tuple[str, ...],
    host: str | None,
    port: int | None,
    engine: str,
    requests_per_minute: int | None,
    at_once: int | None,
    cache_gb: float | None,
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Serve one or more MODELs through OpenAI's protocol under /v1 until Ctrl-C, with a page to compare two of them.

    MODEL is an artifact such as sft/1f2e, a stage id such as rlhf for its newest artifact, or a Hugging Face folder.
    If $STEMMA_AUTH=user:password is set, it is required; programs send the password as their API key. Further
    clients, each with its own key, are listed in $STEMMA_API_KEYS=name:key,name:key. Warns if a gate rejected a
    model.
    """
    folder = root_of(root)
    model_folders = _by_name([writing_model(model, folder) for model in models])
    if engine == "vllm" and len(model_folders) > 1:
        raise click.UsageError("vLLM serves one model: name one, or leave --engine out")
    refused = [problem for path in model_folders.values() for problem in refused_by_gates(path)]
    print_warnings(refused)
    from infra.servers.api_keys import KEYS, RateLimit, api_keys
    from infra.servers.credentials import credentials
    from infra.servers.ports import HOST, reserved_port
    from infra.servers.settings import Settings, chosen, is_loopback

    settings, login, keys = chosen(Settings(), host), credentials(), api_keys()
    given = {KEYS: keys, "--requests-per-minute": requests_per_minute, "--at-once": at_once, "--cache-gb": cache_gb}
    own_only = next((name for name, value in given.items() if value), None)
    if engine == "vllm" and own_only:
        raise click.UsageError(f"vLLM has one key, no rate limit and its own cache: leave {own_only} out, or --engine")
    # vLLM's API key guards /v1 and little else: /invocations needs no key (vLLM's docs, "Security").
    if engine == "vllm" and not is_loopback(settings.host):
        raise click.UsageError(
            f"vLLM would serve endpoints outside /v1 without its API key at {settings.host}: leave --host at {HOST} "
            "and put a proxy in front of it that forwards /v1, or leave --engine out"
        )
    with reserved_port(port or 8000, asked_for=port is not None, host=settings.host) as free:
        url = f"http://{settings.page}:{free}"
        names = ", ".join(model_folders)
        is_for_vllm = len(model_folders) == 1 and is_loopback(settings.host) and not own_only
        if engine == "vllm" or (engine == "auto" and is_for_vllm and _vllm_fits()):
            key = login.password if login else secrets.token_hex(16)
            click.echo(f"{names} by vLLM: {url}/v1" + ("" if login else f", API key {key}"), err=True)
            _become_vllm(*next(iter(model_folders.items())), settings.host, free, key)
        from infra.servers.asgi_server import Server
        from training.serving import app
        from training.serving.answer_queue import AT_ONCE, AnswerQueue

        cache_bytes = None if cache_gb is None else int(cache_gb * 1e9)
        answers = AnswerQueue(at_once or AT_ONCE, cache_bytes=cache_bytes)
        limit = RateLimit(requests_per_minute, time.monotonic) if requests_per_minute else None
        served = app(model_folders, settings.callers(free), login, answers, keys=keys, rate_limit=limit)
        click.echo(f"{names}: {url}/v1, chat page: {url}", err=True)
        Server(served, settings.host, free, on_end=answers.end).run()
    document = {"status": "done", "models": {name: str(path) for name, path in model_folders.items()}, "url": url}
    return {**document, "warnings": [problem.as_json() for problem in refused]}, 0


def _by_name(folders: Sequence[Path]) -> dict[str, Path]:
    """The folders by `_name`. Folders with the same name get as many parent folders as make them distinct."""
    by_name: dict[str, Path] = {}
    for folder in dict.fromkeys(path.absolute() for path in folders):
        same = [other.absolute() for other in folders if _name(other) == _name(folder) and other.absolute() != folder]
        counts = range(2, len(folder.parts) + 1)
        lengths = (n for n in counts if all(other.parts[-n:] != folder.parts[-n:] for other in same))
        by_name["/".join(folder.parts[-next(lengths, len(folder.parts)) :]) if same else _name(folder)] = folder
    return by_name


def _name(folder: Path) -> str:
    """Name of a model in requests: `sft/0761f4fa` of the store, else its folder's name."""
    is_artifact = (folder / "manifest.json").is_file()
    return f"{folder.parent.name}/{folder.name[:8]}" if is_artifact else folder.absolute().name


def _vllm_fits() -> bool:
    from infra.launch.launchers import VllmConfig
    from infra.servers.vllm import program_of

    if program_of(VllmConfig()) is None:
        return False
    import torch

    return torch.cuda.is_available()


def _become_vllm(name: str, folder: Path, host: str, port: int, key: str) -> None:
    """Replace this process with vLLM, so that signals and the exit code are vLLM's own."""
    from infra.launch.launchers import VllmConfig
    from infra.servers.vllm import NO_USAGE_STATS, own_environment, program_of, vllm_command

    program = program_of(VllmConfig())
    if program is None:
        raise click.UsageError(
            "vLLM is not installed: install it in a separate environment and set $STEMMA_VLLM to its program, or leave "
            "--engine out"
        )
    command = vllm_command(program, folder, name, "--host", host, "--port", str(port))
    os.execve(program, command, {**own_environment(), **NO_USAGE_STATS, "VLLM_API_KEY": key})
