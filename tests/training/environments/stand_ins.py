"""Stand-ins for packages of environments that are not installed: what verifiers 0.1 and openenv-core 0.3 have of the
interfaces that the adapters use. `test_adapters_of_packages.py` runs the same environments with the packages themselves
where they are installed."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar


def _message(given: Any) -> Any:
    return given if isinstance(given, SimpleNamespace) else SimpleNamespace(tool_calls=None, **given)


class Rubric:
    """Rewards of functions that take some of the state's fields by name."""

    def __init__(self, funcs: Sequence[Callable[..., Any]]) -> None:
        self._functions = list(funcs)

    async def score_rollout(self, state: dict[str, Any]) -> None:
        state["reward"] = sum(
            [await function(completion=state["completion"], state=state) for function in self._functions]
        )


class MultiTurnEnv:
    """An environment that replies to each answer. Tasks are rows of its data sets."""

    def __init__(
        self, dataset: Any, rubric: Rubric, max_turns: int, tool_defs: Any = (), eval_dataset: Any = None
    ) -> None:
        self._dataset, self._eval_dataset = dataset, eval_dataset or dataset
        self.rubric, self._max_turns, self._tools = rubric, max_turns, tool_defs

    def get_dataset(self) -> Any:
        return self._dataset

    def get_eval_dataset(self) -> Any:
        return self._eval_dataset

    async def init_state(self, input: Mapping[str, Any], client: Any, model: str) -> dict[str, Any]:
        assert isinstance(client, Client)
        return {
            **input, "prompt": [_message(message) for message in input["prompt"]], "trajectory": [], "completion": None,
            "tool_defs": [SimpleNamespace(**tool) for tool in self._tools], "trajectory_id": uuid.uuid4().hex,
            "reward": None, "final_env_response": None,
        }  # fmt: skip

    async def setup_state(self, state: dict[str, Any]) -> None:
        pass

    async def env_response(self, messages: Any, state: dict[str, Any], **_: Any) -> Any:
        raise NotImplementedError

    async def get_prompt_messages(self, state: dict[str, Any]) -> list[Any]:
        if not state["trajectory"]:
            return list(state["prompt"])
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *map(_message, await self.env_response(messages, state))]

    async def add_trajectory_step(self, state: dict[str, Any], step: dict[str, Any]) -> None:
        assert step.keys() == {
            "prompt", "completion", "response", "tokens", "reward", "advantage", "is_truncated", "trajectory_id",
            "extras",
        }  # fmt: skip
        state["trajectory"].append(step)

    async def is_completed(self, state: dict[str, Any]) -> bool:
        return state["final_env_response"] is not None or len(state["trajectory"]) >= self._max_turns > 0

    async def render_completion(self, state: dict[str, Any]) -> None:
        last = state["trajectory"][-1]
        final = map(_message, state["final_env_response"] or ())
        state["completion"] = [*last["prompt"], *last["completion"], *final][len(state["prompt"]) :]


class Client:
    """Of a model; abstract in the package."""

    __abstractmethods__: ClassVar[frozenset[str]] = frozenset()


def verifiers() -> dict[str, ModuleType]:
    """The package's modules by name."""
    package, types, clients = (ModuleType(f"verifiers{part}") for part in ("", ".types", ".clients"))
    package.__dict__.update(
        MultiTurnEnv=MultiTurnEnv,
        Rubric=Rubric,
        __version__="0.1",
        load_environment=lambda id, **given: importlib.import_module(id.replace("-", "_")).load_environment(**given),
    )
    types.__dict__.update(
        ToolCall=lambda **given: SimpleNamespace(**given),
        AssistantMessage=lambda **given: SimpleNamespace(role="assistant", **given),
    )
    clients.__dict__.update(Client=Client)
    return {module.__name__: module for module in (package, types, clients)}


class GenericEnvClient:
    """A client of a server that guesses numbers, which is in this process."""

    def __init__(self, base_url: str) -> None:
        self.base_url, self.is_open = base_url, False

    def sync(self) -> GenericEnvClient:
        return self

    def connect(self) -> None:
        self.is_open = True

    def reset(self, seed: int) -> Any:
        assert self.is_open
        self._secret, self._steps = seed % 10, 0
        return SimpleNamespace(observation={"text": "Guess."}, reward=None, done=False)

    def step(self, action: Mapping[str, Any]) -> Any:
        assert self.is_open
        self._steps += 1
        is_right = action["guess"] == str(self._secret)
        text = "Yes." if is_right else "No."
        return SimpleNamespace(observation={"text": text}, reward=float(is_right), done=is_right or self._steps == 3)

    def close(self) -> None:
        self.is_open = False


def openenv() -> dict[str, ModuleType]:
    """The package's modules by name."""
    package, core = ModuleType("openenv"), ModuleType("openenv.core")
    core.__dict__["GenericEnvClient"] = GenericEnvClient
    return {"openenv": package, "openenv.core": core}
