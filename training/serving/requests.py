"""Requests of OpenAI's protocol: the supported keys, with their bounds and defaults, as in its API reference.

A key that this server does not know, or whose value it cannot act on, is refused: ignoring it would change the answer
silently. A key that is null counts as missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from corpus.tokens.chat_template import check_values
from infra.errors import StageError
from infra.io.json import BadJson, parse_json
from training.chat.channels import channel_marks
from training.chat.tool_calls import CallForm
from training.generation.constraint import Constraint, Vocabulary
from training.generation.json_grammar import Unsupported, call_grammar, json_grammar
from training.generation.session import chat_prompt, text_prompt

MOST_CHOICES = 128
MOST_STOPS = 16
MOST_LOGPROBS = 20


class Refused(Exception):
    """A request that is not answered. status: of HTTP; param: the key at fault."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def error(self) -> dict[str, str | None]:
        return {"message": self.message, "type": "invalid_request_error", "param": self.param, "code": self.code}


@dataclass(frozen=True)
class RequestPrompt:
    """The prompt of an answer.

    Args:
        ids: Token ids.
        stop_ids: Tokens that end the answer.
        text: The prompt as it was given, None where it was given as ids.
        added: Number of tokens at the beginning that the prompt as given does not have.
    """

    ids: list[int]
    stop_ids: frozenset[int]
    text: str | None = None
    added: int = 0


class _Keys(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key not in cls.model_fields}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _as_prompts(value: Any) -> Any:
    """A list of texts or of lists of token ids, from any of the four forms of a prompt."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(one) is int for one in value):
        return [value]
    whole = isinstance(value, list) and value
    if not whole or not all(
        isinstance(one, str) or (isinstance(one, list) and one and all(type(token) is int for token in one))
        for one in value
    ):
        raise ValueError("expected a text, a list of texts, a list of token ids or a list of such lists")
    return value


class _StreamOptions(_Keys):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class GenerationRequest(_Keys, ABC):
    """Keys that both kinds of requests share."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1, ge=0, le=2)
    top_p: float = Field(1, ge=0, le=1)
    seed: int | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_list)] = Field(
        [], max_length=MOST_STOPS
    )
    stream: bool = False
    stream_options: _StreamOptions | None = None
    presence_penalty: float = Field(0, ge=-2, le=2)
    frequency_penalty: float = Field(0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] = {}
    user: str | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only a request with stream: true has them")
        return self

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer, None for as many as the model has positions for."""
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """True where the text of the prompt comes before that of the answer."""
        return False

    @property
    @abstractmethod
    def likeliest(self) -> int | None:
        """Number of the likeliest tokens that are reported for each token, None where log-probabilities are not."""

    @property
    def functions_shown(self) -> frozenset[str]:
        """Names of the functions that the model may call."""
        return frozenset()

    @property
    def is_constrained(self) -> bool:
        """True where the answer keeps to a grammar."""
        return False

    @abstractmethod
    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[RequestPrompt]:
        """The prompts of the request. Raises StageError where the model cannot read them."""


class _Part(_Keys):
    type: Literal["text"]
    text: str


class _Function(_Keys):
    name: str
    arguments: str = "{}"


class _ToolCall(_Keys):
    id: str | None = None
    type: Literal["function"] = "function"
    function: _Function

    def for_template(self) -> dict[str, Any]:
        """The call with its arguments as an object: templates write them as JSON, a text would be quoted again."""
        call = self.model_dump(exclude_none=True)
        with suppress(BadJson):
            arguments = parse_json(self.function.arguments)
            if isinstance(arguments, dict):
                call["function"]["arguments"] = arguments
        return call


class _Message(_Keys):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[list[_Part], BeforeValidator(_as_parts)] = []
    name: str | None = None
    tool_calls: list[_ToolCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Keys of an answer that a client sends back.
    refusal: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] = []
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> _Message:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError("content: expected a text")
        return self

    def for_template(self, *, has_channels: bool) -> dict[str, Any]:
        """The message as chat templates read it: reasoning is `thinking` in those with channels (gpt-oss),
        `reasoning_content` in others."""
        given = {key: getattr(self, key) for key in ("name", "tool_call_id") if getattr(self, key) is not None}
        content = "".join(part.text for part in self.content)
        if self.reasoning_content:
            given["thinking" if has_channels else "reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            given["tool_calls"] = [call.for_template() for call in self.tool_calls]
            if "thinking" in given and content:  # gpt-oss's template takes one of the two before a call
                given["thinking"], content = f"{given['thinking']}\n\n{content}", ""
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **given}


class _JsonSchema(_Keys):
    name: str
    description: str | None = None
    values: dict[str, JsonValue] = Field(alias="schema")
    strict: bool = True
    """The schema is kept in either case."""


class _ResponseFormat(_Keys):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> _ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("expected json_schema with the type json_schema, and with no other")
        return self


class _ToolFunction(_Keys):
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] = {}
    strict: bool = False


class _Tool(_Keys):
    type: Literal["function"]
    function: _ToolFunction


class _FunctionName(_Keys):
    name: str


class _NamedTool(_Keys):
    type: Literal["function"]
    function: _FunctionName


class ChatRequest(GenerationRequest):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    tools: list[_Tool] = []
    tool_choice: Literal["none", "auto", "required"] | _NamedTool = "auto"
    parallel_tool_calls: bool = True
    """False: of several calls in an answer the first is returned."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    response_format: _ResponseFormat = _ResponseFormat()
    # Known keys of which one value, or any, does not change the answer.
    audio: None = None
    prediction: None = None
    verbosity: None = None
    web_search_options: None = None
    functions: Annotated[list[JsonValue], Field(max_length=0)] = []
    function_call: Literal["none", "auto"] = "auto"
    modalities: list[Literal["text"]] = ["text"]
    service_tier: Literal["auto", "default"] = "auto"
    store: Literal[False] = False
    metadata: dict[str, str] = {}
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _top_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only a request with logprobs: true has them")
        return self

    @model_validator(mode="after")
    def _calls(self) -> ChatRequest:
        names = [tool.function.name for tool in self.tools]
        if isinstance(self.tool_choice, _NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: expected one of the tools: {', '.join(names) or 'there are none'}")
        if self.tool_choice == "required" and not names:
            raise ValueError("tool_choice: required needs tools")
        if self.must_call and self.response_format.type != "text":
            raise ValueError("response_format: expected text, since tool_choice makes the answer a function call")
        if not self.must_call and any(tool.function.strict for tool in self.tools):
            raise ValueError("tools: strict: true is enforced only if tool_choice is required or names a function")
        return self

    @property
    def is_constrained(self) -> bool:
        return self.must_call or self.response_format.type != "text"

    @property
    def must_call(self) -> bool:
        """True where the answer is a call of a function."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, _NamedTool)

    def constraint(self, vocabulary: Vocabulary, form: CallForm) -> Constraint | None:
        """Return the grammar that the answer keeps to, None for any text.

        Raises:
            Refused: for a schema that no grammar is made of, naming the keyword.
        """
        try:
            if self.must_call:
                called = [tool.function for tool in self.tools if tool.function.name in self.functions_shown]
                schemas = {function.name: function.parameters for function in called}
                strict = {function.name for function in called if function.strict}
                return Constraint(call_grammar(schemas, strict, form.arguments, form.before, form.after), vocabulary)
            response_format = self.response_format
            if response_format.type == "text":
                return None
            schema = None if response_format.json_schema is None else response_format.json_schema.values
            return Constraint(json_grammar(schema), vocabulary)
        except Unsupported as error:
            key = "tools" if self.must_call else "response_format"
            raise Refused(400, f"{key}: {error}", "unsupported_schema", key) from None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def functions_shown(self) -> frozenset[str]:
        if isinstance(self.tool_choice, _NamedTool):
            return frozenset((self.tool_choice.function.name,))
        return frozenset(tool.function.name for tool in self.tools if self.tool_choice != "none")

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[RequestPrompt]:
        tools = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in self.tools]
        has_channels = bool(channel_marks(tokenizer))
        messages = [message.for_template(has_channels=has_channels) for message in self.messages]
        shown = () if self.tool_choice == "none" else tools
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        try:
            check_values(tokenizer, effort, "")
        except StageError:
            message = "reasoning_effort: expected null, since the model's chat template does not read it"
            raise Refused(400, message, "invalid_value", "reasoning_effort") from None
        return [RequestPrompt(*chat_prompt(tokenizer, messages, shown, {**effort, **self.chat_template_kwargs}))]


class CompletionRequest(GenerationRequest):
    prompt: Annotated[list[str | list[int]], BeforeValidator(_as_prompts)] = Field(max_length=MOST_CHOICES)
    max_tokens: int | None = Field(16, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    # Known keys of which one value does not change the answer.
    best_of: int | None = None
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of: this server writes as many answers as it returns, n")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: expected at least 1, or echo: true")
        if len(self.prompt) * self.n > MOST_CHOICES:
            raise ValueError(f"n: expected at most {MOST_CHOICES} answers to all prompts together")
        return self

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    def prompts(self, tokenizer: PreTrainedTokenizerBase) -> list[RequestPrompt]:
        return [self._prompt(tokenizer, given) for given in self.prompt]

    def _prompt(self, tokenizer: PreTrainedTokenizerBase, given: str | list[int]) -> RequestPrompt:
        if isinstance(given, str):
            ids, stop_ids = text_prompt(tokenizer, given)
            return RequestPrompt(ids, stop_ids, given, len(text_prompt(tokenizer, "")[0]))
        wrong = next((token for token in given if not 0 <= token < len(tokenizer)), None)
        if wrong is not None:
            message = f"prompt: expected token ids from 0 to {len(tokenizer) - 1}, not {wrong}"
            raise Refused(400, message, "invalid_token_id", "prompt")
        return RequestPrompt(given, text_prompt(tokenizer, "")[1])


Kind = TypeVar("Kind", bound=GenerationRequest)


def read(kind: type[Kind], body: bytes) -> Kind:
    """Parse a request of this kind. Raises Refused, naming the key."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        if not key and (named := message.partition(": ")[0]) in kind.model_fields:
            raise Refused(400, message, "invalid_value", named) from None
        if first["type"] == "extra_forbidden":
            message = f"{key}: this server does not support it"
            raise Refused(400, message, "unknown_parameter", key) from None
        code = "invalid_value" if key else "bad_request"
        raise Refused(400, f"{key}: {message}".removeprefix(": "), code, key or None) from None


def served_name(name: str | None, names: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the name of the model of a request, the first where it names none. Raises Refused."""
    if name is None:
        return next(iter(names))
    if name not in names:
        message = f"no model {name!r} is served; there are {', '.join(names)}"
        raise Refused(404, message, "model_not_found", "model")
    return name
