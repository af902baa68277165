"""Texts of PDF files, by PDFium where the extra `pdf` is installed.

A page has the positions of glyphs, and no paragraphs. Lines are joined where a sentence goes on; headers, footers and
page numbers are left out. A file of which little more than pictures can be read, or whose fonts map its glyphs to no
letters, is put aside.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

from corpus.cleaning.languages.known import MIN_STOP_WORD_SHARE, SHARED_SCRIPTS, script_of, stop_words
from corpus.readers.record import Unreadable, too_long

MIN_READ_PAGE_SHARE = 0.5
"""Smallest share of pages with text: a scan has text on none, or on its cover alone."""
MIN_PAGE_CHARACTERS = 20
MAX_UNMAPPED_SHARE = 0.02
"""Largest share of characters that are no letter or sign of any script, as glyphs without a mapping become."""
MAX_SHARE_OF_WORD = 20
"""A word counts for at most the 20th part of a text: one wrong word may be a frequent one of another language."""
LEAST_WORDS = 100
"""Fewest words of a text that must hold the share of stop words that prose has: glyphs that map to the wrong letters
have none."""
REPEATED_ON_PAGES = 3
"""A first or last line of as many pages, and of half of them, is no part of the text."""
_LINE_END_HYPHEN = re.compile(r"(?:[\x02\ufffe\u00ad]|(?<=\w)[\u2010-])\n(?=[^\W\d_A-Z])|[\x02\ufffe]")


def pdf_text(content: bytes, max_bytes: int) -> str:
    """Text of a PDF file, a blank line between paragraphs.

    Raises:
        Unreadable: a scan, an encrypted file, fonts without a mapping to letters, or more than max_bytes.
    """
    pages = _pages(content, max_bytes)
    read = sum(len(page.strip()) >= MIN_PAGE_CHARACTERS for page in pages)
    if not pages or read < MIN_READ_PAGE_SHARE * len(pages):
        raise Unreadable(f"{read} of {len(pages)} pages of the PDF file contain text: a scan, which needs OCR")
    text = "\n\n".join(filter(None, map(_paragraphs, _without_margins(pages))))
    if fault := _fault_of_fonts(text):
        raise Unreadable(fault)
    return text


def _pages(content: bytes, max_bytes: int) -> list[str]:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable("an encrypted PDF file") from None
        raise Unreadable(f"not a complete PDF file: {error}") from None
    pages, size = [], 0
    try:
        for number in range(len(document)):
            page = document[number]
            text = page.get_textpage().get_text_range().replace("\r\n", "\n").replace("\r", "\n")
            page.close()
            size += len(text)
            if size > max_bytes:
                raise Unreadable(too_long(max_bytes, "its text; cut it by cut_characters"))
            pages.append(text)
    except pypdfium2.PdfiumError as error:
        raise Unreadable(f"page {len(pages) + 1} of the PDF file is not readable: {error}") from None
    finally:
        document.close()
    return pages


def _without_margins(pages: Sequence[str]) -> list[str]:
    """The pages without page numbers, and without the first and last lines that most of them have."""
    lines = [[line.strip() for line in page.strip().split("\n")] for page in pages]
    kept = []
    edges = Counter(_numberless(line) for page in lines for line in {*page[:1], *page[-1:]})
    for page in lines:
        while page and _is_margin(page[0], edges, len(pages)):
            page = page[1:]
        while page and _is_margin(page[-1], edges, len(pages)):
            page = page[:-1]
        kept.append("\n".join(page))
    return kept


def _numberless(line: str) -> str:
    return re.sub(r"\d+", "0", line)


def _is_margin(line: str, edges: Counter[str], pages: int) -> bool:
    number = re.fullmatch(r"\W*\d{1,4}\W*", line) is not None
    return number or edges[_numberless(line)] >= max(REPEATED_ON_PAGES, pages / 2)


def _paragraphs(page: str) -> str:
    """A page with the lines of each paragraph joined: a line that is clearly shorter than the others ends one."""
    lines = [line.strip() for line in _LINE_END_HYPHEN.sub("", page).split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    full = 0.75 * lengths[int(0.9 * (len(lengths) - 1))] if lengths else 0
    text = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        text += line
        goes_on = following[:1].islower() or len(line) >= full
        if not line or not following or not goes_on:
            text += "\n\n"
        elif not _is_ideographic(line[-1:] + following[:1]):
            text += " "
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _is_ideographic(characters: str) -> bool:
    return any("\u3000" <= character <= "\u9fff" or "\uff00" <= character <= "\uffef" for character in characters)


def _fault_of_fonts(text: str) -> str:
    solid = "".join(text.split())
    unmapped = sum(
        count
        for character, count in Counter(solid).items()
        if character == "\ufffd" or unicodedata.category(character) in ("Co", "Cn", "Cc", "Cs")
    )
    if unmapped > MAX_UNMAPPED_SHARE * len(solid):
        return f"{unmapped:,} of {len(solid):,} glyphs of the PDF file map to no character: it needs OCR"
    words = re.findall(r"[^\W\d_]+", text.lower())
    if len(words) < LEAST_WORDS or script_of(text) not in SHARED_SCRIPTS:
        return ""
    known = stop_words()
    counts = {word: count for word, count in Counter(words).items() if word in known}
    by_language = Counter[str]()
    for word, count in counts.items():
        by_language.update(dict.fromkeys(known[word], min(count, len(words) // MAX_SHARE_OF_WORD)))
    share = max(by_language.values(), default=0) / len(words)
    if share < MIN_STOP_WORD_SHARE:
        return (
            f"{share:.1%} of the words in the PDF file are frequent ones of a language: its fonts map to wrong letters"
        )
    return ""
