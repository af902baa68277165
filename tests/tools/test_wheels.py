"""tools/wheels.py lists what a machine with its own torch lacks of the lock."""

import subprocess
import sys
import zipfile

import pytest

from tools.wheels import ELSEWHERE, differing, fetch, leave_folders_out, locked_requirements, missing, packages

MACHINE = (
    "torch==2.11.0+cu130\nnumpy==2.1.0\ntransformers==5.17.0\npandas==2.0.0\nclick==8.3.0\nrich\nfsspec==2026.1.0\n"
)


def test_a_machine_gets_what_it_lacks_and_keeps_its_torch() -> None:
    needed = missing(packages(MACHINE), "3.12", ELSEWHERE)
    assert {"mosaicml", "mosaicml-streaming", "prefect", "mlflow", "lm-eval", "pytest-timeout"} <= set(needed)
    assert not {"torch", "torchvision", "triton", "numpy", "transformers", "click", "fsspec"} & set(needed)
    assert not {"pandas", "rich"} & set(needed), "another version, or an unknown one, stays"
    assert differing(packages(MACHINE)) == ["wheels: pandas 2.0.0 of the machine stays; Stemma asks for ==3.1.1"]
    assert not {"trl", "mypy", "datatrove"} & set(needed), "tools of developers stay here"
    assert not ELSEWHERE & set(needed)
    assert {"oci", "botocore"} <= set(missing(packages(MACHINE), "3.12"))


def test_every_package_has_its_hashes() -> None:
    locked = locked_requirements()
    assert locked.keys() >= ELSEWHERE | set(missing(packages("torch==2.11.0"), "3.12"))
    assert locked["prefect"].startswith("prefect==3.6.29 \\\n    --hash=sha256:")
    assert all("--hash=sha256:" in requirement for requirement in locked.values())


def test_a_listing_without_torch_is_refused() -> None:
    with pytest.raises(ValueError, match="expected torch among the packages of the machine"):
        packages("numpy==2.1.0\n")


def test_what_cannot_be_had_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    reason = fetch("stemma-absent==1.0 --hash=sha256:" + "0" * 64, "3.12", tmp_path)
    assert reason.startswith(
        "wheels: stemma-absent: no wheel for Python 3.12 on x86-64 Linux, and none could be built: "
    )
    assert not list(tmp_path.iterdir())


def test_pages_of_servers_are_left_out_of_a_wheel_that_installs(tmp_path) -> None:
    wheel = tmp_path / "mlflow-1.0-py3-none-any.whl"
    names = [
        "mlflow/__init__.py",
        "mlflow/server/js/page.js",
        "mlflow-1.0.dist-info/METADATA",
        "mlflow-1.0.dist-info/WHEEL",
    ]
    texts = [
        "",
        "page",
        "Metadata-Version: 2.1\nName: mlflow\nVersion: 1.0\n",
        "Wheel-Version: 1.0\nTag: py3-none-any\n",
    ]
    with zipfile.ZipFile(wheel, "w") as file:
        for name, text in zip(names, texts, strict=True):
            file.writestr(name, text)
        file.writestr("mlflow-1.0.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    leave_folders_out(wheel)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(tmp_path / "site")]
    subprocess.run([*pip, str(wheel)], check=True)
    assert (tmp_path / "site/mlflow/__init__.py").exists()
    assert not (tmp_path / "site/mlflow/server").exists()
