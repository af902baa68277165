"""An environment that is not the lock's is named with what differs, where it makes something fail."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from cli.common.output import _as_stemma_error
from infra import installed
from infra.installed import differing_packages
from tasks.processes.failures import failure_of


def lock(folder: Path, **versions: str) -> None:
    pinned = [f"{name}=={version} \\\n    --hash=sha256:{'0' * 64}" for name, version in versions.items()]
    (folder / "requirements.lock").write_text("\n".join([*pinned, "waitress==9 ; sys_platform == 'win32' \\", ""]))


def test_this_environment_is_the_locks() -> None:
    assert not differing_packages()


def test_a_lock_that_is_installed_partly_explains_a_failed_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "PROJECT", tmp_path)
    error = ModuleNotFoundError("No module named 'polars'")
    (problem,) = failure_of(error, "clean", tmp_path).problems
    assert problem.code == "crashed", "there is no lock"

    torch = metadata.version("torch").partition("+")[0]
    lock(tmp_path, torch=f"{torch}+cpu", numpy="9.9", not_here="1.0")
    assert differing_packages() == [
        f"numpy {metadata.version('numpy')} (lock: 9.9)",
        "not_here is missing (lock: 1.0)",
    ]
    for failure in (failure_of(error, "clean", tmp_path), _as_stemma_error(error)):
        (problem,) = failure.problems
        assert problem.code == "not_installed" and "run make .venv/.installed" in problem.fix
        assert "No module named 'polars'; 2 installed packages differ from requirements.lock: numpy" in problem.message
    (problem,) = failure_of(ValueError("no import"), "clean", tmp_path).problems
    assert problem.code == "crashed"


def test_a_torch_for_cpus_needs_none_of_cudas_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "PROJECT", tmp_path)
    (tmp_path / "torch-2.15.0+cpu.dist-info").mkdir()
    (tmp_path / "torch-2.15.0+cpu.dist-info" / "METADATA").write_text("Name: torch\nVersion: 2.15.0+cpu\n")
    here = list(metadata.distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(metadata, "distributions", lambda: here)
    lock(tmp_path, **{"torch": "2.15.0", "nvidia-cublas": "13.4", "cuda-toolkit": "13.2", "triton": "3.9"})
    assert differing_packages() == []
    lock(tmp_path, **{"torch": "2.15.0", "nvidia-cublas": "13.4", "tritonclient": "3.9"})
    assert differing_packages() == ["tritonclient is missing (lock: 3.9)"]
