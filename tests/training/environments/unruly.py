"""Environments for tests: one misbehaves as answers request, to test processes and their limits."""

import os
import socket
import time
from pathlib import Path

from training.rl.environments.protocol import Environment, Reply


class Unruly(Environment):
    def __init__(self, secret="", marker=""):
        self._secret, self._marker = secret, marker

    def reset(self, task, seed):
        self._number = task["number"]
        self._steps = []
        return f"task {self._number}"

    def step(self, text, calls):
        self._steps.append(text)
        if text == "sleep":
            time.sleep(1000)
        if text == "exit":
            os._exit(3)
        if text == "raise":
            raise RuntimeError("out of order")
        if text == "memory":
            self._held = bytearray(4 << 30)
        if text == "read":
            text = Path(self._secret).read_text() if os.path.exists(self._secret) else "nothing"
        if text == "connect":
            try:
                socket.create_connection(("127.0.0.1", int(self._secret)), timeout=2)
            except OSError:
                text = "refused"
        return Reply([{"role": "user", "content": f"{self._number}: {' '.join([*self._steps[:-1], text])}"}])

    def reward(self):
        return float(len(self._steps))


class Letters(Environment):
    """The reward is the share of the letter a in two answers."""

    def __init__(self, marker=""):
        self._marker = marker

    def reset(self, task, seed):
        self._texts = []
        if self._marker and task["number"] == 0 and not os.path.exists(self._marker):
            open(self._marker, "w").close()
            os._exit(3)
        return f"Sort the list {task['number']}."

    def step(self, text, calls):
        self._texts.append(text)
        return Reply([{"role": "user", "content": "Again, please."}], len(self._texts) == 2)

    def reward(self):
        text = "".join(self._texts)
        return text.count("a") / max(1, len(text))

    def accepts(self):
        return len(set("".join(self._texts))) > 1
