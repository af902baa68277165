"""Span corruption (Raffel et al. 2020, section 3.1.4): spans are cut out of the input, and written by the decoder."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from training.core.train_state import Batch, TokenCount
from training.model.documents import Packed, Tokens
from training.model.loss import IGNORE
from training.objectives.base import Objective

# Share of a sequence that is cut out, and the mean length of a span (section 3.3.4).
_NOISE, _MEAN_SPAN = 0.15, 3.0


class SpanCorruption(Objective):
    """The encoder reads a sequence with each span replaced by a sentinel; the decoder writes each sentinel with its
    span, then the end of text. All sequences of one length have the same number of spans and of cut tokens. If a span
    crosses the end of a document, its tokens of the next document are neither shown nor predicted.

    Sentinels are `<extra_id_0>`, … as in T5's own vocabulary; a tokenizer gets those that it lacks as its last ids.

    length: tokens of a packed sequence.
    """

    auto: ClassVar = AutoModelForSeq2SeqLM
    continues_text: ClassVar = False
    extends_tokenizer: ClassVar = True

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, length: int, *, within_documents: bool) -> None:
        super().__init__(seed, within_documents=within_documents)
        self._length = length
        self._noise = min(max(1, round(_NOISE * length)), length - 1)
        self._spans = min(max(1, round(self._noise / _MEAN_SPAN)), length - self._noise)
        names = [f"<extra_id_{number}>" for number in range(self._spans)]
        tokenizer.add_tokens(names, special_tokens=True)
        self.sentinels = np.array(tokenizer.convert_tokens_to_ids(names))
        self._end = tokenizer.eos_token_id
        self.start = self._end if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def batch(self, packed: Packed) -> Batch:
        sides = [
            self.corrupted(tokens, documents, noise_mask(self._length, self._noise, self._spans, generator))
            for tokens, documents, generator in zip(
                packed.tokens, self._documents(packed).numpy(), self._generators(packed), strict=True
            )
        ]
        inputs, read, targets, written = (torch.from_numpy(np.stack(side)) for side in zip(*sides, strict=True))
        before = torch.full_like(targets, self.start)
        # The first token of a document's part must not be predicted from the previous part.
        before[:, 1:] = targets[:, :-1].where(written[:, 1:] == written[:, :-1], self.start)
        return {
            "input_ids": inputs,
            "decoder_input_ids": before,
            "labels": targets.masked_fill(written < 0, IGNORE),
            **({"documents": read, "decoder_documents": written} if self.within_documents else {}),
        }

    def corrupted(
        self, tokens: Tokens, documents: NDArray[np.int32], noise: NDArray[np.bool_]
    ) -> tuple[Tokens, NDArray[np.int32], Tokens, NDArray[np.int32]]:
        """Return the encoder's input and the decoder's target of one sequence, each with its tokens' documents.

        The number of a document is -1 if it differs from that of its span's sentinel.

        Args:
            tokens: token ids (T,).
            documents: number of each token's document (T,).
            noise: true for the tokens to cut out (T,).
        """
        begins = noise.copy()
        begins[1:] &= ~noise[:-1]
        shown = tokens.copy()
        shown[begins] = self.sentinels
        kept, first = ~noise | begins, documents[begins]
        of_span = first[np.cumsum(begins)[noise] - 1]
        span_starts = np.flatnonzero(begins[noise])
        read = np.append(documents[kept], documents[-1])
        written = np.append(
            np.insert(np.where(documents[noise] == of_span, of_span, -1), span_starts, first), documents[-1]
        )
        text = np.insert(tokens[noise], span_starts, self.sentinels)
        return np.append(shown[kept], self._end), read, np.append(text, self._end), written

    def count(self, batch: Any) -> TokenCount:
        """Tokens of the text, whichever side has them."""
        labels = batch["labels"]
        return TokenCount(len(labels) * self._length, int((labels != IGNORE).sum()))


def noise_mask(length: int, noise: int, spans: int, generator: np.random.Generator) -> NDArray[np.bool_]:
    """Draw the mask of tokens to cut out (length,): `noise` tokens in `spans` spans, never the first token."""
    kept, cut = (_parts(total, spans, generator) for total in (length - noise, noise))
    return np.repeat(np.tile([False, True], spans), np.stack([kept, cut], 1).ravel())


def _parts(total: int, count: int, generator: np.random.Generator) -> Tokens:
    """Split `total` into `count` positive numbers, with all compositions equally likely."""
    cuts = np.sort(generator.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)
