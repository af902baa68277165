"""The documentation as a site: every page is in its tree, every link leads somewhere, the reference has everything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.commands import COMMANDS
from cli.reference import pages
from infra.config import StageConfig
from tasks.stages import OUR_STAGES
from tests.support.guides import DOCS, guides
from tests.support.programs.command import REPOSITORY

GENERATED = DOCS / "reference" / "generated"


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return pages()


def unfenced(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors of headings, as GitHub and MyST write them."""
    headings = re.findall(r"^#+ (.*)$", unfenced(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower().strip()).replace(" ", "-") for heading in headings}


def entries(page: Path, text: str) -> set[Path]:
    """The pages that the toctrees of a page name."""
    found: set[Path] = set()
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        for line in (line for line in block.splitlines() if line and not line.startswith(":")):
            folder = REPOSITORY if line.startswith("/") else page.parent
            name = f"{line.lstrip('/')}.md"
            found |= set(folder.glob(name)) if ":glob:" in block else {folder / name}
    return found


def test_every_page_is_in_the_tree_of_the_site(reference: dict[str, str]) -> None:
    made = {GENERATED / path: text for path, text in reference.items()}
    texts = made | {path: path.read_text(encoding="utf8") for path in guides()}
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            assert page in texts or page.exists(), page
            waiting += entries(page, texts.get(page, ""))
    assert not texts.keys() - reached


def test_every_link_of_a_page_leads_somewhere() -> None:
    broken = []
    for page in (*guides(), *REPOSITORY.glob("*.md"), *(REPOSITORY / "benchmarks").rglob("*.md")):
        links = re.findall(r"\]\(([^()#\s]*)(?:#([^()\s]*))?\)", unfenced(page.read_text(encoding="utf8")))
        for target, anchor in links:
            if target.startswith(("http:", "https:", "mailto:")):
                continue
            file = page.parent / target if target else page
            if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf8"))):
                broken.append((str(page), target, anchor))
    assert not broken


def test_the_reference_has_every_stage_with_its_keys_and_every_command(reference: dict[str, str]) -> None:
    for stage in OUR_STAGES.values():
        text = reference[f"stages/{stage.name}.md"]
        assert stage.about in text.replace("\\", "")
        if stage.makes != "measurement":
            assert issubclass(stage.config, StageConfig)
            keys = {field.alias or name for name, field in stage.config.model_fields.items()}
            assert not {key for key in keys if f"`{stage.name}.{key}`" not in text}
    assert all(f"# stemma {name}\n" in reference[f"commands/{name}.md"] for name in COMMANDS)
    assert "--until" in reference["commands/run.md"] and "default `17`" in reference["stages/sft.md"]


@pytest.mark.long
def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    python = REPOSITORY / ".venv-docs" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-docs: make docs")
    subprocess.run([sys.executable, "-m", "cli.reference", str(GENERATED)], cwd=REPOSITORY, check=True)
    sphinx = [python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "doctrees"]
    built = subprocess.run(
        [*sphinx, "-c", "docs", ".", tmp_path / "html"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    loads = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//|url\((?:https?:)?//")
    files = [path for suffix in ("html", "css") for path in (tmp_path / "html").rglob(f"*.{suffix}")]
    assert len(files) > 100
    assert not [path for path in files if loads.search(path.read_text(encoding="utf8"))]
