"""Partitions on a Ray cluster, through Prefect's task runner: for corpora that outgrow a machine.

Each partition is a task of a Prefect flow, so the page shows it; Ray brings it to a worker. All machines of the cluster
have the same environment and see the same store: the partitions' folders lie on a file system that they share.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from prefect import Flow, task
from prefect.cache_policies import NO_CACHE

from infra.errors import stage_error
from infra.launch.ray.job import INSTALL, use_token
from infra.process.workers import Mapper, core_count
from infra.project import python_path

LOCAL = "local"
# Enough that no worker waits for us, few enough that a cancelled run stops soon.
SUBMITTED_PER_WORKER = 2
POLL_S = 0.5


@task(name="partition", task_run_name="partition {index}", cache_policy=NO_CACHE, persist_result=False)
def partition(index: int, work: bytes) -> Any:
    """work: a pickled (function, item)."""
    function, item = pickle.loads(work)
    return function(item)


@dataclass(frozen=True)
class _MapperCall:
    """One call of the mapper."""

    function: Callable[[Any], Any]
    items: Sequence[Any]
    stop_if_cancelled: Callable[[], None]
    on_done: Callable[[int, Any], None]
    gpus: bool


# Prefect sends the flow along with each task, so it must hold nothing that cannot be pickled.
_call: ContextVar[_MapperCall] = ContextVar("call")


def map_on_ray(address: str, workers: int | None, name: str, *, gpus: bool = False) -> Mapper:
    """A mapper on the Ray cluster at `address`; see `LaunchConfig.ray`.

    Calling it raises StageError `no_ray` where the package is missing, besides what the function raises.

    Args:
        name: what its flow is called in the page.
        gpus: whether each item takes one, of a cluster that has any.
    """

    def mapper(
        function: Callable[[Any], Any],
        items: Sequence[Any],
        stop_if_cancelled: Callable[[], None],
        on_done: Callable[[int, Any], None],
    ) -> None:
        if items:
            runner = _join(address, workers)
            token = _call.set(_MapperCall(function, items, stop_if_cancelled, on_done, gpus))
            try:
                Flow(_submit_all, name=f"{name} on Ray", task_runner=runner, persist_result=False)()
            finally:
                _call.reset(token)

    return mapper


def _submit_all() -> None:
    import ray
    from prefect_ray.context import remote_options

    call = _call.get()
    takes_gpu = call.gpus and ray.cluster_resources().get("GPU", 0) > 0
    room = SUBMITTED_PER_WORKER * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = list(range(len(call.items)))
    running: dict[Any, tuple[int, Any]] = {}
    while waiting or running:
        call.stop_if_cancelled()
        while waiting and len(running) < room:
            index = waiting.pop(0)
            with remote_options(num_gpus=1) if takes_gpu else nullcontext():
                future: Any = partition.submit(index, pickle.dumps((call.function, call.items[index])))
            running[future.wrapped_future] = (index, future)
        done, _ = ray.wait(list(running), timeout=POLL_S)
        for reference in done:
            index, future = running.pop(reference)
            call.on_done(index, future.result())


def _join(address: str, workers: int | None) -> Any:
    """A task runner on a cluster that this process has joined or started, and leaves as it ends: what a stage maps
    later finds workers that have imported everything."""
    if address != LOCAL:
        use_token()  # Ray looks for it during its import
    try:
        import ray
        from prefect_ray import RayTaskRunner
    except ImportError as error:
        raise stage_error(
            "no_ray", "launch.ray", f"{error.name} is not installed", f"{INSTALL}, or leave launch.ray out"
        ) from None
    if not ray.is_initialized():
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PREFECT_", "AWS_"))}
        variables = {**kept, "PYTHONPATH": python_path()}
        options: dict[str, Any] = {"runtime_env": {"env_vars": variables}, "log_to_driver": False}
        if address == LOCAL:
            ray.init(**options, num_cpus=workers or core_count(), include_dashboard=False)
        else:
            ray.init(address, **options)
    return RayTaskRunner()
