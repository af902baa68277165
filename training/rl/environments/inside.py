"""The program in the process of an environment: episodes, one line of JSON for each request and each reply.

`training.sandbox.process` starts `main` in the confined process. Only the standard library and the environment's module
are imported.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any


def main(question: dict[str, Any], answer: int) -> None:
    """Serve requests until the other side closes the pipe.

    Args:
        question: `path`, entries of sys.path; `environment`, `module:Class` or `file.py:Class`; `options` of the class;
            `lines`, the descriptor of the requests.
        answer: descriptor of the replies.
    """
    sys.path[:0] = question["path"]
    episodes: dict[int, Any] = {}

    @functools.cache
    def environment() -> Any:
        return load(question["environment"])

    for line in _lines(question["lines"]):
        request = json.loads(line)  # noqa: TID251 - written by `pool`; no other module of the project is to be seen here
        try:
            reply = _reply(request, episodes, lambda: environment()(**question["options"]))
        except BaseException as error:  # SystemExit too
            episodes.pop(request.get("episode"), None)
            reply = {"error": _described(error)}
        text = json.dumps(reply).encode() + b"\n"
        while text:
            text = text[os.write(answer, text) :]


def load(path: str) -> Any:
    """Import the class of an environment: `package.module:Class`, or `folder/file.py:Class`."""
    location, _, name = path.rpartition(":")
    if location.endswith(".py"):
        spec = importlib.util.spec_from_file_location("environment_of_the_user", location)
        if spec is None or spec.loader is None:
            raise ImportError(f"{location} is not a module")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(location)
    return getattr(module, name)


def _lines(descriptor: int) -> Iterator[bytes]:
    with os.fdopen(descriptor, "rb") as file:
        yield from file


def _reply(request: Mapping[str, Any], episodes: dict[int, Any], make: Any) -> dict[str, Any]:
    """Return the reply to `open` (begins an episode), `step` (an answer), `end` (no further turn) or `try` (nothing
    but the import of the class)."""
    number = request.get("episode", -1)
    match request["do"]:
        case "try":
            make()
            return {}
        case "open":
            environment = episodes[number] = make()
            opening = environment.reset(request["task"], request["seed"])
            messages = [{"role": "user", "content": opening}] if isinstance(opening, str) else list(opening)
            return {"messages": messages, "tools": list(environment.tools)}
        case "step":
            from training.rl.environments.protocol import ToolCall

            calls = [ToolCall(call["name"], call["arguments"]) for call in request["calls"]]
            messages, done = episodes[number].step(request["text"], calls)
            if not done:
                return {"messages": list(messages), "done": False}
            return {"messages": list(messages), "done": True, **_verdict(episodes.pop(number))}
        case _:
            return _verdict(episodes.pop(number))


def _verdict(environment: Any) -> dict[str, Any]:
    accepted, reward = environment.accepts(), float(environment.reward())
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {reward}, not a finite number")
    return {"reward": reward, "accepted": None if accepted is None else bool(accepted)}


def _described(error: BaseException) -> str:
    """The error, and the line of the environment that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:300] + where
