"""How a stage's threads wait for each other."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from infra.project import PROJECT
from tasks.processes import openmp

WATCHING = """
import json, os, sys, threading, time
import torch
from tasks.processes import openmp

rate, at, seconds = 0.0, time.monotonic(), 0.0
def others():
    global at, seconds
    now = time.monotonic()
    at, seconds = now, seconds + rate * (now - at)
    return seconds

openmp._others_s, openmp.LOOK_S = others, 0.05
torch.zeros(1 << 22)
openmp.watch_others()
seen = []
for rate in (1.0, 0.0, 1.0, 0.0):
    time.sleep(1)
    idle = sum(one.name == "idle" for one in threading.enumerate())
    seen.append((idle, len(os.listdir("/proc/self/task"))))
print(json.dumps({"seen": seen, "left": openmp.AWAKE in os.environ, "threads": torch.get_num_threads()}))
"""


@pytest.mark.skipif(openmp.cores() < 2, reason="one core: there is nobody to wait for")
def test_only_who_watches_and_has_all_cores_stays_awake() -> None:
    both = openmp.wait_policy(openmp.cores(), watches=True)
    assert both == {**openmp.PASSIVE, openmp.AWAKE: str(openmp.ROUNDS)}
    for threads, watches in ((1, True), (openmp.cores() + 1, True), (openmp.cores(), False)):
        assert openmp.wait_policy(threads, watches) == openmp.PASSIVE


@pytest.mark.skipif(openmp.cores() < 2, reason="one core: there is nobody to wait for")
def test_a_second_group_of_threads_is_there_while_others_are_busy() -> None:
    environment = {
        "PYTHONPATH": str(PROJECT),
        "OMP_NUM_THREADS": "2",
        "PATH": "",
        **openmp.wait_policy(openmp.cores(), True),
    }
    said = subprocess.run([sys.executable, "-c", WATCHING], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(said.stdout)
    assert found["threads"] == 2 and not found["left"]
    groups, threads = zip(*found["seen"], strict=True)
    assert groups == (1, 0, 1, 0)
    # Of OpenMP's own too: the one that asks for them, and another.
    assert threads[0] == threads[1] + 2 and threads == threads[:2] * 2


def test_others_are_all_but_this_process() -> None:
    busy = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    before = openmp._others_s()
    subprocess.run([sys.executable, "-c", busy], check=True)
    assert openmp._others_s() - before >= 0.4
