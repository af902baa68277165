"""The interface of environments: `Environment`, and `ToolEnvironment`, whose methods are the tools.

An environment gets a task, opens a conversation, and replies to each answer of the policy until the episode is done;
then it gives a reward. Only the standard library is imported here: environments run in a sandbox.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

Message = Mapping[str, Any]
"""A message of OpenAI's chats: `role` (system, user, tool) and `content`."""
Task = Mapping[str, Any]
"""A task: `number` and `split` (train, heldout); where the tasks are prompts also `prompt`, `response` (the reference
where there is one) and `history`."""

_JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}
_Method = TypeVar("_Method", bound=Callable[..., str])


class ToolCall(NamedTuple):
    """A tool call of the policy."""

    name: str
    arguments: Mapping[str, Any]


class Reply(NamedTuple):
    """Messages that follow an answer, one with the role `tool` for each call or others of the role `user`; and whether
    the episode is done, after which no message is read."""

    messages: Sequence[Message] = ()
    done: bool = False


class Environment:
    """An environment with one episode at a time. The keyword arguments of a subclass are `environment.options`.

    `reset` and `step` must depend on the task, the seed and the answers alone: where a process is replaced, its
    episodes are repeated up to the same state.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """Descriptions of the tools in OpenAI's format, read after `reset`."""

    def reset(self, task: Task, seed: int) -> str | Sequence[Message]:
        """Begin an episode and return its opening messages, or the text of one message of the user.

        Args:
            seed: the same for all episodes of a task.
        """
        raise NotImplementedError

    def step(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        """Return the reply to an answer.

        Args:
            text: of the answer, without its tool calls and without reasoning.
            calls: tool calls in the answer.
        """
        raise NotImplementedError

    def reward(self) -> float:
        """Return the reward of the episode, called once, after its last answer; also where turns or tokens ran out."""
        raise NotImplementedError

    def accepts(self) -> bool | None:
        """Return the verdict of a second rule on the episode, None without one. It is not part of the reward: a
        rewarded episode that it rejects is marked in the report as possible reward hacking."""
        return None


def tool(method: _Method) -> _Method:
    """Mark a method of a `ToolEnvironment` as a tool. Its docstring and its annotations describe it."""
    method.is_tool = True  # type: ignore[attr-defined]
    return method


class ToolEnvironment(Environment):
    """An environment whose tools are the methods marked with `tool`. An answer without a call is the last one."""

    def __init__(self) -> None:
        methods = inspect.getmembers(type(self), lambda member: getattr(member, "is_tool", False))
        self._names = [name for name, _ in methods]
        self.tools = [_described(name, method) for name, method in methods]
        self.answer: str | None = None

    def step(self, text: str, calls: Sequence[ToolCall]) -> Reply:
        if not calls:
            self.answer = text
            return Reply(done=True)
        return Reply([{"role": "tool", "content": self._result(call)} for call in calls])

    def _result(self, call: ToolCall) -> str:
        """Return a tool's result, or its error for the policy to read."""
        if call.name not in self._names:
            return f"error: there is no tool {call.name}"
        method = getattr(self, call.name)
        try:
            arguments = inspect.signature(method).bind(**call.arguments)
        except TypeError as error:
            return f"error: {error}"
        try:
            return str(method(*arguments.args, **arguments.kwargs))
        except (ValueError, ArithmeticError, LookupError, TypeError) as error:
            return f"error: {error}"


def _described(name: str, method: Callable[..., str]) -> dict[str, Any]:
    hints = get_type_hints(method)
    parameters = [parameter for parameter in inspect.signature(method).parameters.values() if parameter.name != "self"]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": inspect.cleandoc(method.__doc__ or "").partition("\n\n")[0],
            "parameters": {
                "type": "object",
                "properties": {
                    item.name: {"type": _JSON_TYPES.get(hints.get(item.name, str), "string")} for item in parameters
                },
                "required": [item.name for item in parameters if item.default is inspect.Parameter.empty],
            },
        },
    }
