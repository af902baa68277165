"""Episodes of a policy in an environment: all of a round side by side, a turn at a time.

    1. open     the environment gives each episode its opening messages and its tools: the prompt, in the chat template
    2. answer   by the policy, sampled from the tokens of the episode so far
    3. step     the environment reads the answer's text and its tool calls, and replies, until the episode is done
    4. reward   by the environment

What is sampled is kept as tokens and never encoded again: a turn's prompt is the tokens of the turns before it,
followed by the tokens that the chat template writes for the environment's reply. Only the environment reads text.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from evaluation.generation.decoding import generate
from evaluation.generation.token_choice import SamplingOptions
from infra.config import derived_seed
from infra.errors import StageError, stage_error
from infra.io.json import parse_json
from training.chat.base import Chat
from training.chat.channels import Reasoning
from training.chat.model_template import call_id
from training.chat.tool_calls import AnswerFormat, ParsedToolCall
from training.config import RlhfConfig
from training.config.alignment.environment import EnvironmentConfig
from training.core import ranks
from training.core.hardware import Hardware
from training.generation.answer_text import AnswerText
from training.generation.completions import Completions, Episode
from training.generation.vllm_sampler import VllmSampler, on_first
from training.rl.environments.pool import NOT_SENT, EnvironmentPool, EpisodeFailure, Reply, Request
from training.rl.prompts import Prompt

ATTEMPTS = 3
"""Times that an episode is played until the environment does not fail."""
_THOUGHT = "</think>"
_AT_ONCE = 128


class Task(NamedTuple):
    """A task as an environment gets it, and the seed of its episodes."""

    values: dict[str, Any]
    seed: int

    @classmethod
    def of(cls, prompt: Prompt) -> Task:
        if prompt.task is not None:
            return cls({key: value for key, value in prompt.task.items() if key != "seed"}, int(prompt.task["seed"]))
        reference = prompt.rule.response if prompt.rule is not None else prompt.response
        values = {
            "prompt": prompt.text,
            "response": reference,
            "history": [dict(message) for message in prompt.history],
        }
        return cls(values, zlib.crc32(prompt.text.encode()))


@dataclass
class Playing:
    """An episode in progress: tokens after the prompt, and for each if the policy sampled it."""

    row: int
    prompt: list[int]
    messages: list[dict[str, Any]]
    tools: list[Any]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    ended: str = ""
    reward: float = 0.0
    accepted: bool | None = None
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens, where vLLM reports them."""

    def answer(self, ids: Sequence[int], logprobs: Sequence[float] = ()) -> None:
        """Append what the policy sampled."""
        self.ids += ids
        self.logprobs += logprobs
        self.sampled += [True] * len(ids)
        self.turns += 1

    def follow(self, ids: Sequence[int]) -> None:
        """Append what the environment replied."""
        self.ids += ids
        self.sampled += [False] * len(ids)


class Episodes:
    """Player of episodes. Every rank must call `play`, and plays its part of them in its own processes."""

    def __init__(self, config: RlhfConfig, chat: Chat, hardware: Hardware, pool: EnvironmentPool) -> None:
        assert config.environment is not None
        self._config = config
        self._environment: EnvironmentConfig = config.environment
        self._chat = chat
        self._hardware = hardware
        self._pool = pool
        self._format = AnswerFormat(chat.tokenizer)
        self._next = 0

    def play(
        self, policy: PreTrainedModel | VllmSampler, tasks: Sequence[Task], seed: int, group: int = 1, first: int = 0
    ) -> Completions:
        """Return an episode of the policy for each task.

        An episode that the environment failed in is dropped and counted, and played again up to `ATTEMPTS` times; then
        a copy of another episode of its group takes its place.

        Args:
            policy: or vLLM, which has its weights; rank 0 then plays all episodes.
            group: number of consecutive episodes of one task.
            first: number of the first task in its round, which with the seed decides its draws.

        Raises StageError `too_many_dropped` with more than `max_dropped` of the episodes dropped.
        """
        allowed = int(self._environment.max_dropped * len(tasks))
        rows = list(range(len(tasks)))
        if isinstance(policy, VllmSampler):
            played, failed = on_first(lambda: self._attempted(policy, rows, tasks, seed, allowed, first))
        else:
            own_rows = rows[ranks.own_part(len(rows))]
            played, failed = {}, {}
            for of_rank in chain(*ranks.gather([self._attempted(policy, own_rows, tasks, seed, allowed, first)])):
                played |= of_rank[0]
                failed |= of_rank[1]
        self._check(failed, len(tasks), allowed)
        return self._completions(played, failed, len(tasks), group)

    def _attempted(
        self,
        policy: PreTrainedModel | VllmSampler,
        rows: Sequence[int],
        tasks: Sequence[Task],
        seed: int,
        allowed: int,
        first: int,
    ) -> tuple[dict[int, Playing], dict[int, list[EpisodeFailure]]]:
        """Play these rows' episodes until each is complete, `ATTEMPTS` times at most; return them with the failures of
        each row."""
        played: dict[int, Playing] = {}
        failures: dict[int, list[EpisodeFailure]] = {row: [] for row in rows}
        for attempt in range(ATTEMPTS):
            waiting = [row for row in rows if row not in played]
            if not waiting or sum(map(len, failures.values())) > allowed:
                break
            for row, result in self._played(policy, waiting, tasks, [seed, attempt], allowed, first).items():
                if isinstance(result, EpisodeFailure):
                    failures[row].append(result)
                else:
                    played[row] = result
        return played, failures

    def _played(
        self,
        policy: PreTrainedModel | VllmSampler,
        rows: Sequence[int],
        tasks: Sequence[Task],
        seed: Sequence[int],
        allowed: int,
        first: int,
    ) -> dict[int, Playing | EpisodeFailure]:
        """Play these rows' episodes."""
        # 1. Open.
        results: dict[int, Playing | EpisodeFailure] = {}
        numbers = {row: self._next + row for row in rows}
        self._next += len(tasks)
        requests = [{"do": "open", "task": tasks[row].values, "seed": tasks[row].seed} for row in rows]
        live: list[Playing] = []
        for row, reply in zip(rows, self._replies(numbers, rows, requests, allowed), strict=True):
            opened = reply if isinstance(reply, EpisodeFailure) else self._opened(row, reply)
            if isinstance(opened, EpisodeFailure):
                results[row] = opened
                self._pool.drop(numbers[row])
            else:
                live.append(opened)
        everyone = list(live)
        for turn in range(self._environment.max_turns):
            if not live:
                break
            # 2. Answer.
            calls = self._answered(policy, live, int(np.random.default_rng([*seed, turn]).integers(2**62)), first)
            # 3. Step: those whose answer has an end.
            going = [episode for episode in live if not episode.ended]
            requests = [
                {"do": "step", "text": text, "calls": [_as_request(call) for call in calls_of]}
                for text, calls_of in (calls[episode.row] for episode in going)
            ]
            replies = self._replies(numbers, [episode.row for episode in going], requests, allowed)
            for episode, reply in zip(going, replies, strict=True):
                if isinstance(reply, EpisodeFailure):
                    results[episode.row] = reply
                else:
                    self._replied(episode, reply, calls[episode.row][1])
            live = [episode for episode in going if not episode.ended and episode.row not in results]
        # 4. Reward of those that the environment has not ended.
        ended = [episode for episode in everyone if episode.ended != "done" and episode.row not in results]
        replies = self._replies(numbers, [episode.row for episode in ended], [{"do": "end"}] * len(ended), allowed)
        for episode, reply in zip(ended, replies, strict=True):
            if isinstance(reply, EpisodeFailure):
                results[episode.row] = reply
            else:
                episode.reward, episode.accepted = float(reply["reward"]), reply["accepted"]
        return {episode.row: episode for episode in everyone} | results

    def _replies(
        self, numbers: Mapping[int, int], rows: Sequence[int], requests: Sequence[Request], allowed: int
    ) -> list[Reply | EpisodeFailure]:
        numbered = [(numbers[row], request) for row, request in zip(rows, requests, strict=True)]
        return self._pool.ask(numbered, allowed)

    def _opened(self, row: int, reply: Reply) -> Playing | EpisodeFailure:
        """Return an episode with its prompt."""
        messages, tools, chat = reply["messages"], reply["tools"], self._chat
        if tools and not chat.shows_tools and self._environment.show_tools:
            messages = _with_tools(messages, tools)
        shown = tools if chat.shows_tools and self._environment.show_tools else []
        (prompt,) = chat.ask([messages], [shown])
        longest = self._config.max_prompt_tokens
        if len(prompt) > longest:
            message = f"its opening has {len(prompt)} tokens, more than the {longest} of max_prompt_tokens"
            return EpisodeFailure("prompt", message)
        return Playing(row, list(prompt), [dict(message) for message in messages], tools)

    def _answered(
        self, policy: PreTrainedModel | VllmSampler, live: Sequence[Playing], seed: int, first: int
    ) -> dict[int, tuple[str, list[ParsedToolCall]]]:
        """Sample an answer in each episode, and return its text and its calls by row."""
        config, chat = self._config, self._chat
        prompts = [episode.prompt + episode.ids for episode in live]
        numbers = [first + episode.row for episode in live]
        rooms = [min(config.answer_max_tokens, self._environment.max_tokens - len(episode.ids)) for episode in live]
        if isinstance(policy, VllmSampler):
            answers = policy.written(prompts, seed, numbers)
        else:
            options = SamplingOptions(max(rooms), frozenset(chat.stops), config.temperature, seed=seed)
            dtype, was_training = self._hardware.compute, policy.training
            policy.eval()
            try:
                sampled = generate(policy, prompts, options, numbers=numbers, at_once=_AT_ONCE, dtype=dtype)
            finally:
                policy.train(was_training)
            answers = [(ids, []) for ids in sampled]
        read: dict[int, tuple[str, list[ParsedToolCall]]] = {}
        for episode, (answer, logprobs), room in zip(live, answers, rooms, strict=True):
            ids = answer[:room]
            episode.answer(ids, logprobs[:room])
            text, calls = self.read(ids, episode.tools)
            episode.calls += len(calls)
            read[episode.row] = text, calls
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in calls]
            episode.messages.append(message)
            if not chat.has_ended(ids):
                episode.ended = "tokens" if len(ids) == room < config.answer_max_tokens else "unfinished"
        return read

    def read(self, ids: Sequence[int], tools: Sequence[Any]) -> tuple[str, list[ParsedToolCall]]:
        """Return the text of a sampled answer, without its reasoning, and its tool calls."""
        names = [str(described["function"]["name"]) for described in tools]
        shown = self._format.shown(names)
        kept = ids[:-1] if ids and ids[-1] in self._chat.stops and ids[-1] not in shown else ids
        text = AnswerText(self._chat.tokenizer, shown=shown)
        written = "".join(map(text.add, kept)) + text.end()
        reader = self._format.reader(names)
        parts = [*reader.add(written), *reader.end()] if reader else [written]
        calls = [part for part in parts if isinstance(part, ParsedToolCall)]
        spoken = "".join(part for part in parts if isinstance(part, str) and not isinstance(part, Reasoning))
        return spoken.rpartition(_THOUGHT)[2].strip(), calls

    def _replied(self, episode: Playing, reply: Reply, calls: Sequence[ParsedToolCall]) -> None:
        """End an episode, or append the environment's messages."""
        messages: list[dict[str, Any]] = reply["messages"]
        episode.messages += messages
        if reply["done"]:
            episode.ended, episode.reward, episode.accepted = "done", float(reply["reward"]), reply["accepted"]
            return
        if episode.turns == self._environment.max_turns:
            episode.ended = "turns"
            return
        if episode.ids[-1] not in self._chat.turn_ends:
            episode.ended = "unfinished"
            return
        shown = episode.tools if self._environment.show_tools else []
        names = [call.name for call in calls]
        numbered = _numbered(messages, calls)
        try:
            ids = self._chat.follow_up(numbered, names, shown)
        except StageError:
            if len(calls) < 2:
                raise
            # Some templates show one call of an answer: the policy made several.
            episode.ended = "unfinished"
            return
        if len(episode.ids) + len(ids) >= self._environment.max_tokens:
            episode.ended = "tokens"
            return
        episode.follow(ids)

    def _check(self, failures: Mapping[int, Sequence[EpisodeFailure]], count: int, allowed: int) -> None:
        dropped = [failure for given in failures.values() for failure in given if failure.kind != NOT_SENT]
        if len(dropped) <= allowed:
            return
        kinds = ", ".join(f"{many} {kind}" for kind, many in Counter(failure.kind for failure in dropped).most_common())
        limit = f"max_dropped: {self._environment.max_dropped:g} of {count}"
        raise stage_error(
            "too_many_dropped",
            "rlhf.environment.max_dropped",
            f"expected at most {allowed} dropped episodes of a round ({limit}), and {len(dropped)} were: the "
            f"environment {self._environment.use} failed ({kinds}); the first: {dropped[0].message}",
            "correct the environment, or raise environment.timeout_s, memory_mb or max_dropped",
        )

    def _completions(
        self, played: Mapping[int, Playing], failures: Mapping[int, Sequence[EpisodeFailure]], count: int, group: int
    ) -> Completions:
        """Lay out the episodes in the order of the rows."""
        source: dict[int, int] = {}
        for row in range(count):
            if row not in played:
                begin = row - row % group
                siblings = [other for other in range(begin, begin + group) if other in played]
                # A task that fails every time is replaced by that of another group.
                complete = [start for start in range(0, count, group) if all(start + n in played for n in range(group))]
                if not siblings and not complete:
                    raise stage_error(
                        "too_many_dropped",
                        "rlhf.environment.max_dropped",
                        f"the environment {self._environment.use} failed in all episodes of a task, and in some of all "
                        "other tasks",
                        "correct the environment",
                    )
                source[row] = siblings[row % len(siblings)] if siblings else complete[row % len(complete)] + row - begin
        copies = {row for row, other in source.items() if other != row}
        rows = [played[source.get(row, row)] for row in range(count)]
        episodes = [
            Episode(
                episode.sampled,
                episode.reward,
                episode.ended,
                episode.turns,
                episode.calls,
                episode.accepted,
                episode.messages,
                [f"{failure.kind}: {failure.message}" for failure in failures.get(row, ())],
                is_copy=row in copies,
            )
            for row, episode in enumerate(rows)
        ]
        prompts, ids = [episode.prompt for episode in rows], [episode.ids for episode in rows]
        reported = [episode.logprobs for episode in rows]
        return Completions.of_episodes(prompts, ids, episodes, reported if any(reported) else None)


def own_tasks(environment: EnvironmentConfig, side: str, heldout: int) -> list[Prompt]:
    """Return the tasks that an environment makes by itself.

    Args:
        side: train or heldout, whose tasks have other seeds.
        heldout: number of held-out tasks.
    """
    is_heldout = side == "heldout"
    count = heldout if is_heldout else environment.tasks or 0
    return [
        Prompt("", [], "", None, task={"number": number, "split": side, "seed": derived_seed(int(is_heldout), number)})
        for number in range(count)
    ]


def _as_request(call: ParsedToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": parse_json(call.arguments)}


def _numbered(messages: Sequence[Mapping[str, Any]], calls: Sequence[ParsedToolCall]) -> list[dict[str, Any]]:
    """Return messages whose tool results name the call and the function that they are of."""
    results = iter(range(len(calls)))
    numbered = []
    for message in messages:
        number = next(results, None) if message["role"] == "tool" else None
        ids = {} if number is None else {"tool_call_id": call_id(number), "name": calls[number].name}
        numbered.append({**message, **ids})
    return numbered


def _with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages whose first one of the user describes the tools, for chat formats without a place for them."""
    described = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You can call these functions:\n{described}\n"
        'A call is written as <tool_call>{"name": NAME, "arguments": {…}}</tool_call>.\n\n'
    )
    at = next((number for number, message in enumerate(messages) if message["role"] == "user"), 0)
    shown = [dict(message) for message in messages]
    shown[at]["content"] = text + shown[at]["content"]
    return shown
