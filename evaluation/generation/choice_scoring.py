"""Multiple choice with each context read once: the choices of a question lie in one row, and see only their own.

The logits of a choice are those that it would have alone, but for rounding. Only the tokens before a choice's own are
put through the output layer, rows of like length share a batch (`evaluation/generation/choice_rows.py`), texts are
tokenised together, and on a CPU the layers of a Llama or Qwen3 are those of `evaluation/generation/llama_trunk.py`.
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
"""Of the T tokens of a choice, natural-log likelihoods (T,) and whether each is the likeliest one."""
Way = Literal["untried", "own", "hidden", "logits", "plain"]
"""Through layers of our own, transformers' layers, its whole model, or lm-eval's way."""

BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
"""Tokens of a forward pass: what stays in a processor's cache (4,096 took a quarter longer), and what fills a GPU."""
PLACES_A_TOKEN = 8
"""Places of a forward pass for each token that is computed, where rows begin alike: attention sees all places."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""How far a choice's log-likelihood may lie from what it is alone, as a share of itself plus one."""


class ChoiceScorer:
    """Scores rows with a Hugging Face causal language model.

    Whether the model can be asked so is tried on the first row, against each choice alone: `usable` is False where its
    answers differ, as with models that know no positions or masks (ALiBi, recurrent layers).
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
        self.longest = min((one for one in windows if isinstance(one, int) and one > 0), default=1 << 30)
        """A mask of our own takes the place of a window: rows must lie within one."""

    def usable(self, row: ChoiceRow) -> bool:
        """Whether rows can be scored; tried on `row` the first time."""
        if self.way == "untried":
            alone = [self._alone(row.context, choice) for choice in row.choices]
            bound = TOLERANCE.get(self.model.dtype, 1e-3)
            self.way = "plain"
            ways: tuple[Way, ...] = ("hidden", "logits")
            if LlamaTrunk.fits(self.model):
                self._trunk = LlamaTrunk(self.model)
                ways = ("own", *ways)
            for self.way in ways:
                try:
                    found = self._score([row])
                except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
                    continue
                if all(abs(a - b) <= bound * (1 + abs(b)) for (a, _), b in zip(found, alone, strict=True)):
                    break
            else:
                self.way = "plain"
        return self.way != "plain"

    def score(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[list[ChoiceRow], list[tuple[float, bool]]]]:
        """(rows, log-likelihood and whether it is greedy of each of their choices in order) a batch, longest first."""
        for batch, found in self.score_tokens(rows):
            yield batch, _sums(found)

    def score_tokens(self, rows: Sequence[ChoiceRow]) -> Iterator[tuple[list[ChoiceRow], list[TokenScores]]]:
        """The same of each token of each choice."""
        left = sorted(rows, key=lambda row: -row.length)
        while left:
            # Layers of our own compute each different token once; transformers' every place.
            places = self.batch_tokens * (PLACES_A_TOKEN if self.way == "own" else 1)
            batch, size = lay(left, self.batch_tokens, places)
            try:
                found = self._scored(batch)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
                torch.cuda.empty_cache()
                self.batch_tokens = max(1, size // 2) * left[0].length
                continue
            yield left[:size], found
            left = left[size:]

    def _score(self, rows: Sequence[ChoiceRow]) -> list[tuple[float, bool]]:
        return _sums(self._scored(lay(rows)[0]))

    @torch.inference_mode()
    def _scored(self, batch: ChoiceBatch) -> list[TokenScores]:
        logits = self._logits(batch)
        which, target = batch.which.to(logits.device), batch.targets.to(logits.device)
        greedy = _greedy(logits, which, target)
        in_place = logits if self.softmax_dtype in (None, logits.dtype) else None
        scores = torch.log_softmax(logits, -1, self.softmax_dtype, out=in_place)[which, target].cpu()
        parts = scores.split(batch.lengths), greedy.split(batch.lengths)
        return list(zip(*parts, strict=True))

    def _logits(self, batch: ChoiceBatch) -> Tensor:
        """(U, V) after the tokens that are asked for."""
        mask = None
        if batch.blocked is not None:
            lowest = torch.finfo(self.model.dtype).min
            mask = torch.zeros(batch.blocked.shape, dtype=self.model.dtype).masked_fill_(batch.blocked, lowest)[:, None]
            mask = mask.to(self.device)
        if self.way == "own" and self._trunk is not None:
            return self._trunk.logits(batch, mask)
        ids, positions = batch.tokens[batch.places].to(self.device), batch.depths[batch.places].to(self.device)
        asked = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": False}
        wanted = batch.first[batch.asked]
        if self.way == "logits":
            logits = self.model(**asked).logits
            return logits.flatten(0, 1)[wanted.to(logits.device)]
        hidden = self.model.base_model(**asked).last_hidden_state
        found: Tensor = self.model.get_output_embeddings()(hidden.flatten(0, 1)[wanted.to(hidden.device)])
        return found

    @torch.inference_mode()
    def _alone(self, context: list[int], choice: list[int]) -> float:
        ids = torch.tensor([[*context, *choice]], device=self.device)
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits[0, -len(choice) :]
        scores = torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
        return float(scores.gather(1, ids[0, -len(choice) :, None]).sum())


def _sums(scored: Sequence[TokenScores]) -> list[tuple[float, bool]]:
    return [(float(scores.sum()), bool(greedy.all())) for scores, greedy in scored]


def _greedy(logits: Tensor, which: Tensor, target: Tensor) -> Tensor:
    """Whether each target is the first of the likeliest. argmax takes as long as the softmax, and few can be it."""
    found = logits[which, target] == logits.amax(-1)[which]
    found[found.clone()] = logits[which[found]].argmax(-1) == target[found]
    return found.cpu()


class TokenCache:
    """Texts tokenised together, as lm-eval tokenises them one by one."""

    def __init__(self, harness_model: Any) -> None:
        self._model = harness_model
        self._known: dict[str, list[int]] = {}

    def fill(self, requests: Sequence[Instance]) -> None:
        """Contexts, and contexts with continuation; spaces at a context's end go to the continuation, as in lm-eval."""
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
