"""infra/install.sh with a lock of three packages: torch's build for CPUs from an index that a variable names."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from tests.support.programs.command import REPOSITORY

PROGRAM = "import importlib.metadata as m; print(sorted(f'{d.name} {d.version}' for d in m.distributions()))"


def make_wheel(folder: Path, name: str, version: str, code: str = "") -> Path:
    module = name.replace("-", "_")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}-{version}-py3-none-any.whl"
    info = f"{module}-{version}.dist-info"
    files = {
        f"{module}/__init__.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(file, text)
    return path


@contextmanager
def index_of(folder: Path) -> Iterator[str]:
    """A package index on loopback: its address."""
    quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def project(folder: Path) -> None:
    """A project whose environment has nothing but uv and whose lock names one package."""
    (folder / "infra").mkdir()
    shutil.copy(REPOSITORY / "infra" / "install.sh", folder / "infra")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (folder / ".venv" / "bin" / "uv").symlink_to(Path(sys.executable).with_name("uv"))
    plain = make_wheel(folder, "plain", "1.0")
    digest = hashlib.sha256(plain.read_bytes()).hexdigest()
    (folder / "requirements.lock").write_text(f"plain @ {plain.as_uri()} \\\n    --hash=sha256:{digest}\n")


def install(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    keys = {"UV_CACHE_DIR": str(folder / "cache"), "UV_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    env = os.environ | keys | variables
    command = ["infra/install.sh", "packages"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_torch_comes_without_cuda_from_an_index_that_a_variable_names(tmp_path: Path) -> None:
    project(tmp_path)
    unreachable = f"    --hash=sha256:{'0' * 64}\n"
    lock = f"nvidia-cublas==13.4 \\\n{unreachable}torch==2.15.0 \\\n{unreachable}torchvision==0.30.0 \\\n{unreachable}"
    with (tmp_path / "requirements.lock").open("a") as file:
        file.write(lock)
    index = tmp_path / "index"
    for name, version in (("torch", "2.15.0+cpu"), ("torch", "2.16.0+cpu"), ("torchvision", "0.30.0+cpu")):
        wheel = make_wheel(index / name, name, version, "class version:\n    cuda = None\n")
        page = index / name / "index.html"
        link = f'<a href="{wheel.name}">{wheel.name}</a>\n'
        page.write_text((page.read_text() if page.exists() else "") + link)

    with index_of(index) as address:
        done = install(tmp_path, STEMMA_CPU_INDEX=address)
        assert done.returncode == 0, done.stderr
        assert done.stderr == "installing 4 pinned packages into .venv, torch without CUDA\n"
        listed = subprocess.run([tmp_path / ".venv/bin/python", "-c", PROGRAM], capture_output=True, text=True)
        assert listed.stdout.strip() == "['plain 1.0', 'torch 2.15.0+cpu', 'torchvision 0.30.0+cpu']"

        make_wheel(index / "torch", "torch", "2.15.0+cpu", "class version:\n    cuda = '13.2'\n")
        shutil.rmtree(tmp_path / ".venv" / "lib")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
        done = install(tmp_path, STEMMA_CPU_INDEX=address, UV_CACHE_DIR=str(tmp_path / "other"))
    assert done.returncode == 1 and "a build of torch for CPUs was expected" in done.stderr


def test_libraries_of_an_earlier_cuda_are_removed(tmp_path: Path) -> None:
    project(tmp_path)
    uv = tmp_path / ".venv" / "bin" / "uv"
    old = [make_wheel(tmp_path, name, "12.6") for name in ("nvidia-cublas-cu12", "flash-attn")]
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--python", tmp_path / ".venv/bin/python", *old]
    subprocess.run(command, check=True, env=os.environ | {"UV_CACHE_DIR": str(tmp_path / "cache")})

    done = install(tmp_path)

    assert done.returncode == 0, done.stderr
    listed = subprocess.run([tmp_path / ".venv/bin/python", "-c", PROGRAM], capture_output=True, text=True)
    assert listed.stdout.strip() == "['flash-attn 12.6', 'plain 1.0']"
