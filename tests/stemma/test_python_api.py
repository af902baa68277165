"""Stemma from Python: what `import stemma` does and does not do, and the guide's session."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import stemma
from infra.store.store import Store
from stemma.home import PACKAGES, add_home
from tests.support.artifacts import make_artifact
from tests.support.pipelines import trained_config
from tests.support.programs.command import REPOSITORY, environment, write_config

GUIDE = REPOSITORY / "docs" / "python.md"
NOTEBOOK = REPOSITORY / "docs" / "tutorials" / "small-model.ipynb"


def test_importing_it_imports_nothing_else_and_starts_nothing() -> None:
    code = (
        "import sys, threading; before = set(sys.modules); import stemma; "
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(names - set(sys.stdlib_module_names)), threading.active_count(), len(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    names, threads, count = done.stdout.rsplit(maxsplit=2)
    assert (names, threads) == ("['stemma']", "1") and int(count) < 100, done.stdout


def test_a_process_with_another_package_of_such_a_name_is_refused_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("training")
    other.__file__ = "/elsewhere/training/__init__.py"
    other.__path__ = ["/elsewhere/training"]
    monkeypatch.setitem(sys.modules, "training", other)
    with pytest.raises(ImportError, match=r"another package training, from /elsewhere/training/__init__\.py"):
        add_home()


def test_a_store_is_read_as_data_frames(tmp_path: Path) -> None:
    lines = [{"step": step, "time": 1.0, "values": {"loss": 3.0 - step}} for step in (1, 2)]
    files = {"weights": "w", "aux/metrics.jsonl": "".join(json.dumps(line) + "\n" for line in lines)}
    manifest = make_artifact(Store(tmp_path), "sft", files, finished="2026-11-28T10:00:00+00:00")
    frame = stemma.artifacts(tmp_path, models_only=True)
    assert list(frame["artifact"]) == [f"sft/{manifest.fingerprint}"]
    assert str(frame["finished"].dtype).startswith("datetime64")
    curves = stemma.metrics("sft", root=tmp_path)
    assert curves[["step", "metric", "value"]].values.tolist() == [[1, "loss", 2.0], [2, "loss", 1.0]]
    assert stemma.runs(tmp_path).empty and stemma.figures(tmp_path).empty


def _session(folder: Path, blocks: Sequence[str]) -> str:
    """Run blocks of code in one session of a new process; return what it printed."""
    (folder / "session.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "session.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment(STEMMA_ROOT=str(folder / "store")),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_the_session_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Risk: the API and its guide part. Every block of Python in the page is executed, in one session."""
    config = trained_config(tmp_path, 4)
    write_config(tmp_path / "mine.yaml", config)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) == 7
    printed = _session(tmp_path, blocks)
    assert "pretrain built" in printed and "tokenizer.vocab_size" in printed


@pytest.mark.long
def test_the_notebook_runs_in_an_empty_folder(tmp_path: Path) -> None:
    """Risk: the API and its tutorial part. Every cell is executed, in one session; the value of the last line counts
    as an expression, as Jupyter shows it."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) == 8 and not any(cell.get("outputs") for cell in cells)
    shown = "print(comparison.differences.to_string(), tokenizer.decode(answer[0]))"
    printed = _session(tmp_path, [*code, shown])
    assert "The river of the village" in printed and "pretrain.duration" in printed


@pytest.mark.long
def test_a_wheel_has_one_name_and_runs_from_it(tmp_path: Path) -> None:
    """Risk: a wheel overwrites other people's packages, or its command does not find its packages."""
    source = tmp_path / "source"
    source.mkdir()
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=REPOSITORY, capture_output=True, check=False
    )
    if listed.returncode:
        pytest.skip("the tests do not run in a git repository")
    for name in filter(None, listed.stdout.decode().split("\0")):
        if not name.startswith(("tests/", "benchmarks/", "docs/")) and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=source,
        env=environment(PYTHONPATH=str(source)),
        capture_output=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as content:
        content.extractall(site)
    assert {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")} == {"stemma"}
    assert next(site.glob("*.dist-info/top_level.txt")).read_text() == "stemma\n"
    assert {path.name for path in (site / "stemma" / "application").iterdir()} >= {*PACKAGES, "configs"}
    write_config(tmp_path / "mine.yaml", trained_config(tmp_path, 4))
    words = ["check", "mine.yaml", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from stemma.command import main; main()", *words],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(site)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and str(tmp_path / ".stemma") in done.stdout, done.stderr
