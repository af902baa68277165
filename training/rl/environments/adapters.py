"""Environments of other packages: `verifiers` (its MultiTurnEnv and what is built on it) and OpenEnv (servers).

The packages are imported where an environment of theirs is made, in the environment's process; without them it is an
error that names what to install.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from typing import Any

from training.rl.environments.protocol import Environment, Message, Reply, Task, ToolCall


def _module(name: str, package: str) -> Any:
    """Import a module of a package. Raises ImportError that names what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"expected the package {package} in the environment that Stemma runs in ({error}); install it: "
            f"pip install '{package}'"
        ) from error


class Verifiers(Environment):
    """An environment of verifiers 0.1, by its id.

    Tasks are rows of its dataset, held-out ones of its evaluation dataset; the reward is that of its rubric, which has
    to judge each episode by itself. A judge that it asks needs `network: true`.

    Args:
        id: of an installed environment, as for `verifiers.load_environment`.
        **arguments: of this environment.
    """

    def __init__(self, id: str, **arguments: Any) -> None:
        self._types = _module("verifiers.types", "verifiers<0.2")
        self._loaded = _loaded(id, json.dumps(arguments, sort_keys=True))
        self._loop = asyncio.new_event_loop()
        self._state: Any = None
        self._prompt: list[Any] = []

    def reset(self, task: Task, seed: int) -> Sequence[Message]:
        environment = self._loaded
        rows = environment.get_eval_dataset() if task.get("split") == "heldout" else environment.get_dataset()
        row = dict(rows[int(task.get("number", seed)) % len(rows)])
        self._state = self._run(environment.init_state(row, _no_client(), "policy"))
        self._state = self._run(environment.setup_state(self._state)) or self._state
        self.tools = [_as_tool(described) for described in self._state.get("tool_defs") or ()]
        self._prompt = list(self._run(environment.get_prompt_messages(self._state)))
        return [_as_message(message) for message in self._prompt]

    def step(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        environment, types = self._loaded, self._types
        called = [
            types.ToolCall(id=f"call{number:05}", name=call.name, arguments=json.dumps(dict(call.arguments)))
            for number, call in enumerate(calls)
        ]
        answer = types.AssistantMessage(content=text, tool_calls=called or None)
        step = {
            "prompt": self._prompt, "completion": [answer], "response": None, "tokens": None, "reward": None,
            "advantage": None, "is_truncated": False, "trajectory_id": self._state["trajectory_id"], "extras": {},
        }  # fmt: skip
        self._run(environment.add_trajectory_step(self._state, step))
        if self._run(environment.is_completed(self._state)):
            return Reply(done=True)
        before = len(self._prompt) + 1
        prompt = list(self._run(environment.get_prompt_messages(self._state)))
        # An environment may end an episode with its reply.
        if self._run(environment.is_completed(self._state)):
            return Reply(done=True)
        self._prompt = prompt
        return Reply([_as_message(message) for message in prompt[before:]])

    def reward(self) -> float:
        self._run(self._loaded.render_completion(self._state))
        self._run(self._loaded.rubric.score_rollout(self._state))
        return float(self._state["reward"])

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


@cache
def _loaded(id: str, arguments: str) -> Any:
    verifiers = _module("verifiers", "verifiers<0.2")
    if not hasattr(verifiers, "load_environment"):
        raise ImportError(
            f"expected verifiers 0.1, whose environments reply to each answer, not {verifiers.__version__}: install "
            "'verifiers<0.2'"
        )
    return verifiers.load_environment(id, **json.loads(arguments))  # noqa: TID251 - written by this module


def _no_client() -> Any:
    """A client of a model that is never asked: the policy answers here."""
    kind: Any = type("Policy", (_module("verifiers.clients", "verifiers<0.2").Client,), {})
    kind.__abstractmethods__ = frozenset()
    return object.__new__(kind)


def _as_tool(described: Any) -> dict[str, Any]:
    function = {"name": described.name, "description": described.description, "parameters": described.parameters}
    return {"type": "function", "function": function}


def _as_message(message: Any) -> dict[str, Any]:
    content = message.content
    text = content if isinstance(content, str) else json.dumps(content, default=str)
    return {"role": message.role, "content": text}


class OpenEnv(Environment):
    """An environment of OpenEnv, on a running server; needs `network: true`.

    The text of each answer is the action. The reward is the sum of those of the steps.

    Args:
        base_url: of the server, such as http://localhost:8000.
        action: key of the action's text.
        observation: key of the observation's text; "" for all of the observation, as JSON.
        constants: further keys of each action.
        opening: text before the first observation.
    """

    def __init__(
        self,
        base_url: str,
        action: str = "message",
        observation: str = "",
        constants: Mapping[str, Any] | None = None,
        opening: str = "",
    ) -> None:
        client = _module("openenv.core", "openenv-core").GenericEnvClient(base_url=base_url)
        self._client = client.sync()
        self._action, self._observation, self._opening = action, observation, opening
        self._constants = dict(constants or {})
        self._total = 0.0

    def reset(self, task: Task, seed: int) -> str:
        self._client.connect()
        self._total = 0.0
        return f"{self._opening}\n{self._text(self._client.reset(seed=seed % 2**31).observation)}".strip()

    def step(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        result = self._client.step({self._action: text, **self._constants})
        self._total += float(result.reward or 0.0)
        if result.done:
            return Reply(done=True)
        return Reply([{"role": "user", "content": self._text(result.observation)}])

    def reward(self) -> float:
        self._client.close()
        return self._total

    def _text(self, observation: Any) -> str:
        if self._observation and isinstance(observation, Mapping):
            observation = observation.get(self._observation, "")
        return observation if isinstance(observation, str) else json.dumps(observation, default=str)
