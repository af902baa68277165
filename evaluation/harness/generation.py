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
from transformers.generation.logits_process import LogitsProcessor

from evaluation.generation.decoding import Decoder
from evaluation.generation.token_choice import ChosenAnswer, SamplingOptions

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
WITHOUT_EFFECT = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "min_length": 0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "repetition_penalty": 1, "encoder_repetition_penalty": 1, "length_penalty": 1,
    "diversity_penalty": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
}  # fmt: skip
"""Values by which other keys change nothing: the defaults of transformers 4. transformers 5 has none, and writes these,
and switches that are off, as if they were requests."""


class StopText:
    """Test of an answer for stop strings, as in lm-eval: in the last tokens, two more than the string itself has."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._windows = [(stop, len(tokenizer.encode(stop, add_special_tokens=False)) + 2) for stop in stops]
        self._completes: dict[int, list[tuple[str, int]]] = {}

    def ends(self, new: Sequence[int]) -> bool:
        """Return True if the last of an answer's tokens completes a stop string."""
        last = new[-1]
        if last not in self._completes:
            self._completes[last] = self._completed_by(self._text_of(last))
        return any(stop in self._tokenizer.decode(new[-window:]) for stop, window in self._completes[last])

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


class BenchmarkAnswer(ChosenAnswer):
    """Likeliest answer to a question, up to a stop string.

    Attributes:
        is_a_number: False if a token of it was chosen from NaN logits.
    """

    def __init__(self, prompt: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int], stop: StopText) -> None:
        super().__init__(prompt, SamplingOptions(max_new_tokens, stop_ids, temperature=0))
        self.is_a_number = True
        self._stop = stop

    def has_ended(self) -> bool:
        return super().has_ended() or self._stop.ends(self.new)


def watch_numbers(logits: Tensor, answers: Sequence[ChosenAnswer]) -> None:
    """Record which answers have NaN in their logits (N, V), where any token could be the likeliest."""
    if (wrong := logits.isnan().any(-1)).any():
        for answer, is_wrong in zip(answers, wrong.tolist(), strict=True):
            if is_wrong and isinstance(answer, BenchmarkAnswer):
                answer.is_a_number = False


class NotANumber(LogitsProcessor):
    """Record of the rows of transformers' `generate` whose logits are NaN; changes no logits."""

    def __init__(self) -> None:
        self.rows: set[int] = set()

    def __call__(self, input_ids: Any, scores: Tensor) -> Tensor:
        self.rows.update(scores.isnan().any(-1).nonzero()[:, 0].tolist())
        return scores


def is_plain(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Return True if only the likeliest token is requested.

    Args:
        model: a model with its defaults of generation.
        arguments: those of `generate` except lengths, attention mask and stop strings.
    """
    settings = model.generation_config.to_diff_dict() if model.generation_config else {}
    requested = {
        key
        for key, value in settings.items()
        if value is not None and value is not False and WITHOUT_EFFECT.get(key, ...) != value
    }
    sampled = arguments.get("do_sample") or (
        arguments.get("do_sample") is None and arguments.get("temperature", 0.0) != 0.0
    )
    return not sampled and arguments.keys() <= {"do_sample", "temperature"} and requested <= PLAIN


def supports(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int) -> bool:
    """Return True if the decoder answers these prompts without transformers' `generate`; not on a GPU, where equality
    with lm-eval's own answers is untested."""
    return model.device.type == "cpu" and Decoder(model, SLOTS).usable(prompts, new_tokens)
