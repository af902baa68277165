"""What all tests share: one Prefect server, and stores that are built once and copied."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import tests.support.programs.command
from infra.servers.private import (
    launch_prefect_server,
    private_prefect_server,
    say_last_words,
    wait_for_prefect_server,
)
from tests.support.pipelines import data_config, full_config
from tests.support.programs.command import REPOSITORY, Answer, environment, stemma, write_config
from tests.support.programs.forked import LINE, Session
from tests.support.programs.processes import COLD

LONG_S = 3600.0
"""What a test marked `long` may take, in place of `timeout` in pyproject.toml."""
SHARED_DATA = REPOSITORY.parent / "shared" / "data"
_SHARED = "stemma_session"
_SESSION = pytest.StashKey[Session]()

# The first builds the whole pipeline, for which the next ones do not wait.
_DEAREST = (
    "browser/test_reading",
    "flows/schedules/test_scheduled_runs",
    "browser/test_page",
    "flows/failures/test_crash",
    "infra/servers/test_guarded",
    "test_readme",
    "flows/runs/test_rerun",
    "evaluation/harness/test_eval",
    "training/serving/test_serving",
    "infra/lineage/test_relay",
    "training/trainer/test_guard",
    "fuzz/test_slice",
    "flows/runs/test_needs",
    "training/alignment/test_alignment",
    "infra/store/test_remote",
    "flows/config/test_config_forms",
    "evaluation/harness/test_benchmarks",
    "flows/runs/test_pipeline",
    "training/distributed/test_ranks",
    "browser/test_judging",
    "training/trainer/test_memory",
    "flows/runs/test_ledger",
    "flows/test_installed_stages",
    "training/data/test_objectives",
    "flows/failures/test_server_lost",
    "flows/drill/test_drill",
    "training/checkpoint/test_upload",
    "infra/lineage/test_migrations",
    "training/data/test_mixture",
    "infra/launch/test_kubernetes_nodes",
    "training/planner/test_plan",
    "corpus/readers/test_s3",
    "tasks/test_retries",
    "infra/lineage/test_delivery",
)
"""Files of tests by what they cost, from the whole runs in benchmarks/log/tests.md."""

# Without it each of the hundreds of processes that the tests start compiles what it imports of ours: about a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Several test workers share the cores, and OpenMP's threads wait for each other without letting others work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"})


def pytest_configure(config: pytest.Config) -> None:
    # How long an example takes says how busy the machine is.
    settings.register_profile("many", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("few", settings.get_profile("many"), max_examples=25)
    settings.load_profile("few" if "not long" in config.getoption("markexpr") else "many")
    if shared := getattr(config, "workerinput", {}).get(_SHARED):
        tests.support.programs.command.session = Path(shared)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the process that hands tests to the workers: what they share has the life of this process."""
    config = node.config
    if _SESSION not in config.stash:
        config.stash[_SESSION] = Session()
        config.add_cleanup(config.stash[_SESSION].close)
    node.workerinput[_SHARED] = str(config.stash[_SESSION].folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collect without searching for garbage: the test modules and what they import stay for the whole session, and each
    test worker collects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long proof is ended for hanging, not for a machine that is slow and does other work too.

    Files are handed out to workers whole, so that what a file shares is made once. The dearest come first, then those
    with servers, since one of them at the end would be waited for by all.
    """
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))
    servers = Counter(item.path for item in items if item.get_closest_marker("cluster"))
    order = {REPOSITORY / "tests" / f"{name}.py": rank for rank, name in enumerate(_DEAREST)}
    items.sort(key=lambda item: (order.get(item.path, len(order)), -servers[item.path]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    tests.support.programs.command.patience_s = 0.9 * LONG_S if item.get_closest_marker("long") else 400.0


@pytest.fixture(scope="session")
def prefect_url() -> Iterator[str]:
    """A real Prefect server with its page, the same for all test workers: by the time that a session takes, one that
    nobody asks costs each worker a minute. Other tests use it at the same time: ask it for ids and names of your own.
    """
    if tests.support.programs.command.session is None:
        with private_prefect_server(page=True) as url:
            yield url
        return
    home = tests.support.programs.command.session / "prefect"
    with built_once(home) as mine:
        if mine:
            url, process = launch_prefect_server(
                home, True, os.open(tests.support.programs.command.session / LINE, os.O_RDONLY)
            )
            wait_for_prefect_server(url, process, home)
            (home / "url").write_text(url)
    yield (home / "url").read_text()
    say_last_words()


@pytest.fixture(scope="session")
def env(prefect_url: str) -> dict[str, str]:
    """The environment of commands under test: they use the worker's Prefect server instead of starting their own."""
    return environment(PREFECT_API_URL=prefect_url, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE="false")


@pytest.fixture(scope="session")
def cold_env(env: dict[str, str]) -> dict[str, str]:
    """`env` for commands whose stages are to be caught at work."""
    return {**env, **COLD}


@pytest.fixture
def run(env: dict[str, str]) -> Callable[..., Answer]:
    """`run("check", config, …)`: the real command, its document and exit code."""

    def call(*arguments: str | Path, **variables: str) -> Answer:
        return stemma(*arguments, env={**env, **variables})

    return call


@pytest.fixture
def loaded_by_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exported models are loaded by a process that is forked with transformers imported, not by a new one. That a new
    one, which knows nothing of this project, loads them is in tests/evaluation/test_export.py."""
    import evaluation.release.export
    import tests.support.programs.elsewhere

    forking = SimpleNamespace(run=tests.support.programs.elsewhere.load_exported, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(evaluation.release.export, "subprocess", forking)


@contextmanager
def built_once(folder: Path) -> Iterator[bool]:
    """Yields True to the one test worker that is to fill the folder; the others wait until it is full."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_name(f"{folder.name}.done")
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            yield False
            return
        folder.mkdir(exist_ok=True)
        yield True
        done.touch()


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all test workers of this session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def built_data(session_folder: Path, env: dict[str, str]) -> Path:
    """A folder with `config.yaml`, `text.jsonl` and the finished `store` of the tiny data pipeline. Read only."""
    folder = session_folder / "data-pipeline"
    with built_once(folder) as mine:
        if mine:
            config = write_config(folder / "config.yaml", data_config(folder))
            answer = stemma("run", config, "--root", folder / "store", env=env)
            assert answer.code == 0, (answer.document["errors"], answer.stderr)
    return folder


@pytest.fixture(scope="session")
def built_full(session_folder: Path, env: dict[str, str]) -> Path:
    """A folder with `config.yaml` and the finished `store` of the whole tiny pipeline, built with a step of each
    training profiled, MLflow's relay at work and no way off this machine; `connections` notes who tried. Read only."""
    folder = session_folder / "full-pipeline"
    with built_once(folder) as mine:
        if mine:
            config = write_config(folder / "config.yaml", full_config() | {"launch": {"profile": 1}})
            noting = {"STEMMA_RELAY": "on", "STEMMA_TEST_CONNECTIONS": str(folder / "connections")}
            # 27 stages on a machine that others use too, and less than the 600 s that a test may take.
            answer = stemma("run", config, "--root", folder / "store", env={**env, **noting}, timeout_s=570)
            assert answer.code == 0, (answer.document["errors"], answer.stderr)
            (folder / "answer.json").write_text(json.dumps(answer.document))
    return folder


@pytest.fixture
def data_pipeline(built_data: Path, tmp_path: Path) -> Path:
    """A copy of `built_data` for a test that changes it; its config names the copied source."""
    folder = tmp_path / "data"
    shutil.copytree(built_data, folder, ignore=shutil.ignore_patterns("lineage", "mlflow", "servers"))
    write_config(folder / "config.yaml", data_config(folder))
    return folder


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """The port of a real S3 server for this test worker; whoever fills a bucket empties it."""
    from tests.support.services.object_store import object_store

    with object_store() as port:
        yield port


@pytest.fixture
def proxy(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A proxy before that server, in this test's environment, that fails as told
    (`tests.support.services.object_store`)."""
    from tests.support.services.object_store import failing_proxy

    with failing_proxy(s3_port, monkeypatch) as server:
        yield server


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data sets beside the checkout; tests that need them skip where they are not."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder is not on this machine")
    return SHARED_DATA
