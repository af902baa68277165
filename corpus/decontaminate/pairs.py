"""Test items in the pairs of instructions and preferences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from corpus.decontaminate.config import MatchConfig
from corpus.decontaminate.index import make_index
from corpus.decontaminate.items import read_items
from corpus.decontaminate.kernels import Searcher
from corpus.decontaminate.report import not_searched, write_contamination
from corpus.decontaminate.write import HITS, PAPER, RULE, by_text, items_shown, rows_of_hits
from corpus.documents.dropped import SCHEMA as DROPPED
from corpus.documents.dropped import dropped_rows
from corpus.pairs.files import Pair


class PairFilter:
    """Finds the pairs that hold a test item, and reports them as `decontaminate` reports documents:
    aux/dropped.parquet, aux/hits.parquet and aux/contamination.json."""

    def __init__(self, config: MatchConfig, benchmark_text: Path, aux: Path) -> None:
        self._items = read_items(benchmark_text)
        index, self._owners = make_index(self._items, config)
        self._search = Searcher(index)
        self._aux = aux
        self._hit: Counter[int] = Counter()
        self._pairs: Counter[str] = Counter()
        self._dropped = pq.ParquetWriter(aux / "dropped.parquet", DROPPED, compression="zstd")
        self._hits = pq.ParquetWriter(aux / "hits.parquet", HITS, compression="zstd")
        self.dropped = 0

    def clean(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return True for each pair that holds no test item, in the prompt, in the history, or in an answer."""
        ids, sources, texts = ([getattr(pair, name) for pair in pairs] for name in ("id", "source", "text"))
        table = pa.table({"id": ids, "source": sources, "text": pa.array(texts, pa.large_string())})
        kept = [True] * len(texts)
        rows: list[dict[str, Any]] = []
        values = []
        for number, hits in by_text(self._search(table["text"])):
            kept[number] = False
            shown = items_shown(hits, self._owners)
            values.append(len(shown))
            self._hit.update(shown.keys())
            self._pairs.update({self._items[item].task for item in shown})
            rows += rows_of_hits(ids[number], sources[number], texts[number], shown, self._items)
        dropped = table.filter(pc.invert(pa.array(kept, pa.bool_())))
        count = dropped.num_rows
        reasons = dropped_rows(dropped, [RULE] * count, [PAPER] * count, np.array(values, float), high=0)
        self._dropped.write_table(reasons.cast(DROPPED))
        self._hits.write_table(pa.Table.from_pylist(rows, HITS))
        self.dropped += count
        return kept

    def finish(self) -> tuple[dict[str, int], str]:
        """Write the report; return the figures and a text for the headline."""
        self._dropped.close()
        self._hits.close()
        tasks = write_contamination(self._aux, self._items, self._owners, self._hit, self._pairs)
        figures = {"dropped": self.dropped, "items": len(self._items), "items_hit": len(self._hit)}
        message = f"; {self.dropped:,} dropped that held a test item" if self.dropped else ""
        return figures, message + not_searched(tasks)
