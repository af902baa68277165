"""Cuts what was hit out of a text, with some of what stands around it."""

from __future__ import annotations

from collections.abc import Iterable

from corpus.decontaminate.config import DecontaminateConfig


def cut_out(text: str, hits: Iterable[tuple[int, int]], config: DecontaminateConfig) -> tuple[str, int]:
    """What is left of a text, its pieces joined by blank lines, and how many cuts it took; "" if there were too many.

    hits: first byte and end of each, in the text's UTF-8.
    """
    data = text.encode()
    cuts: list[tuple[int, int]] = []
    for first, end in sorted(hits):
        begin = len(data[:first].decode(errors="ignore"))
        low = max(0, begin - config.context_characters)
        high = begin + len(data[first:end].decode(errors="ignore")) + config.context_characters
        if cuts and low <= cuts[-1][1]:
            cuts[-1] = (cuts[-1][0], max(high, cuts[-1][1]))
        else:
            cuts.append((low, high))
    if len(cuts) > config.max_cuts:
        return "", len(cuts)
    edges = [0, *(edge for cut in cuts for edge in cut), len(text)]
    pieces = (text[begin:end].strip() for begin, end in zip(edges[::2], edges[1::2], strict=True))
    return "\n\n".join(piece for piece in pieces if len(piece) >= config.min_piece_characters), len(cuts)
