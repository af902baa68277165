"""Conversations as token ids by the chat template that a model brings along, as transformers reads them.

Prompts are the ids of `apply_chat_template(..., add_generation_prompt=True)`, and what is learnt is what the template
adds for the assistant, up to and with the token that ends its turn: between `{% generation %}` and
`{% endgeneration %}` where it has these, else what follows the prompt. Templates are rendered by transformers, in a
process with bounds of memory and time (infra/io/templates.py), since they came with the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.errors import StageError, stage_error
from infra.io import templates
from infra.io.json import BadJson, parse_json
from training.chat.base import Answer, Chat, Conversation, Message, as_user, calls_functions, no_tools

Offsets = Sequence[tuple[int, int]]

USE_OURS = "set base_model.chat_template: stemma, or correct the template"

_SPELT = "\ufdd0"
"""Put into special tokens that a message spells, a code point that no text has, so that they are read as text."""
_PROBE = "Xyzzy"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
_PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": _PROBE}}}


def call_id(number: int) -> str:
    """Return an id of a call, in the nine characters that Mistral's templates require."""
    return f"call{number % 100_000:05}"


class TemplatePrompt(list[int]):
    """The ids of a prompt, with the messages that they were rendered from.

    answers: (start, stop) of the assistant's earlier turns, each with its end. tools: that the template showed.
    """

    def __init__(
        self,
        ids: Iterable[int],
        messages: Sequence[Message],
        answers: Sequence[tuple[int, int]],
        tools: Sequence[Any] = (),
    ) -> None:
        super().__init__(ids)
        self.messages = list(messages)
        self.answers = list(answers)
        self.tools = tools


class TemplateChat(Chat):
    """A tokenizer with its own chat template.

    end: the token that ends an answer, the first special one behind it in the template, else the tokenizer's
    eos_token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Iterable[int] = (),
        **values: Any,
    ) -> None:
        """stops: ids that end an answer by the model's generation config. values: for every rendering."""
        self.tokenizer = tokenizer
        self._template: str = tokenizer.get_chat_template()
        # A tokenizer may have a further template for conversations with tools.
        self._tool_template: str = tokenizer.get_chat_template(tools=[_PROBE_TOOL])
        self._values = {**tokenizer.special_tokens_map, **values}
        special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = {*special.values(), *tokenizer.all_special_ids}
        self._special = {**special, **dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._spelt = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        question = [{"role": "user", "content": _PROBE}]
        answered = [*question, {"role": "assistant", "content": _PROBE}]
        prompt, (full, _) = self._render(question, True)[0], self._render(answered, False)
        common = _common(prompt, full)
        at = full.find(_PROBE, common)
        if at < 0:
            raise stage_error(
                "bad_template",
                "chat_template",
                "the model's chat template does not show answers with the role assistant",
                USE_OURS,
            )
        self._opening = full[common:at]
        unasked = _common(prompt, self._render(question, False)[0])
        self._asking, self._header = len(prompt) - unasked, prompt[unasked:common]
        eos = tokenizer.eos_token_id
        final = self._first_special(full, at + len(_PROBE))
        if final is None and eos is None:
            raise stage_error(
                "no_end_of_answer", "chat_template", "expected a token that ends answers, or an eos_token"
            )
        self.end = int(eos if final is None else final)
        self._ends = {self.end, *self._end_between_turns(answered)}
        self.pad = self.end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.stops = {self.end, *stops, *(() if eos is None else (int(eos),))}
        self._call_ends = self._ends_of_calls(question)
        self.stops |= self._call_ends - self._ends
        self.least_prompt = len(self.ask([[{"role": "user", "content": "a"}]])[0])

    def _first_special(self, text: str, start: int) -> int | None:
        ids, offsets = self._encode(text)
        return next(
            (
                number
                for number, (at, _) in zip(ids, offsets, strict=True)
                if at >= start and number in self._special_ids
            ),
            None,
        )

    def _end_between_turns(self, answered: Sequence[Message]) -> Iterator[int]:
        """The end of an answer that another turn follows, which is another one in some templates (harmony)."""
        again = {"role": "user", "content": "b"}
        try:
            (text, _), alone = self._render([*answered, again], False), self._render([again], False)[0]
        except StageError as error:
            _raise_beyond_bounds(error)
            return  # a template for one turn
        if _PROBE not in text:  # a template that shows the last turn alone
            return
        end = self._first_special(text, text.rindex(_PROBE) + len(_PROBE))
        bos = self.tokenizer.bos_token_id
        first = next(
            (number for number in self._encode(alone)[0] if number in self._special_ids and number != bos), None
        )
        if end is not None and end != first:
            yield end

    def _ends_of_calls(self, question: Sequence[Message]) -> set[int]:
        """The end of an answer that calls functions: that of any answer, or another one (harmony)."""
        if not self.shows_tools:
            return self._ends
        try:
            call = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
            text, _ = self._render([*question, call], False, [_PROBE_TOOL])
        except StageError as error:
            _raise_beyond_bounds(error)
            return self._ends  # calls want more than OpenAI's keys
        ids, offsets = self._encode(text)
        start = text.rfind(_PROBE) + len(_PROBE)
        special = [
            number for number, (at, _) in zip(ids, offsets, strict=True) if at >= start and number in self._special_ids
        ]
        end = next((number for number in special if number in self._ends), special[-1] if special else None)
        return self._ends if end is None else {end}

    @property
    def shows_tools(self) -> bool:
        return bool(re.search(r"\btools\b", self._tool_template))

    @property
    def turn_ends(self) -> set[int]:
        return self._ends | self._call_ends

    def follow_up(self, messages: Sequence[Message], calls: Sequence[str] = (), tools: Sequence[Any] = ()) -> list[int]:
        if not self.shows_tools:
            messages, calls, tools = [as_user(message) for message in messages], (), ()
        # The same messages after another answer, of which all up to and with its end is left out.
        answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else _PROBE}
        if calls:
            answer["tool_calls"] = [
                {**_PROBE_CALL, "id": call_id(number), "function": {"name": name, "arguments": {"x": _PROBE}}}
                for number, name in enumerate(calls)
            ]
        text, _ = self._render([{"role": "user", "content": "a"}, answer, *messages], True, tools)
        at = -1
        for _ in calls or ("",):
            at = text.find(_PROBE, at + 1)
        ids, offsets = self._encode(text)
        ends = self._call_ends if calls else self._ends
        end = next(
            (
                index
                for index, (number, (begin, _)) in enumerate(zip(ids, offsets, strict=True))
                if at >= 0 and begin >= at and number in ends
            ),
            None,
        )
        if end is None:
            message = "the model's chat template does not show an answer before further messages"
            raise stage_error("bad_template", "chat_template", message, USE_OURS)
        return ids[end + 1 :]

    def _render(
        self, messages: Sequence[Message], asking: bool, tools: Sequence[Any] = ()
    ) -> tuple[str, Sequence[tuple[int, int]]]:
        """Render a conversation; return the text and the spans that the template marks as written by the assistant.

        Raises StageError `bad_template` for a template beyond the bounds of memory and time, `bad_messages` for one
        that refuses the conversation.
        """
        template = self._tool_template if tools else self._template
        try:
            texts, spans = templates.chat(
                conversations=[self._as_text([_with_mappings(message) for message in messages])],
                tools=list(tools) or None,
                chat_template=template,
                return_assistant_tokens_mask=bool(re.search(r"\{%-?\s*generation\s*-?%\}", template)),
                add_generation_prompt=asking,
                **self._values,
            )
        except templates.TemplateFault as error:
            if error.beyond_bounds:
                message = f"the model's chat template cannot be rendered: {error}"
                raise stage_error("bad_template", "chat_template", message, USE_OURS) from None
            raise stage_error(
                "bad_messages",
                "messages",
                f"the model's chat template rejects this conversation: {str(error)[:300]}",
                "use the roles that the model supports, in its order",
            ) from None
        return texts[0], spans[0] if spans else ()

    def _as_text(self, value: Any) -> Any:
        """Messages whose texts spell no special token."""
        if isinstance(value, str):
            return (
                self._spelt.sub(lambda match: f"{match[0][:1]}{_SPELT}{match[0][1:]}", value) if self._spelt else value
            )
        if isinstance(value, Mapping):
            return {key: self._as_text(item) for key, item in value.items()}
        return [self._as_text(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode(self, text: str) -> tuple[list[int], Offsets]:
        """Ids of a rendered text, and from where to where in it each is."""
        if _SPELT not in text:
            encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            return encoded["input_ids"], encoded["offset_mapping"]
        assert self._spelt is not None
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        done = 0
        for special in (*self._spelt.finditer(text), None):
            until = len(text) if special is None else special.start()
            positions = [at for at in range(done, until) if text[at] != _SPELT]
            if positions:
                plain = "".join(text[at] for at in positions)
                encoded = self.tokenizer(
                    plain,
                    add_special_tokens=False,
                    split_special_tokens=True,
                    return_offsets_mapping=True,
                    verbose=False,
                )
                ids += encoded["input_ids"]
                offsets += [
                    (positions[min(a, len(positions) - 1)], positions[b - 1] + 1 if b else done)
                    for a, b in encoded["offset_mapping"]
                ]
            if special is not None:
                ids.append(self._special[special[0]])
                offsets.append(special.span())
                done = special.end()
        return ids, offsets

    def ask(
        self, conversations: Sequence[Sequence[Message]], tools: Sequence[Sequence[Any]] | None = None
    ) -> list[list[int]]:
        if tools is None:
            return [self._prompt_of(messages) for messages in conversations]
        return [self._prompt_of(messages, shown) for messages, shown in zip(conversations, tools, strict=True)]

    def _prompt_of(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> TemplatePrompt:
        if not self.shows_tools and (tools or calls_functions(messages)):
            raise no_tools("tools" if tools else "messages")
        text, spans = self._render(messages, True, tools)
        ids, offsets = self._encode(text)
        if spans:
            return TemplatePrompt(ids, messages, [_tokens_within(offsets, span) for span in spans], tools)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            begin = self._begin(text, messages, number, tools)
            start = next((at for at, (offset, _) in enumerate(offsets) if offset >= begin), len(ids))
            ends = self._call_ends if message.get("tool_calls") else self._ends
            stop = next((at + 1 for at in range(start, len(ids)) if ids[at] in ends), None)
            if stop is not None:
                answers.append((start, stop))
        return TemplatePrompt(ids, messages, answers, tools)

    def _begin(self, text: str, messages: Sequence[Message], number: int, tools: Sequence[Any]) -> int:
        """The character of a rendered conversation at which the answer `messages[number]` begins."""
        before = self._render(messages[:number], True, tools)[0]
        begin = _common(before, text)
        if begin >= len(before) - self._asking:
            return begin
        # What comes before the answer is written otherwise where no question follows it (the thoughts of Qwen3's calls,
        # Mistral's tools): the answer begins where another one in its place would differ, behind its header.
        other = {"role": "assistant", "content": _SPELT}
        differs = _common(self._render([*messages[:number], other, *messages[number + 1 :]], False, tools)[0], text)
        at = text.rfind(self._header, 0, differs)
        return at + len(self._header) if self._header and at >= 0 else differs

    def respond(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> list[list[int]]:
        return [self._response(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]

    def _response(self, prompt: Sequence[int], answer: Answer) -> list[int]:
        assert isinstance(prompt, TemplatePrompt)
        message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
        if message.get("tool_calls") and not self.shows_tools:
            raise no_tools("messages")
        full, spans = self._render([*prompt.messages, message], False, prompt.tools)
        ids, offsets = self._encode(full)
        count = len(prompt)
        if ids[:count] == list(prompt):
            stop = _tokens_within(offsets, spans[-1])[1] if spans else None
            response = ids[count:stop]
        else:
            # Letters on both sides of the seam share a token, or the template writes earlier answers otherwise than it
            # asks for them. What the model will go on from is the prompt.
            begin = self._begin(full, [*prompt.messages, message], len(prompt.messages), prompt.tools)
            response = self._encode(full[begin:])[0]
        if spans and ids[:count] == list(prompt) and response:
            return response
        kinds = (self._call_ends,) if message.get("tool_calls") else ({self.end}, self._ends)
        stop = next((at + 1 for ends in kinds for at, number in enumerate(response) if number in ends), None)
        return response[:stop] if stop else [*response, min(kinds[0])]

    def prompts(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        return [
            self.shortened(prompt, max_tokens)
            for prompt in self.ask([[{"role": "user", "content": text}] for text in texts])
        ]

    def shortened(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Shorten as in `Chat`: the oldest exchanges after the system message are dropped first, and the end of the
        last message is kept. The system message is dropped last."""
        if len(prompt) <= max_tokens:
            return prompt if isinstance(prompt, list) else list(prompt)
        assert isinstance(prompt, TemplatePrompt)
        messages = prompt.messages
        system = [message for message in messages[:1] if message["role"] in ("system", "developer")]
        users = [at for at, message in enumerate(messages) if message["role"] == "user" and at > len(system)]
        for at in users:
            if len(shorter := self._prompt_of([*system, *messages[at:]], prompt.tools)) <= max_tokens:
                return shorter
        last = messages[max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1) :]
        text = last[0]["content"]
        best = self._prompt_of([{**last[0], "content": text[-1:]}, *last[1:]], prompt.tools)
        for kept in (system, []) if system else ([],):
            fewest, most = 1, len(text)
            while fewest <= most:
                middle = (fewest + most) // 2
                shorter = self._prompt_of([*kept, {**last[0], "content": text[-middle:]}, *last[1:]], prompt.tools)
                if len(shorter) <= max_tokens:
                    best, fewest = shorter, middle + 1
                else:
                    most = middle - 1
            if len(best) <= max_tokens and fewest > 1:
                break
        return best

    def dialogue_of(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        return self.shortened(self._prompt_of(messages), max_tokens)

    def conversations(self, prompts: Sequence[str], responses: Sequence[str]) -> list[Conversation]:
        rendered = self.ask([[{"role": "user", "content": text}] for text in prompts])
        return [Conversation(*pair) for pair in zip(rendered, self.respond(rendered, responses), strict=True)]

    def has_ended(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self.stops

    def decode(self, ids: Sequence[int]) -> str:
        """An answer as text, up to its end, without what the template opens every answer with: of one in several
        channels the last."""
        until = next((index for index, number in enumerate(ids) if number in self.stops), len(ids))
        kept_ids = list(ids[:until])
        opening = self._encode(self._opening)[0] if self._opening else []
        if self._special_ids.intersection(opening):
            starts = [at for at in range(len(kept_ids)) if kept_ids[at : at + len(opening)] == opening]
            kept_ids = kept_ids[starts[-1] + len(opening) :] if starts else kept_ids
        text = str(self.tokenizer.decode(kept_ids, skip_special_tokens=True)).strip()
        shown = self._opening.strip()
        return text.removeprefix(shown).strip() if shown else text

    def _answers_in(self, prompt: Sequence[int]) -> Iterator[tuple[int, int]]:
        yield from prompt.answers if isinstance(prompt, TemplatePrompt) else ()


def _raise_beyond_bounds(error: StageError) -> None:
    if error.problems[0].code == "bad_template":
        raise error


def _with_mappings(message: Message) -> Message:
    """A message whose calls have their arguments as mappings, as templates read them: OpenAI's have them as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if isinstance(function.get("arguments"), str):
            try:
                arguments = parse_json(function["arguments"] or "{}")
            except BadJson:
                arguments = function["arguments"]
            call = {**call, "function": {**function, "arguments": arguments}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _common(text: str, other: str) -> int:
    """Characters that two texts begin with alike."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(text), len(other)))


def _tokens_within(offsets: Offsets, span: tuple[int, int]) -> tuple[int, int]:
    """The tokens (start, stop) of the characters of a span."""
    start = next((at for at, (_, end) in enumerate(offsets) if end > span[0]), len(offsets))
    stop = next((at for at, (begin, _) in enumerate(offsets) if begin >= span[1]), len(offsets))
    return start, stop
