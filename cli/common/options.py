"""Options that several commands share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from flows.config.graph import Selection

CONFIG = click.argument("config", type=click.Path(path_type=Path))


class Root(click.Path):
    """A folder, or the URL of a root on an object store; `root_of` returns the local folder for it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if "://" in str(value) else super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A range of finite floats: NaN passes any comparison, so click's range check accepts it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def root_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--root",
        type=Root(file_okay=False),
        default=None,
        metavar="DIR|URL",
        help="The store's folder, or s3://BUCKET/PREFIX; by default .stemma/ in the project, or $STEMMA_ROOT.",
    )(function)


def host_option(function: Callable[..., Any]) -> Callable[..., Any]:
    message = "Address to listen on, by default 127.0.0.1; non-loopback addresses need $STEMMA_AUTH."
    return click.option("--host", help=message)(function)


def port_option(name: str, default: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    message = f"By default {default}, or the next free port."
    return click.option(name, type=click.IntRange(1, 65535), help=message)


def new_folder_option(function: Callable[..., Any]) -> Callable[..., Any]:
    kind = click.Path(path_type=Path, file_okay=False)
    return click.option("--out", type=kind, required=True, help="A new folder.")(function)


class JsonObject(click.ParamType[dict[str, Any]]):
    """A mapping as JSON."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        from infra.io.json import BadJson, parse_json

        if isinstance(value, dict):
            return value
        try:
            parsed = parse_json(value, expected="a JSON object")
        except BadJson as error:
            self.fail(str(error), param, ctx)
        if not isinstance(parsed, dict):
            self.fail(f"expected a JSON object, not {value}", param, ctx)
        return parsed


def template_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--chat-template-kwargs",
        type=JsonObject(),
        default="{}",
        metavar="JSON",
        help="Values for the model's chat template, such as '{\"enable_thinking\": false}'.",
    )(function)


SEED = click.IntRange(0, 2**31 - 1)
"""Seeds, as in a config (`infra.config.Seed`)."""


def set_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a dotted config key, e.g. sft.seed=3."
    )(function)


def selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for flag, message in (
        ("force", "Rebuild these stages even if their artifacts exist."),
        ("until", "Run only these stages and everything upstream of them."),
        ("from", "Run only these stages and everything downstream of them."),
        ("only", "Run only these stages."),
    ):
        function = click.option(f"--{flag}", f"{flag}_", metavar="STAGE,…", multiple=True, help=message)(function)
    return click.option(
        "--strict-versions",
        is_flag=True,
        help="Rebuild artifacts built with other versions of torch, transformers, lm-eval or similar packages.",
    )(function)


def names(values: tuple[str, ...]) -> tuple[str, ...]:
    """`--only a,b --only c` as (a, b, c). Raises click.UsageError for an option without a name."""
    parsed = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    if values and not parsed:
        raise click.UsageError(f"expected one or more stages separated by commas, not {values[0]!r}")
    return parsed


def selection_of(
    only: tuple[str, ...], from_: tuple[str, ...], until: tuple[str, ...], force: tuple[str, ...], strict_versions: bool
) -> Selection:
    """The values of `selection_options`."""
    from flows.config.graph import Selection

    return Selection(
        only=names(only), from_=names(from_), until=names(until), force=names(force), strict_versions=strict_versions
    )


def settings_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """`--set a.b=c` as {"a.b": "c"}. Raises click.UsageError for one without an equals sign."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--set expects KEY=VALUE, e.g. --set sft.seed=3, not {pair!r}")
        settings[key] = value
    return settings


def root_of(root: str | None) -> Path:
    """The store's folder, which may not exist yet; for an object store, its local cache.

    Raises ConfigError for a folder that is not a store, and for an unsupported URL.
    """
    from infra import project
    from infra.store.layout import Layout

    return Layout(project.root_of(root or "")).root


def say_local(root: Path, what: str) -> None:
    """Warn on stderr that `what` is recorded on this machine only, if the root is on an object store."""
    from infra.store.roots import url_of

    if url := url_of(root):
        click.echo(f"{what} on this machine only, in {root}; its artifacts are in {url}", err=True)


def reach_server(root: Path) -> str:
    """Point Prefect's client at the server that `up` started, with the user's credentials.

    Returns the address of its page for people.

    Raises ConfigError if there is no server, or if it rejects the credentials.
    """
    from infra.errors import ConfigError, Problem
    from infra.servers.credentials import client_variables
    from infra.servers.environment import QUIET
    from infra.servers.http import check_credentials
    from infra.servers.settings import settings_of
    from infra.servers.state import prefect_api_url

    url = prefect_api_url(root)
    if url is None:
        raise ConfigError(Problem("no_server", str(root), "no Prefect server is running for this store", "stemma up"))
    check_credentials(root)
    os.environ.update(QUIET | client_variables() | {"PREFECT_API_URL": url})
    return settings_of(root).page_of(url.removesuffix("/api"))
