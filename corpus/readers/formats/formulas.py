"""Formulas of pages as text: MathML, superscripts and subscripts, which extraction of the main text drops or joins."""

from __future__ import annotations

import html
import re
from typing import Any

_ON_LINE = "0123456789+-=()"
_SUPER = str.maketrans(f"{_ON_LINE}−ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾⁻ⁿⁱ")
_SUB = str.maketrans(f"{_ON_LINE}−aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎₋ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ")
_TABLES = {"sup": _SUPER, "sub": _SUB}
_MARKS = {"sup": "^", "sub": "_"}
_ON_THE_LINE = re.compile(r"(?i)(?:st|nd|rd|th|e|er|re|ème|o|a|tm|sm|®|©)|\[.*\]|\W*")
"""Raised text that reads the same on the line: ordinals, marks, and numbers of notes in brackets."""
_RAISED = re.compile(
    r"<(sup|sub)\b[^>]*>((?:[^<]|</?(?:i|em|b|strong|var|span|small)\b[^>]*>){1,200}?)</\1\s*>", re.IGNORECASE
)
_MATH = re.compile(r"<math\b.*?</math\s*>", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
MAX_DEPTH = 50
"""Elements inside each other in a formula; in deeper ones the inner ones are their text."""


def with_formulas(page: str) -> str:
    """A page with its MathML, superscripts and subscripts as text: r² for `r<sup>2</sup>`, H₂O for `H<sub>2</sub>O`."""
    lowered = page.lower()
    if "<math" in lowered:
        page = _MATH.sub(_of_math, page)
    if "<sup" in lowered or "<sub" in lowered:
        page = _RAISED.sub(lambda match: html.escape(_of_tag(match), quote=False), page)
    return page


def _of_math(match: re.Match[str]) -> str:
    before, after = match.string[max(0, match.start() - 1) : match.start()], match.string[match.end() : match.end() + 1]
    text = html.escape(math_text(match[0]), quote=False)
    return " " * before.isalnum() + text + " " * after.isalnum()


def _of_tag(match: re.Match[str]) -> str:
    return raised(html.unescape(_TAG.sub("", match[2])), match[1].lower())


def raised(text: str, kind: str) -> str:
    """Return raised or lowered text (sup, sub) in Unicode's signs for it, else after ^ or _; ordinals, trade marks and
    notes in brackets unchanged."""
    inner = text.strip()
    if _ON_THE_LINE.fullmatch(inner) and not (inner and set(inner) <= set("+-=−")):
        return text
    is_word = len(inner) > 1 and any(sign.isalpha() and sign not in "ni" for sign in inner)
    if not is_word and all(ord(sign) in _TABLES[kind] for sign in inner):
        return inner.translate(_TABLES[kind])
    return f"{_MARKS[kind]}{inner}" if len(inner) == 1 else f"{_MARKS[kind]}({inner})"


def math_text(markup: str) -> str:
    """A formula in MathML as text: its TeX where the page has it, else its signs on one line."""
    from lxml import etree
    from lxml import html as parser

    try:
        root = parser.fragment_fromstring(markup)
    except (etree.LxmlError, ValueError):
        return _TAG.sub(" ", markup)
    for annotation in root.iter("annotation"):
        if "tex" in (annotation.get("encoding") or "").lower() and (annotation.text or "").strip():
            return f"${annotation.text.strip()}$"
    if (alternative := (root.get("alttext") or "").strip()) and "\\" in alternative:
        return f"${alternative}$"
    # The parser drops what lies too deep.
    return " ".join((_line(root) or html.unescape(_TAG.sub(" ", markup))).split())


def _line(element: Any, depth: int = 0) -> str:
    """The signs of an element on one line."""
    if not isinstance(element.tag, str):
        return ""  # a comment
    tag = element.tag.rpartition(":")[2]
    if tag in ("annotation", "annotation-xml"):
        return ""
    if depth > MAX_DEPTH:
        return "".join(element.itertext())
    parts = [_line(child, depth + 1) for child in element]
    match tag, parts:
        case "msup", [base, power]:
            return base + raised(power, "sup")
        case "msub", [base, index]:
            return base + raised(index, "sub")
        case "msubsup" | "munderover", [base, index, power]:
            return base + raised(index, "sub") + raised(power, "sup")
        case "munder", [base, under]:
            return base + raised(under, "sub")
        case "mfrac", [top, bottom]:
            return f"{_grouped(top)}/{_grouped(bottom)}"
        case "msqrt", _:
            return f"√{_grouped(''.join(parts))}"
        case "mroot", [radicand, degree]:
            return f"{raised(degree, 'sup')}√{_grouped(radicand)}"
        case "mfenced", _:
            return f"{element.get('open') or '('}{', '.join(parts)}{element.get('close') or ')'}"
        case "mtr" | "mlabeledtr", _:
            return f"{', '.join(parts)}; "
        case "mo", _ if (sign := (element.text or "").strip()) in _SPACED:
            return f" {sign} "
        case "mtext", []:
            return f" {element.text or ''} "
        case _:
            return "".join(parts) if parts else (element.text or "").strip()


_SPACED = frozenset({"=", "≠", "<", ">", "≤", "≥", "≈", "≡", "∈", "→", "⇒", "+", "−", "-", "±", "×", "·"})


def _grouped(text: str) -> str:
    """An operand in brackets where it has more than one sign or number."""
    text = text.strip()
    return text if re.fullmatch(r"[\w.]+|\(.*\)", text) and len(text) < 20 else f"({text})"
