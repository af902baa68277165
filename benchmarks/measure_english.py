"""How many of a quickstart's answers read as English: a rule that needs no ear.

python benchmarks/measure_english.py --store .stemma

An answer counts if it ends as a sentence does, if every word of it (code in backticks aside) is in at least FEW
documents of the clean corpus, and if no three words in a row come twice. That it fits its prompt is not asked. Answers
that are a number or a name, to questions about signatures, are left out. Prints shares with Wilson's 95 % intervals: of
the reference answers, of those of the SFT model and the aligned one as sampled for the alignment's measurement, and of
the greedy ones of base and SFT model.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from corpus.documents.parts import read_documents
from evaluation.statistics.intervals import wilson

FEW = 5
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_CODE = re.compile(r"`[^`]*`")
_END = re.compile(r"[.!?`)]$")
_SIGNATURE = re.compile(r"How many|What is the first")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="a store with a finished quickstart")
    store = parser.parse_args().store
    met = Counter(word for one in read_documents(_newest(store, "clean")) for word in set(words(one.text)))
    known = {word for word, documents in met.items() if documents >= FEW}
    aligned, tuned = (_samples(_newest(store, stage)) for stage in ("rlhf", "sft"))
    _say("reference answers", (row["reference"] for row in aligned), known)
    for model in ("sft", "rlhf"):
        _say(f"{model}, sampled", (row["answers"][model] for row in aligned), known)
    for model in ("base", "sft"):
        _say(f"{model}, greedy", (row["answers"][model] for row in tuned), known)


def words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(_CODE.sub(" ", text))]


def reads_as_english(answer: str, known: set[str]) -> bool:
    said = words(answer)
    threes = list(zip(said, said[1:], said[2:], strict=False))
    return bool(said and _END.search(answer.strip()) and len(set(threes)) == len(threes) and known.issuperset(said))


def _samples(artifact: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (artifact / "aux" / "samples.jsonl").read_text(encoding="utf8").splitlines())
    return [row for row in rows if not _SIGNATURE.match(row["prompt"])]


def _newest(store: Path, stage: str) -> Path:
    return max((store / stage).glob("*/manifest.json"), key=lambda path: path.stat().st_mtime).parent


def _say(name: str, answers: Iterable[str], known: set[str]) -> None:
    good = [reads_as_english(answer, known) for answer in answers]
    share = wilson(sum(good), len(good))
    print(f"{name:<20}{share.value:6.1%} ({share.low:.1%} to {share.high:.1%}) of {len(good)}")


if __name__ == "__main__":
    main()
