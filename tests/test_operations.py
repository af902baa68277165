"""Commands of the week in docs/operations/index.md: each runs exactly as written, in its order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cli.commands import stemma
from tests.support.guides import bash_lines
from tests.support.pipelines import data_config
from tests.support.programs.command import REPOSITORY, environment, write_config

GUIDE = (REPOSITORY / "docs" / "operations" / "index.md").read_text(encoding="utf8")
ENDS_WITH = re.compile(r"#.*\bends with (\d+)")


@pytest.fixture
def project(built_data: Path, tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A project on Monday, at tiny size: a checkout with its environment, a config, a store."""
    folder = tmp_path / "stemma"
    shutil.copytree(built_data / "store", folder / ".stemma", ignore=shutil.ignore_patterns("lineage", "mlflow"))
    (folder / "configs").mkdir()
    write_config(folder / "configs" / "quickstart.yaml", {**data_config(built_data), "name": "quickstart"})
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in {"stemma": "cli.main", "mlflow": "mlflow"}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m {module} "$@"\n')
        program.chmod(0o755)
    env = environment(STEMMA_ROOT=str(folder / ".stemma"), STEMMA_RELAY="on")
    try:
        yield folder, env
    finally:
        subprocess.run([programs / "stemma", "down"], env=env, cwd=folder, capture_output=True, check=False)


def test_every_command_of_the_week_is_one_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands, arguments and options, after parsing; the long test below runs them."""
    lines = [shlex.split(line, comments=True) for line in bash_lines(GUIDE)]
    asked = [words[1:] for words in lines if words[0] == ".venv/bin/stemma"]
    assert len(asked) > 15
    monkeypatch.chdir(REPOSITORY)
    for words in asked:
        name, command, rest = stemma.resolve_command(click.Context(stemma), words)
        assert command is not None, words
        command.make_context(name, list(rest))


@pytest.mark.cluster
@pytest.mark.long
def test_every_command_of_the_week_runs_as_written(project: tuple[Path, dict[str, str]]) -> None:
    """The risk: commands that work alone, and not in the order in which the page lists them."""
    folder, env = project
    lines = bash_lines(GUIDE)
    commands = {words[1] for line in lines if (words := line.split())[0] == ".venv/bin/stemma"}
    assert commands >= {
        "up",
        "status",
        "deploy",
        "schedule",
        "pause-schedule",
        "resume-schedule",
        "logs",
        "run",
        "why",
        "verify",
        "down",
    }
    for line in lines:
        wanted = ENDS_WITH.search(line)
        done = subprocess.run(["bash", "-c", line], env=env, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == (int(wanted[1]) if wanted else 0), f"{line}\n{done.stdout}\n{done.stderr}"
        if line.startswith(".venv/bin/stemma schedule"):
            assert "0 2 * * * Europe/Berlin: next at" in done.stdout, line
    assert os.listdir(folder / "stemma-broken")


def test_the_pages_it_links_are_there() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", GUIDE) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (REPOSITORY / "docs" / "operations" / link).exists()]


def test_the_codes_it_explains_are_ones_that_can_come() -> None:
    listed = GUIDE.partition("The most common codes")[2].partition("## Friday")[0]
    explained = set(re.findall(r"`([a-z]+_[a-z]+)`", listed))
    folders = [REPOSITORY / name for name in ("cli", "flows", "tasks", "infra")]
    sources = "".join(path.read_text(encoding="utf8") for folder in folders for path in folder.rglob("*.py"))
    assert len(explained) > 5
    assert not {code for code in explained if f'"{code}"' not in sources}
