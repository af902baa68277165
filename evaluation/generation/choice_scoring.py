"""Multiple choice that reads each context once: the choices of a question share a row, and each sees only itself.

The logits of a choice equal those that it would have alone, up to rounding. Only the positions whose logits are needed
go through the output layer, rows of similar length share a batch (`evaluation/generation/choice_rows.py`), texts are
tokenized together, and on a CPU the layers of a Llama or Qwen3 are those of `evaluation/generation/llama_trunk.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.utils import has_bos_prefix
from torch import Tensor

from evaluation.generation.choice_rows import ChoiceBatch, ChoiceRow, lay
from evaluation.generation.llama_trunk import LlamaTrunk

TokenScores = tuple[Tensor, Tensor]
"""Natural-log likelihoods (T,) of the T tokens of a choice, and a flag for each, True for the likeliest token."""
Way = Literal["untried", "own", "hidden", "logits", "plain"]
"""Scoring path: this project's own layers, transformers' layers, the whole transformers model, or lm-eval's method."""

BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
"""Tokens per forward pass: the number that stays in a processor's cache (4,096 took a quarter longer), and the number
that fills a GPU."""
PLACES_A_TOKEN = 8
"""Places of a forward pass per computed token if rows have equal beginnings: attention sees all places."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest error of a choice's log-likelihood against the choice alone, as a fraction of its magnitude plus one."""


class ChoiceScorer:
    """Scorer of rows with a Hugging Face causal language model.

    The first row is scored both ways, shared and one choice at a time. `usable` returns False if the results differ, as
    with models without positions or masks (ALiBi, recurrent layers).
    """

    def __init__(self, model: Any, device: torch.device, softmax_dtype: torch.dtype | None = None) -> None:
        self.model, self.device, self.softmax_dtype = model, device, softmax_dtype
        self.way: Way = "untried"
        self._trunk: LlamaTrunk | None = None
        self.batch_tokens = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"])
        accepted = inspect.signature(model.forward).parameters
        config = model.config
        if not {"position_ids", "attention_mask"} <= accepted.keys() or getattr(config, "is_encoder_decoder", False):
            self.way = "plain"
        windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
        self.longest = min((window for window in windows if isinstance(window, int) and window > 0), default=1 << 30)
        """A custom mask replaces a sliding window, so rows must fit in one window."""

    def usable(self, row: ChoiceRow) -> bool:
        """Return True if rows can be scored; the first call tries it on `row`."""
        if self.way == "untried":
            alone = [self._score_alone(row.context, choice) for choice in row.choices]
            bound = TOLERANCE.get(self.model.dtype, 1e-3)
            self.way = "plain"
            ways: tuple[Way, ...] = ("hidden", "logits")
            if LlamaTrunk.fits(self.model):
                self._trunk = LlamaTrunk(self.model)
                ways = ("own", *ways)
            for self.way in ways:
                try:
                    scores = self._score([row])
                except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
                    continue
                if all(abs(a - b) <= bound * (1 + abs(b)) for (a, _), b in zip(scores, alone, strict=True)):
                    break
            else:
                self.way = "plain"
        return self.way != "plain"

    def score(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[list[ChoiceRow], list[tuple[float, bool]]]]:
        """Yield (rows, log-likelihood and greedy flag of each of their choices in order) per batch, longest first."""
        for batch, scores in self.score_tokens(rows):
            yield batch, _sums(scores)

    def score_tokens(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[list[ChoiceRow], list[TokenScores]]]:
        """Yield the same as `score` for each token of each choice."""
        remaining = sorted(rows, key=lambda row: -row.length)
        while remaining:
            # This project's own layers compute each distinct token once; transformers' layers compute every place.
            max_places = self.batch_tokens * (PLACES_A_TOKEN if self.way == "own" else 1)
            batch, size = lay(remaining, self.batch_tokens, max_places)
            try:
                scores = self._scored(batch)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                torch.cuda.empty_cache()
                self.batch_tokens = max(1, size // 2) * remaining[0].length
                continue
            yield remaining[:size], scores
            remaining = remaining[size:]

    def _score(self, rows: Sequence[ChoiceRow]) -> list[tuple[float, bool]]:
        return _sums(self._scored(lay(rows)[0]))

    @torch.inference_mode()
    def _scored(self, batch: ChoiceBatch) -> list[TokenScores]:
        logits = self._logits(batch)
        inverse, target = batch.which.to(logits.device), batch.targets.to(logits.device)
        greedy = _greedy(logits, inverse, target)
        in_place = logits if self.softmax_dtype in (None, logits.dtype) else None
        scores = torch.log_softmax(logits, -1, self.softmax_dtype, out=in_place)[inverse, target].cpu()
        parts = scores.split(batch.lengths), greedy.split(batch.lengths)
        return list(zip(*parts, strict=True))

    def _logits(self, batch: ChoiceBatch) -> Tensor:
        """Return the logits (U, V) after the tokens in `batch.asked`."""
        mask = None
        if batch.blocked is not None:
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.zeros(batch.blocked.shape, dtype=self.model.dtype).masked_fill_(batch.blocked, lowest)[:, None]
            mask = mask.to(self.device)
        if self.way == "own" and self._trunk is not None:
            return self._trunk.logits(batch, mask)
        ids, positions = batch.tokens[batch.places].to(self.device), batch.depths[batch.places].to(self.device)
        model_inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        indices = batch.first[batch.asked]
        if self.way == "logits":
            logits = self.model(**model_inputs).logits
            return logits.flatten(0, 1)[indices.to(logits.device)]
        hidden = self.model.base_model(**model_inputs).last_hidden_state
        projected: Tensor = self.model.get_output_embeddings()(hidden.flatten(0, 1)[indices.to(hidden.device)])
        return projected

    @torch.inference_mode()
    def _score_alone(self, context: list[int], choice: list[int]) -> float:
        ids = torch.tensor([[*context, *choice]], device=self.device)
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[0, -len(choice) :]
        scores = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        return float(scores.gather(1, ids[0, -len(choice) :, None]).sum())


def _sums(scored: Sequence[TokenScores]) -> list[tuple[float, bool]]:
    return [(float(scores.sum()), bool(greedy.all())) for scores, greedy in scored]


def _greedy(logits: Tensor, inverse: Tensor, target: Tensor) -> Tensor:
    """Return True for each target that is the first of the likeliest tokens. argmax takes as long as the softmax, so it
    runs only on the few rows whose target has the largest logit."""
    is_greedy = logits[inverse, target] == logits.amax(-1)[inverse]
    is_greedy[is_greedy.clone()] = logits[inverse[is_greedy]].argmax(-1) == target[is_greedy]
    return is_greedy.cpu()


class TokenCache:
    """Texts tokenized together, with the results of lm-eval's one-by-one tokenization."""

    def __init__(self, harness_model: Any) -> None:
        self._model = harness_model
        self._known: dict[str, list[int]] = {}

    def fill(self, requests: Sequence[Instance]) -> None:
        """Tokenize contexts, alone and with continuation; spaces at their end go to the continuation, as in lm-eval."""
        texts: dict[str, None] = {}
        for request in requests:
            context, continuation = request.args
            texts[context + continuation] = None
            texts[context.rstrip()] = None
        tokenizer, add_bos = self._model.tokenizer, self._model.add_bos_token
        start = tokenizer.decode(self._model.prefix_token_id)
        plain = [text for text in texts if text and not has_bos_prefix(text, start)]
        options = {} if add_bos is None else {"add_special_tokens": add_bos}
        if plain and getattr(tokenizer, "is_fast", False):
            self._known = dict(zip(plain, tokenizer(plain, **options)["input_ids"], strict=True))

    def get(self, text: str) -> list[int] | None:
        return self._known.get(text)

    def clear(self) -> None:
        self._known = {}
