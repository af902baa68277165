"""Answers to lm-eval's `generate_until` from `evaluation/generation/decoding.py`: many questions together, each
answered as if it were asked alone.

lm-eval calls transformers' `generate`, which continues a batch until its last question has met a stop string, and which
decodes the end of each answer for each stop string after each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    SuppressTokensLogitsProcessor,
)

from evaluation.generation.decoding import Decoder, Pick, slots_in_memory

TOGETHER = 256
"""Questions passed to the decoder at once."""
SLOTS = 32
"""Answers per forward pass; more were no faster on two cores."""
PLAIN = frozenset(
    {
        "bos_token_id", "eos_token_id", "pad_token_id", "suppress_tokens", "transformers_version", "_from_model_config",
        "do_sample", "temperature", "top_k", "top_p", "max_length", "use_cache",
    }
)  # fmt: skip
"""Keys of a generation_config.json that ask for no more than the likeliest token."""


class StopText:
    """Test of an answer for stop strings, as in lm-eval: in the last tokens, two more than the string itself has."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], ends: frozenset[int]) -> None:
        """ends: ids that end an answer by themselves."""
        self._tokenizer, self._ends = tokenizer, ends
        self._windows = [(stop, len(tokenizer.encode(stop, add_special_tokens=False)) + 2) for stop in stops]
        self._completes: dict[int, list[tuple[str, int]]] = {}

    def __call__(self, number: int, answer: list[int]) -> bool:
        last = answer[-1]
        if last in self._ends:
            return True
        if last not in self._completes:
            self._completes[last] = self._completed_by(self._text_of(last))
        return any(stop in self._tokenizer.decode(answer[-window:]) for stop, window in self._completes[last])

    def _text_of(self, token: int) -> str:
        """Return the text of a token within an answer; "" if it depends on the tokens around it. SentencePiece omits
        the space before the first decoded token, so the second of two is used."""
        once, twice = self._tokenizer.decode([token]), self._tokenizer.decode([token, token])
        return twice[len(once) :] if twice.startswith(once) else ""

    def _completed_by(self, text: str) -> list[tuple[str, int]]:
        """Return the stop strings that may end in a token of this text; most tokens have none."""
        is_complete = text and "\ufffd" not in text  # single bytes of a character do not identify it
        return [
            (stop, window)
            for stop, window in self._windows
            if not is_complete or stop in text or any(text.startswith(stop[start:]) for start in range(len(stop)))
        ]


class NotANumber(LogitsProcessor):
    """Record of the rows whose logits are NaN, where any token could be the likeliest; changes no logits."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        self.add(scores, range(len(scores)))
        return scores

    def add(self, logits: Tensor, rows: Sequence[int]) -> None:
        """Record the rows with NaN in logits (B, V).

        Args:
            rows: their numbers.
        """
        if (wrong := logits.isnan().any(-1)).any():
            self.rows.update(row for row, is_wrong in zip(rows, wrong.tolist(), strict=True) if is_wrong)


def likeliest(model: PreTrainedModel, watch: NotANumber | None = None) -> Pick:
    """Return a function that picks the likeliest token of each row, without the tokens that the model never writes.

    Args:
        watch: receives the logits.
    """
    change = LogitsProcessorList()
    if model.generation_config and model.generation_config.suppress_tokens:
        change.append(SuppressTokensLogitsProcessor(model.generation_config.suppress_tokens, device=str(model.device)))

    def pick(logits: Tensor, rows: Sequence[int]) -> Tensor:
        if watch is not None:
            watch.add(logits, rows)
        tokens: Tensor = change(logits, logits).argmax(-1)
        return tokens

    return pick


def is_plain(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Return True if only the likeliest token is requested.

    Args:
        model: a model with its defaults of generation.
        arguments: those of `generate` except lengths, attention mask and stop strings.
    """
    settings = model.generation_config.to_diff_dict() if model.generation_config else {}
    sampled = arguments.get("do_sample") or (
        arguments.get("do_sample") is None and arguments.get("temperature", 0.0) != 0.0
    )
    return not sampled and arguments.keys() <= {"do_sample", "temperature"} and settings.keys() <= PLAIN


def end_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids at which `generate` ends an answer."""
    ends = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset(ends if isinstance(ends, list) else [ends] if ends is not None else [])


def decoder_for(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoder | None:
    """Return the decoder for these prompts; None if the model does not support it, and on a GPU, where it is
    untested."""
    if model.device.type != "cpu":
        return None
    longest = max(map(len, prompts), default=0) + new_tokens
    decoder = Decoder(model, min(SLOTS, slots_in_memory(model, longest)))
    return decoder if decoder.usable(prompts, new_tokens) else None
