"""Answers with unit tests that are graded per second, by the sandbox that they run in.

python benchmarks/environments/bench_sandbox.py

All kinds in turn, several rounds in one run; a process is started per answer. `children` is processor time.
"""

from __future__ import annotations

import resource
import statistics
import time

from infra.errors import StageError
from training.sandbox.runner import Kind, find
from training.sandbox.unit_tests import passes

ROUNDS, ANSWERS = 5, 20
CODE, TESTS = "def twice(x):\n    return 2 * x\n", "assert twice(2) == 4"


def main() -> None:
    kinds: list[Kind] = ["none"]
    for kind in ("bubblewrap", "namespaces"):
        try:
            kinds.append(find(kind))
        except StageError as error:
            print(error)
    found: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    for _ in range(ROUNDS):
        for kind in kinds:
            before, began = _children(), time.perf_counter()
            assert all(passes(CODE, TESTS, kind) for _ in range(ANSWERS))
            found[kind].append(((time.perf_counter() - began) / ANSWERS, (_children() - before) / ANSWERS))
    for kind, times in found.items():
        wall, children = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{kind:12} {1 / wall:6.1f} answers/s  {1e3 * wall:6.1f} ms, children {1e3 * children:5.1f} ms")


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
