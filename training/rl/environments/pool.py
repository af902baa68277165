"""Processes of environments: each serves several episodes, with limits of time, memory, files and network.

A process that ends or is too slow is replaced. Its other episodes are not lost: before their next request the earlier
ones are sent again, which leads to the same state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from infra.errors import stage_error
from infra.io.json import BadJson, parse_json
from training.config.alignment.environment import EnvironmentConfig
from training.sandbox.runner import MEMORY_BYTES, Kind, SandboxChoice, SandboxDialogue, find

NOT_SENT = "not sent"
"""Kind of failure of a request that was not sent, as too many before it had failed: it is not counted."""
IMPORT_S = 120.0
"""Seconds that the import of an environment may take."""
_INSIDE = Path(__file__).with_name("inside.py")

Request = Mapping[str, Any]
Reply = dict[str, Any]


class EpisodeFailure(NamedTuple):
    """An episode without a reply: `error` (the environment raised), `timeout`, `died`, or `lost` (the repetition of its
    requests gave other replies)."""

    kind: str
    message: str


@dataclass
class _Slot:
    """A process, or none yet, with the requests and replies of its open episodes; `stale` are those that it has yet to
    repeat."""

    process: SandboxDialogue | None = None
    past: dict[int, list[tuple[Request, Reply]]] = field(default_factory=dict)
    stale: set[int] = field(default_factory=set)


class EnvironmentPool:
    """Processes of one environment.

    Attributes:
        replaced: number of processes that ended or were too slow, and were replaced.
    """

    def __init__(
        self, config: EnvironmentConfig, sandbox: SandboxChoice = "auto", documents: Path | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            sandbox: `launch.sandbox`. The environment `code` is not in it: it starts sandboxes for the code of answers.
            documents: folder of documents that `search` searches.

        Raises StageError `no_sandbox` where this machine has none.
        """
        self._config = config
        kind = find(sandbox)
        starts_sandboxes = config.use == "code"
        self.kind: Kind = "none" if starts_sandboxes else kind
        path, readable = config.readable()
        self._readable = (*readable, *((documents,) if documents else ()))
        self._question = {
            "path": path,
            "environment": config.path,
            "options": config.values(kind, documents),
        }
        self._memory = max(config.memory_mb << 20, 2 * MEMORY_BYTES if starts_sandboxes else 0)
        self._slots = [_Slot() for _ in range(config.instances)]
        self._threads = ThreadPoolExecutor(config.instances)
        self.replaced = 0

    def described(self) -> str:
        """One sentence for the log."""
        config = self._config
        if self.kind == "none":
            where = "without a sandbox, with the permissions of this process"
        else:
            where = f"in a sandbox ({self.kind}), {'with' if config.network else 'without'} a network"
        return (
            f"the environment {config.use} runs in {config.instances} processes {where}; at most "
            f"{config.memory_mb:,} MiB of memory each and {config.timeout_s:g} s per reply"
        )

    def ask(self, requests: Sequence[tuple[int, Request]], allowed_failures: int) -> list[Reply | EpisodeFailure]:
        """Send a request for each of some episodes, those of a process one after the other.

        Args:
            requests: episode and request, `{"do": "open" | "step" | "end", …}` as in `inside.py`.
            allowed_failures: after more of them in a process, its remaining requests are not sent.
        """
        replies: dict[int, Reply | EpisodeFailure] = {}

        def serve(number: int) -> None:
            slot, failures = self._slots[number], 0
            for episode, request in requests:
                if episode % len(self._slots) == number:
                    if failures > allowed_failures:
                        replies[episode] = EpisodeFailure(NOT_SENT, "too many requests before it failed")
                        continue
                    replies[episode] = reply = self._reply_to(slot, episode, request)
                    failures += isinstance(reply, EpisodeFailure)

        list(self._threads.map(serve, range(len(self._slots))))
        return [replies[episode] for episode, _ in requests]

    def drop(self, episode: int) -> None:
        """Forget an episode."""
        slot = self._slots[episode % len(self._slots)]
        slot.past.pop(episode, None)
        slot.stale.discard(episode)

    def close(self) -> None:
        """End the processes."""
        for slot in self._slots:
            if slot.process is not None:
                slot.process.end()
                slot.process = None
        self._threads.shutdown()

    def _reply_to(self, slot: _Slot, episode: int, request: Request) -> Reply | EpisodeFailure:
        if slot.process is None:
            slot.process = self._started()
        past = slot.past.setdefault(episode, [])
        for earlier, before in past if episode in slot.stale else ():
            again = self._sent(slot, episode, earlier)
            if isinstance(again, EpisodeFailure) or again != before:
                self.drop(episode)
                return EpisodeFailure("lost", "its process was replaced, and the replay diverged")
        slot.stale.discard(episode)
        reply = self._sent(slot, episode, request)
        if isinstance(reply, EpisodeFailure) or "reward" in reply:
            self.drop(episode)
        else:
            past.append((request, reply))
        return reply

    def _sent(self, slot: _Slot, episode: int, request: Request) -> Reply | EpisodeFailure:
        if slot.process is None:
            slot.process = self._started()
        line = json.dumps({**request, "episode": episode}).encode()
        try:
            answer = slot.process.send(line, self._config.timeout_s)
            failure = EpisodeFailure("died", "its process ended")
        except TimeoutError:
            answer = None
            failure = EpisodeFailure("timeout", f"no reply within {self._config.timeout_s:g} s")
        if answer is None:
            slot.process.end()
            complaint = slot.process.complaint
            slot.process = None
            slot.stale = set(slot.past)
            self.replaced += 1
            return failure._replace(message=f"{failure.message}: {complaint[-200:]}") if complaint else failure
        return _checked(answer)

    def _started(self) -> SandboxDialogue:
        """Start a process that has imported the environment. Raises StageError `environment_failed`."""
        config = self._config
        process = SandboxDialogue(
            self.kind, _INSIDE, self._question, self._readable, self._memory, network=config.network
        )
        try:
            answer = process.send(json.dumps({"do": "try"}).encode(), IMPORT_S)
            reply = _checked(answer) if answer is not None else None
            message = (
                reply.message if isinstance(reply, EpisodeFailure) else "" if reply is not None else "its process ended"
            )
        except TimeoutError:
            message = f"its import took longer than {IMPORT_S:g} s"
        if message:
            process.end()
            raise stage_error(
                "environment_failed",
                "rlhf.environment.use",
                f"expected an environment: {config.use}: {message} {process.complaint[-300:]}".rstrip(),
                "correct its class or environment.options; environment.files and environment.network name what it may "
                "read and reach",
            )
        return process


def _checked(line: bytes) -> Reply | EpisodeFailure:
    """Return a reply whose parts have the types that are expected; a process may have been tampered with."""
    try:
        reply = parse_json(line)
    except BadJson as error:
        return EpisodeFailure("error", f"its reply is not JSON: {error}")
    if not isinstance(reply, dict):
        return EpisodeFailure("error", "its reply is not an object")
    if "error" in reply:
        return EpisodeFailure("error", str(reply["error"]))
    if "reward" in reply and not isinstance(reply["reward"], int | float):
        return EpisodeFailure("error", f"its reward is not a number: {str(reply['reward'])[:80]}")
    for message in reply.get("messages", ()):
        if not (
            isinstance(message, dict)
            and message.get("role") in ("system", "user", "tool", "assistant")
            and isinstance(message.get("content"), str)
        ):
            return EpisodeFailure("error", f"expected messages with role and content, not {str(message)[:200]}")
    return reply
