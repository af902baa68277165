"""Each command that the README and the guides tell a newcomer to type works, in the order they tell it."""

from __future__ import annotations

import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.guides import bash_lines, guides
from tests.support.pipelines import full_config
from tests.support.programs.command import REPOSITORY, environment, typed

README = (REPOSITORY / "README.md").read_text(encoding="utf8")
TUTORIAL = (REPOSITORY / "docs" / "tutorials" / "first-model.md").read_text(encoding="utf8")


GUIDE = (REPOSITORY / "docs" / "rerunning.md").read_text(encoding="utf8")


def commands(text: str) -> list[str]:
    """The lines of the text's bash blocks that call stemma, without comments."""
    lines = [line.split("   #")[0].strip() for line in bash_lines(text)]
    return [line for line in lines if line.startswith(".venv/bin/stemma ")]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))


def test_the_make_targets_it_names_exist_and_ci_calls_them() -> None:
    named = set(re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test"} <= named <= make_targets()
    ci = (REPOSITORY / ".ci" / "run").read_text()
    assert "make lint" in ci
    assert "make test" in ci


def test_hosted_ci_runs_the_same_and_the_licence_is_the_one_that_is_named() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["license-files"] == ["LICENSE"]
    assert "Apache License\n                           Version 2.0" in (REPOSITORY / "LICENSE").read_text()
    assert f"## {project['version']}" in (REPOSITORY / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_the_files_it_links_are_there(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (REPOSITORY / page).read_text(encoding="utf8"))
    assert links or page == "CHANGELOG.md"
    missing = [link for link in links if not link.startswith("http") and not (REPOSITORY / link).exists()]
    assert not missing


def test_the_files_that_the_guides_name_are_there() -> None:
    pages = [*REPOSITORY.glob("*.md"), *guides()]
    package = r"`((?:cli|flows|tasks|training|evaluation|corpus|infra|configs|benchmarks|tests)/[\w./-]*)`"
    named = {(page.name, path) for page in pages for path in re.findall(package, page.read_text(encoding="utf8"))}
    assert len(named) > 50
    assert not [(page, path) for page, path in sorted(named) if not (REPOSITORY / path).exists()]


@pytest.fixture(scope="module")
def after_demo(built_full: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, str]]]:
    """What a newcomer has after `make demo`, at tiny size: a config, its store, and servers that run."""
    folder = tmp_path_factory.mktemp("newcomer")
    shutil.copytree(built_full / "store", folder / "store", ignore=shutil.ignore_patterns("lineage", "mlflow"))
    (folder / "configs").mkdir()
    (folder / "configs" / "quickstart.yaml").write_text(yaml.safe_dump(full_config(), sort_keys=False))
    env = environment(STEMMA_ROOT=str(folder / "store"), STEMMA_RELAY="on")
    try:
        assert typed("up", env=env, cwd=folder).returncode == 0
        yield folder, env
    finally:
        typed("down", env=env, cwd=folder)


@pytest.mark.cluster
def test_every_command_of_the_first_tutorial_runs(after_demo: tuple[Path, dict[str, str]]) -> None:
    folder, env = after_demo
    guide, tutorial = commands(GUIDE), commands(TUTORIAL)
    assert len(guide) >= 4 and len(tutorial) >= 8
    # What both tell is typed where the tutorial has it, which ends with `down`.
    for line in [*(line for line in guide if line not in tutorial), *tutorial]:
        words = shlex.split(line)[1:]
        done = typed(*words, env=env, cwd=folder)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        # The tiny model may well answer with line breaks alone.
        assert done.stdout, f"{line} printed nothing"
