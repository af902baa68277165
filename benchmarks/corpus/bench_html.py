"""How well the main text of web pages is found, against the pages that Mozilla's Readability expects, and how fast.

    python benchmarks/corpus/bench_html.py --data ../shared/data/readability_html    (some 20 s)

Precision, recall and F1 are of words as multisets, mean over the pages; MB/s of HTML on one core.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import justext
import lxml.html
import trafilatura

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from corpus.readers.formats.web import main_text


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


def by_justext(html: str) -> str:
    paragraphs = justext.justext(html.encode(), justext.get_stoplist("English"), encoding="utf-8")
    return "\n".join(paragraph.text for paragraph in paragraphs if not paragraph.is_boilerplate)


METHODS: dict[str, Callable[[str], str]] = {
    "ours (trafilatura, recall)": main_text,
    "trafilatura, default": lambda html: trafilatura.extract(html, include_comments=False) or "",
    "trafilatura, precision": lambda html: trafilatura.extract(html, favor_precision=True) or "",
    "trafilatura, fast": lambda html: trafilatura.extract(html, fast=True, include_comments=False) or "",
    "jusText": by_justext,
    "all text of the page": trafilatura.html2txt,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--data", type=Path, default=here.parent / "shared" / "data" / "readability_html")
    folder = parser.parse_args().data
    pages, expected = (
        {row["source"].split("/")[-2]: row["text"] for row in map(json.loads, (folder / name).open(encoding="utf8"))}
        for name in ("pages_raw.jsonl", "pages_expected.jsonl")
    )
    gold = {name: words(lxml.html.fromstring(html).text_content()) for name, html in expected.items()}
    size = sum(len(html.encode()) for html in pages.values())
    print(
        f"{len(pages)} pages, {size / 1e6:.1f} MB\n\n| method | precision | recall | F1 | MB/s |\n|---|---|---|---|---|"
    )
    for method, extract in METHODS.items():
        begun = time.process_time()
        texts = {name: words(extract(html)) for name, html in pages.items()}
        seconds = time.process_time() - begun
        shared = {name: (texts[name] & gold[name]).total() for name in pages}
        rows = [(shared[name], texts[name].total(), gold[name].total()) for name in pages]
        scores = [
            sum(common / max(1, found) for common, found, _ in rows) / len(rows),
            sum(common / max(1, asked) for common, _, asked in rows) / len(rows),
            sum(2 * common / max(1, found + asked) for common, found, asked in rows) / len(rows),
        ]
        print(f"| {method} | {' | '.join(f'{score:.3f}' for score in scores)} | {size / 1e6 / seconds:.1f} |")


if __name__ == "__main__":
    main()
