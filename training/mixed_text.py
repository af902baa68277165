"""Pretraining text among the examples of a fine-tuning: what is still read is not forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infra.errors import stage_error
from infra.run import Run
from training.chat import Conversation
from training.loaders import open_in_order, unpacked_bytes
from training.scratch import node_scratch
from training.shared_memory import own_shared_memory

_LEAST = 2
"""Tokens of a document that can be an example: one that is read, one that follows."""


class Text(Conversation):
    """The beginning of a document, as if all but its first token were a response."""


def as_long_as_the_others(examples: Sequence[Conversation]) -> list[Conversation]:
    """The examples of a batch, text cut to the longest conversation: else all would be padded to its length."""
    longest = max((len(one.ids) for one in examples if not isinstance(one, Text)), default=None)
    return [
        Text(one.prompt, one.response[: longest and longest - 1]) if isinstance(one, Text) else one for one in examples
    ]


def text_examples(shards: Path, count: int, longest: int, seed: int, run: Run) -> list[Text]:
    """Beginnings of `count` documents of the training split, each of at most `longest` tokens: the loss is on every
    token but the first, as in pretraining. Every rank must call, and gets the same.

    Which documents those are follows from `seed`; one comes twice only where there are too few. Raises StageError where
    no document is long enough.
    """
    random = np.random.default_rng(seed)
    examples: list[Text] = []
    with node_scratch(run, unpacked_bytes(shards)) as cache, own_shared_memory(run.work_dir):
        sequences = open_in_order(shards / "train", cache)
        while len(examples) < count:
            before = len(examples)
            for number in random.permutation(sequences.size)[: count - before]:
                tokens, starts, _ = sequences[int(number)]
                documents = [piece for piece in np.split(tokens, starts[1:]) if len(piece) >= _LEAST]
                if documents:
                    ids = documents[random.integers(len(documents))][:longest].tolist()
                    examples.append(Text(ids[:1], ids[1:]))
            if len(examples) == before:
                raise stage_error(
                    "no_documents",
                    str(shards),
                    f"expected documents of at least {_LEAST} tokens",
                    "give shard more text",
                )
    return examples
