"""Handles of samplers: a process of ours (`sampler`) or a vLLM server, both asked for a part of a round at a time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from select import POLLIN, poll
from typing import Any, Protocol

from transformers import PreTrainedModel

from infra.errors import Problem, StageError
from infra.io.json import parse_own_json
from infra.launch.config import LaunchConfig
from infra.process.lifetime import PARENT_FD, signal_group
from infra.project import PROJECT
from training.config import RlhfConfig
from training.generation.vllm_sampler import VllmSampler
from training.rl.environments.episodes import Episodes, Task
from training.rl.prompts import Prompt, draw
from training.rl.rollouts.sampler import load_weights
from training.rl.rollouts.schedule import PartAnswers, RoundPart

MODULE = "training.rl.rollouts.sampler"
"""The program of a sampler process."""
_SHARED = ("threads", "device", "precision", "attention", "share_prompts", "sandbox")
"""Keys of `launch` that a sampler shares with its trainer."""
_LIVENESS_MS = 1000
"""Interval at which a sampler that has not answered is checked for being alive."""
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class PartPrompts:
    """The prompts of a part, the number of the first one in its round, and the round's seed."""

    prompts: Sequence[Prompt]
    first: int
    seed: int


def questions(config: RlhfConfig, prompts: Sequence[Prompt], number: int) -> PartPrompts:
    """Return the prompts of part `number`, as `training.rl.rollouts.schedule` numbers them."""
    assert config.async_ is not None
    round_number, part = divmod(number, config.async_.parts)
    _, drawn, seed = draw(config, prompts, round_number)
    size = len(drawn) // config.async_.parts
    return PartPrompts(drawn[part * size : (part + 1) * size], part * size, seed)


class SamplerDied(Exception):
    """A sampler's process ended before it answered; the message names the signal or the code."""


class SamplerHandle(Protocol):
    """A sampler, used by one thread."""

    def answer(self, part: RoundPart, questions: PartPrompts, weights: Path) -> PartAnswers:
        """Return the answers to a part, by the weights in a file. Raises SamplerDied, and StageError for a fault that
        another process would repeat."""

    def restart(self) -> None:
        """Replace a process that died."""

    def close(self) -> None:
        """End it, also during an answer; called by another thread."""


class OwnSampler:
    """A sampler process of ours. It ends with `close`, and with this process however that ends."""

    def __init__(
        self,
        number: int,
        source: Path,
        config: RlhfConfig,
        launch: LaunchConfig,
        longest: int,
        log: Path,
        documents: Path | None = None,
    ) -> None:
        """Start the process; it loads its model meanwhile.

        Args:
            number: of this sampler, from 0, which chooses its GPU.
            source: the folder of the model that training began with.
            longest: tokens of the longest prompt with its answer.
            log: gets the process's output.
            documents: file of the text that the config's environment searches.
        """
        settings = launch.samplers
        machine = launch.model_dump(mode="json", include=set(_SHARED))
        machine |= {"threads": settings.threads} if settings.threads else {}
        self._setup = {
            "source": str(source),
            "config": config.model_dump(mode="json"),
            "launch": machine,
            "longest": longest,
            "documents": str(documents) if documents else None,
        }
        self._plays = config.environment is not None
        self._scratch = log.with_suffix("")
        """Temporary files of its environments, which cannot remove them when they are killed."""
        gpus = settings.gpus.split(",") if settings.gpus else []
        self._environment = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
        self._scored = config.async_ is not None and config.async_.max_staleness > 0
        self._log = log
        self._is_loaded = self._is_closed = False
        self._ending = threading.Lock()
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, part: RoundPart, questions: PartPrompts, weights: Path) -> PartAnswers:
        if not self._is_loaded:
            self._hear()
            self._is_loaded = True
        self._send(
            {
                "number": part.number,
                "version": part.version,
                "weights": str(weights),
                "prompts": [] if self._plays else [prompt.ids for prompt in questions.prompts],
                "tasks": [Task.of(prompt) for prompt in questions.prompts] if self._plays else [],
                "first": questions.first,
                "seed": questions.seed,
                "scored": self._scored,
            }
        )
        return PartAnswers.from_json(self._hear())

    def restart(self) -> None:
        with self._ending:
            self._end()
            if not self._is_closed:
                self._start()

    def close(self) -> None:
        with self._ending:
            self._is_closed = True
            self._end()

    def _start(self) -> None:
        folders = (*filter(None, sys.path), str(PROJECT))
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        environment |= {"PYTHONPATH": os.pathsep.join(folders), **self._environment}
        if self._plays:
            self._scratch.mkdir(exist_ok=True)
            environment["TMPDIR"] = str(self._scratch)
        read_end, write_end = os.pipe()
        self._parent_pipe: int | None = write_end
        try:
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    pass_fds=[read_end],
                    env={**environment, PARENT_FD: str(read_end)},
                    start_new_session=True,
                )
        finally:
            os.close(read_end)
        self._is_loaded = False
        self._send(self._setup)

    def _send(self, question: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_hear` finds that it is gone
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            pipe = poll()
            pipe.register(self._process.stdout, POLLIN)
            # Processes that it forked may keep the pipe open after its death.
            while not pipe.poll(_LIVENESS_MS) and self._process.poll() is None:
                pass
            line = self._process.stdout.readline() if pipe.poll(0) else b""
        except ValueError:  # closed by another thread
            line = b""
        if not line.endswith(b"\n"):
            code = self._process.wait()
            raise SamplerDied(signal.Signals(-code).name if code < 0 else f"exit code {code}")
        reply: dict[str, Any] = parse_own_json(line)
        if "problems" in reply:
            raise StageError(*(Problem(**problem) for problem in reply["problems"]))
        return reply

    def _end(self) -> None:
        """Kill it, even during an answer. A thread that reads its reply reads the end of it."""
        if self._parent_pipe is None:
            return  # ended before
        if self._process.poll() is None:
            signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._parent_pipe)
        self._parent_pipe = None
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


class RemoteSampler:
    """A vLLM server as a sampler: its copy of the policy takes the weights of each part before it is sent."""

    def __init__(
        self,
        policy: PreTrainedModel,
        served: Callable[[PreTrainedModel], VllmSampler],
        config: RlhfConfig,
        episodes: Episodes | None,
    ) -> None:
        """Start the server.

        Args:
            policy: a model to put the weights into.
            served: starts a server for it.
            episodes: plays an episode in place of each answer.
        """
        self._policy = policy.requires_grad_(False)
        self.vllm = served(self._policy)
        self._batches, self._group = config.round_batches, config.answers_per_prompt
        self._episodes = episodes
        self._version: int | None = None

    def answer(self, part: RoundPart, questions: PartPrompts, weights: Path) -> PartAnswers:
        if part.version != self._version:
            load_weights(self._policy, weights)
            self.vllm.update(part.version * self._batches)
            self._version = part.version
        began = time.perf_counter()
        seed, first = questions.seed, questions.first
        if self._episodes is not None:
            tasks = list(map(Task.of, questions.prompts))
            answers = self._episodes.play(self.vllm, tasks, seed, self._group, first)
        else:
            answers = self.vllm.sample([prompt.ids for prompt in questions.prompts], seed, first)
        return PartAnswers.of(part, answers, time.perf_counter() - began)

    def restart(self) -> None:
        """Do nothing: a server that ends is a StageError of its client."""

    def close(self) -> None:
        self.vllm.close()


def remote_samplers(
    count: int,
    load: Callable[[], PreTrainedModel],
    served: Callable[..., VllmSampler],
    config: RlhfConfig,
    player: Callable[[], Episodes | None],
) -> list[RemoteSampler]:
    """Start `count` vLLM servers at the same time; where one fails, none is left.

    Args:
        load: returns a model to put the weights into.
        served: starts a server for it, with its `number` if there are several.
        player: returns a server's player of episodes, None without an environment.
    """
    numbered = [served] if count == 1 else [partial(served, number=number) for number in range(count)]
    with ThreadPoolExecutor(count, "vllm") as starting:
        futures = [starting.submit(RemoteSampler, load(), start, config, player()) for start in numbered]
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        for future in futures:
            if future.exception() is None:
                future.result().close()
        raise failures[0]
    return [future.result() for future in futures]
