"""Calls of a function on many items at once, in processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from infra.errors import stage_error

POLL_S = 0.2


class Mapper(Protocol):
    """Callable that applies a function to each item, on any processes or machines."""

    def __call__(
        self,
        function: Callable[[Any], Any],
        items: Sequence[Any],
        stop_if_cancelled: Callable[[], None],
        on_done: Callable[[int, Any], None],
    ) -> None:
        """Apply a function to each item.

        Args:
            on_done: called in this thread with each item's index and result, as they arrive.
        """


def import_once(*modules: str) -> None:
    """Let the worker processes of this process share their imports of these modules: one copy in memory, read once.

    To be called before the first of them starts.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def map_locally(workers: int | None) -> Mapper:
    """A mapper on `workers` processes of this machine; None takes one for each core. One worker is this process."""

    def mapper(
        function: Callable[[Any], Any],
        items: Sequence[Any],
        stop_if_cancelled: Callable[[], None],
        on_done: Callable[[int, Any], None],
    ) -> None:
        count = min(workers or core_count(), len(items))
        if count > 1:
            _map_on_processes(count, function, items, stop_if_cancelled, on_done)
            return
        for index, item in enumerate(items):
            stop_if_cancelled()
            on_done(index, function(item))

    return mapper


def _map_on_processes(
    workers: int,
    function: Callable[[Any], Any],
    items: Sequence[Any],
    stop_if_cancelled: Callable[[], None],
    on_done: Callable[[int, Any], None],
) -> None:
    # Not fork: the parent has threads.
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_the_parent) as pool:
        futures = {pool.submit(function, item): index for index, item in enumerate(items)}
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=POLL_S, return_when=FIRST_COMPLETED)
                stop_if_cancelled()
                if any(future.exception() for future in done):
                    pool.shutdown(cancel_futures=True)
                    raise _first_error(list(futures))
                for future in done:
                    on_done(futures[future], future.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _first_error(futures: list[Future[Any]]) -> BaseException:
    """The error of the first item that has one. Items start in order, so it is the same for any number of workers."""
    errors = (future.exception() for future in futures if not future.cancelled())
    error = next(error for error in errors if error is not None)
    if isinstance(error, BrokenProcessPool):
        return stage_error(
            "killed",
            "launch.workers",
            "a worker process was killed; usually because the machine ran out of memory",
            "fewer workers need less",
        )
    return error


def _end_with_the_parent() -> None:
    """End a worker with its parent: a parent that was killed cannot stop its workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
