"""Personal data and secrets: found in a text, and masked, or a reason to drop the document."""

from __future__ import annotations

import ipaddress
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from corpus.cleaning.config import PersonalDataConfig, PersonalDataKind
from corpus.cleaning.rules import STEMMA, Broken, CleaningRule, changed
from corpus.documents.parts import Document

# What every match of a pattern contains → the pattern: most texts contain none of these, and are done.
_KNOWN = tuple(
    (mark, re.compile(pattern))
    for mark, pattern in (
        ("AKIA", r"\bAKIA[0-9A-Z]{16}\b"),
        ("ASIA", r"\bASIA[0-9A-Z]{16}\b"),
        *((f"gh{kind}_", rf"\bgh{kind}_[A-Za-z0-9]{{36,}}") for kind in "pousr"),
        ("github_pat_", r"\bgithub_pat_\w{40,}"),
        ("glpat-", r"\bglpat-[A-Za-z0-9_-]{20,}"),
        ("hf_", r"\bhf_[A-Za-z0-9]{30,}"),
        ("sk-", r"\bsk-(?:proj-|ant-)?(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{32,}"),
        ("k_live_", r"\b[rsp]k_live_[A-Za-z0-9]{16,}"),
        ("k_test_", r"\b[rsp]k_test_[A-Za-z0-9]{16,}"),
        ("AIza", r"\bAIza[0-9A-Za-z_-]{35}(?![0-9A-Za-z_-])"),
        ("xox", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
        ("hooks.slack.com", r"hooks\.slack\.com/services/\w+/\w+/\w+"),
        ("eyJ", r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}"),
        (
            "PRIVATE KEY",
            r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----"
            r"(?:[\s\S]{0,20000}?-----END [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)?",
        ),
    )
)
_URL_PASSWORD = re.compile(r"://[^/\s:@]{1,64}:([^/\s@]{3,64})@")
# The second halves of the names of secrets, and what stands behind a name; _NAME must end where that begins.
_NAME_ENDS = ("word", "asswd", "phrase", "ecret", "oken", "key", "WORD", "PHRASE", "ECRET", "OKEN", "KEY", "Key")
_NAME = re.compile(r"(?:password|passwd|passphrase|secret|token|(?:api|access|auth|secret)[_-]?key)$", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"(?:{'|'.join(_NAME_ENDS)})(?P<value>[\"']?\s{{0,2}}(?::=|=>|[:=]|\bis\b)\s{{0,2}}[\"']?([^\s\"'<>,;(){{}}\[\]]{{8,128}}))"
)
_PATH_OR_NAME = re.compile(r"[./]\w+[./]|\w\(|^[\w-]+\.[\w.]+$")
_LONGEST_NAME = 12
_LEAST_BITS = 3.0


def find_secrets(text: str) -> Iterator[tuple[int, int]]:
    """Return (start, end) of each secret; of an assignment or a URL that of the secret part alone."""
    for mark, pattern in _KNOWN:
        if mark in text:
            yield from (match.span() for match in pattern.finditer(text))
    if "://" in text and "@" in text:
        yield from (match.span(1) for match in _URL_PASSWORD.finditer(text))
    for end in _NAME_ENDS:
        position = text.find(end)
        while position >= 0:
            match = _ASSIGNED.match(text, position)
            if (
                match
                and _NAME.search(text[max(0, position - _LONGEST_NAME) : match.start("value")])
                and _is_random(match[2])
            ):
                yield match.span(2)
            position = text.find(end, position + len(end))


def _is_random(value: str) -> bool:
    """Return True if a value looks random and not written: letters and digits mixed, at least 3 bits per character."""
    if not re.search("[0-9]", value) or not re.search("[A-Za-z]", value) or _PATH_OR_NAME.search(value):
        return False
    counts = Counter(value).values()
    return -sum(n / len(value) * math.log2(n / len(value)) for n in counts) >= _LEAST_BITS


KINDS = ("secret", "email", "iban", "card", "ip", "phone")
"""In the order in which they win where they overlap."""

_LOCAL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
# The address of RFC 5322 without comments and quotes, with at least one dot in its domain. No top-level domain has
# digits but those of other alphabets: react@18.2.0 and checkout@v4.1.0 are versions of packages.
_TOP_LEVEL = "(?:xn--[A-Za-z0-9-]{2,59}|[A-Za-z]{2,63})(?![A-Za-z0-9])"
_EMAIL = re.compile(rf"\b{_LOCAL}+(?:\.{_LOCAL}+)*@(?:(?:{_LABEL}\.)+{_TOP_LEVEL}|\[(?:{_OCTET}\.){{3}}{_OCTET}\])")
_LOCAL_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789!#$%&'*+/=?^_`{|}~-.")
# Rows of digits with what may stand between them: the rest is decided for each kind.
_NUMBERS = re.compile(r"[+(]?[0-9](?:[ .()/–-]{0,3}[0-9]){6,24}")
# These open with what they must hold and look at their surroundings afterwards, or re would try them everywhere.
_IPV4 = re.compile(rf"[0-9]{{1,3}}(?:\.{_OCTET}){{3}}(?!\.?[0-9])")
_TWO_COLONS = re.compile(":[0-9A-Fa-f]{0,4}:")
_IPV6 = re.compile(r"(?<![:.\w])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}(?![:.\w])")
_CARD = re.compile(r"[2-6][0-9]{3}(?:[ -]?[0-9]{2,6}){2,4}(?![0-9.,-]?[0-9])")
# The issuers' first digits and lengths: American Express, Diners, Discover, JCB, Mastercard, UnionPay, Visa.
_ISSUER = re.compile(
    "3[47][0-9]{13}|3(?:0[0-5]|[689][0-9])[0-9]{11}|6(?:011|4[4-9][0-9]|5[0-9]{2})[0-9]{12}|35(?:2[89]|[3-8][0-9])[0-9]{12}"
    "|5[1-5][0-9]{14}|2(?:22[1-9]|2[3-9][0-9]|[3-6][0-9]{2}|7[01][0-9]|720)[0-9]{12}|62[0-9]{14,17}|4[0-9]{12}(?:[0-9]{3})?"
)
_IBAN = re.compile(r"[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b")
_PHONE_WORD = re.compile(
    r"(?:phone|tel|telephone|call|fax|mobile|cell|dial|ring|whatsapp|telefon|fon|mobil|tél|teléfono)\W{0,8}$",
    re.IGNORECASE,
)
_NUMBER_OF_A_THING = re.compile(
    r"\b(?:part|order|serial|model|call|catalog(?:ue)?|item|stock|product|invoice|ticket|patent|reference|tracking|meter)"
    r"\s(?:number|no\.?|nr\.?|code|id)s?\W{0,3}$|\b(?:isbn|issn|oclc|sku|ean|upc|gtin|doi)\W{0,3}$",
    re.IGNORECASE,
)
"""Words before the number of a thing, which may look like one of a telephone or a card."""
# How cards are embossed: in one row, in fours, or as American Express (4-6-5) and Diners Club (4-6-4) are.
_CARD_GROUPS = re.compile(
    r"[0-9]{13,19}|[0-9]{4}(?:([ -])[0-9]{4}(?:\1[0-9]{4}){1,2}(?:\1[0-9]{1,4})?|([ -])[0-9]{6}\2[0-9]{4,5})"
)
_CARD_WORD = re.compile(
    r"(?:cards?|visa|master ?card|amex|american express|credit|debit|diners|jcb|unionpay|karte|carte|tarjeta"
    r"|\bcc|\bpan)(?:[_ -]?(?:number|num|no|nr))?\b[^.!?\n]{0,24}$",
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(
    r"\b(?:order|parcel|shipment|tracking|ticket|invoice|serial|transaction|session|user|customer|message|tweet|status|post"
    r"|device|batch|lot|job|run|build|trace|request|event|record|row|timestamp|case|ref|reference|\w*id|imei|patent|key|hash|seed|seq)"
    r"s?(?:\s(?:number|no|nr|code))?\W{0,4}$|[\w#/+=&@.:]$",
    re.IGNORECASE,
)
"""Words and signs in front of the identifier of a thing: one in ten has Luhn's check digit by chance."""
_AMONG_FIGURES = re.compile(
    r"\b(?:meters?|matrix|matrices|rows?|columns?|readings?|sequences?|series|vectors?|coordinates|measure(?:d|ments?))\b"
    r"[^.!?\n]*$",
    re.IGNORECASE,
)
"""Words of a sentence whose numbers in groups of four are figures."""
_GOES_ON = re.compile(r"[\w/]|\.[A-Za-z0-9]")
# logo@2x.png is no address.
_PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp")
_LONGEST_LOCAL = 256
_CONTEXT = 24


class PersonalDataSpan(NamedTuple):
    """Personal data at text[start:end]."""

    start: int
    end: int
    kind: str


def find_personal_data(
    text: str, kinds: frozenset[str], phone_regions: tuple[str, ...] = ("US",)
) -> list[PersonalDataSpan]:
    """Return the personal data of these kinds in a text, in its order, none overlapping another."""
    finders = {
        "secret": lambda: find_secrets(text),
        "email": lambda: _emails(text),
        "iban": lambda: _ibans(text),
        "card": lambda: _cards(text),
        "ip": lambda: _ips(text),
        "phone": lambda: _phones(text, phone_regions),
    }
    spans: list[PersonalDataSpan] = []
    for kind in KINDS:
        if kind in kinds:
            for start, end in finders[kind]():
                index = bisect_left(spans, (start,))
                if not _overlaps(start, end, spans[max(0, index - 1) : index + 1]):
                    spans.insert(index, PersonalDataSpan(start, end, kind))
    return spans


def _overlaps(start: int, end: int, neighbours: list[PersonalDataSpan]) -> bool:
    return any(start < neighbour.end and neighbour.start < end for neighbour in neighbours)


def _emails(text: str) -> Iterator[tuple[int, int]]:
    position, previous_end = text.find("@"), 0
    while position >= 0:
        start = position
        while start > max(previous_end, position - _LONGEST_LOCAL) and text[start - 1] in _LOCAL_CHARACTERS:
            start -= 1
        match = _EMAIL.search(text, start, position + 260) if start < position else None
        if match and match.start() < position and not match.group().endswith(_PICTURES):
            previous_end = match.end()
            yield match.span()
        position = text.find("@", max(position + 1, previous_end))


def _ips(text: str) -> Iterator[tuple[int, int]]:
    for match in _IPV4.finditer(text):
        if (
            not _follows(text, match.start(), "0123456789.")
            and _is_public(match.group())
            and not _is_numbering(text, *match.span())
        ):
            yield match.span()
    previous_end = 0
    for colons in _TWO_COLONS.finditer(text):
        long = _IPV6.search(text, max(previous_end, colons.start() - 5), colons.end() + 40)
        if long and long.start() < colons.end() and _is_public(long.group()):
            previous_end = long.end()
            yield long.span()


_NUMBERED_WORDS = """
    version versions ver rev revision release releases released build builds update updates upgrade upgraded patch
    kernel firmware driver software package app browser section sections sect sec chapter clause clauses paragraph
    paragraphs par article articles appendix annex figure figures fig table tables equation theorem lemma exercise
    requirement requirements rule item step part oid oids identifier identifiers changelog changes bump
"""
_NUMBERED = frozenset(_NUMBERED_WORDS.split())
"""Words that versions, sections and object identifiers follow."""
_ADDRESSED_WORDS = """
    ip ips ipv address addresses addr server servers host hosts hostname nameserver dns from by via at client clients
    gateway router proxy node peer network subnet ping traceroute connect connected connection connections ssh telnet
    login logged received user users port relay firewall blocked visitor
"""
_ADDRESSED = frozenset(_ADDRESSED_WORDS.split())
"""Words that addresses follow."""
_WORDS = re.compile(r"[A-Za-z][A-Za-z0-9]*|§")
_WORD_BEFORE = re.compile(r"(?P<word>[A-Za-z§][A-Za-z0-9]*)?(?P<joint>[\s\"':=#>~-]{0,4})$")
_SENTENCE_END = re.compile(r"[.!?;]\s|\n")
_VERSION_OF = re.compile(r"version[\s\"':=(]{1,4}$", re.IGNORECASE)
_GLUED_WORD = re.compile(r"[A-Za-z]+$")
_LINE_START = re.compile(r"(?:^|\n)[ \t]*(?:#+[ \t]*)?$")
_TITLE = re.compile(r"\.?[ \t]+[A-Z][^\n]{0,60}(?:\n|$)")
_MOST_SECTIONS = 40
_SENTENCE_CHARACTERS = 160


def _is_numbering(text: str, start: int, end: int) -> bool:
    """Return True if four numbers are a version, the number of a section or an object identifier, judged by the text
    around them.

    The text directly before decides, then the nearest word in the sentence that indicates either; without any of these
    it is an address.
    """
    before = text[max(0, start - _SENTENCE_CHARACTERS) : start]
    following = text[end : end + _SENTENCE_CHARACTERS]
    if _VERSION_OF.search(before):  # AssemblyVersion("4.8.3.1")
        return True
    if glued := _GLUED_WORD.search(before):  # go1.21.0.1
        return glued.group().lower() not in _ADDRESSED
    title = _TITLE.match(following) if _LINE_START.search(before) else None
    if title and _is_section(text[start:end], title.group()):
        return True
    if before[-1:] in "[(@" and before:
        return False
    if before.endswith("//"):
        return False
    if re.search(r"[A-Za-z][/_-]$|[=><~!]=$|§\s?$", before):
        # Chrome/121.0.1.4, tool-1.2.3.4, thing==1.2.3.4; but Contributions/1.2.3.4 names a person.
        return not re.search(r"(?:Contributions|User|talk|address|ip)[/_-]$", before, re.IGNORECASE)
    if re.match(r":\d|/\d", following):
        return False
    before = before[max((match.end() for match in _SENTENCE_END.finditer(before)), default=0) :]
    direct = _WORD_BEFORE.search(before)
    if direct and direct["word"]:
        word = direct["word"]
        if word.lower() in _ADDRESSED:
            # "upgrade from 1.2.3.4" is decided by the rest of its sentence.
            return word.lower() in ("from", "by", "at") and _mentions_numbering(before[: direct.start()], following)
        if word.lower() in _NUMBERED:
            return True
        # The name of a product; at the start of a sentence it may be a verb.
        is_name = word[0].isupper() and direct.start() > 0
        if direct["joint"] == " " and (is_name or (any(map(str.isupper, word[1:])) and not word.isupper())):
            return True
    return _mentions_numbering(before, following)


def _is_section(number: str, title: str) -> bool:
    """Return True for `5.2.1.3 Results`: small numbers of which not all are the same, before a title without a word of
    addresses."""
    parts = number.split(".")
    is_small = all(int(part) <= _MOST_SECTIONS for part in parts) and len(set(parts)) > 1
    return is_small and not any(word.lower() in _ADDRESSED for word in _WORDS.findall(title))


def _mentions_numbering(before: str, following: str) -> bool:
    """Return True if the nearest word before, else after, that indicates either, indicates versions or sections."""
    if match := _SENTENCE_END.search(following):
        following = following[: match.start()]
    for word in (*reversed(_WORDS.findall(before)), *_WORDS.findall(following)):
        if word.lower() in _NUMBERED or word == "§":
            return True
        if word.lower() in _ADDRESSED:
            return False
    return False


def _follows(text: str, start: int, characters: str) -> bool:
    return start > 0 and text[start - 1] in characters


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _is_of_a_thing(text: str, start: int) -> bool:
    """Return True if the words before a number say that it is one of a thing: an order, a part, a book."""
    return _NUMBER_OF_A_THING.search(text, max(0, start - _CONTEXT), start) is not None


def _cards(text: str) -> Iterator[tuple[int, int]]:
    from stdnum import luhn

    for match in _CARD.finditer(text):
        start, end = match.span()
        digits = re.sub("[ -]", "", match.group())
        if _follows(text, start, "0123456789.,-") or _is_of_a_thing(text, start):
            continue
        if not (_ISSUER.fullmatch(digits) and len(set(digits)) > 1 and luhn.is_valid(digits)):
            continue
        line = text.rfind("\n", 0, start) + 1
        if not _CARD_WORD.search(text, max(line, start - 2 * _CONTEXT), start) and (
            not _CARD_GROUPS.fullmatch(match.group())
            or _IDENTIFIER.search(text, max(line, start - _CONTEXT), start)
            or _GOES_ON.match(text, end)
            or _AMONG_FIGURES.search(text, max(line, start - 5 * _CONTEXT), start)
        ):
            continue
        yield start, end


def _ibans(text: str) -> Iterator[tuple[int, int]]:
    from stdnum import iban

    for match in _IBAN.finditer(text):
        value = match.group()
        if match.start() and text[match.start() - 1].isalnum():
            continue
        # A word in capitals may follow.
        while len(value) >= 15:
            if iban.is_valid(value, check_country=False):
                yield match.start(), match.start() + len(value)
                break
            value = value[:-1].rstrip()


def _phones(text: str, regions: tuple[str, ...]) -> Iterator[tuple[int, int]]:
    import phonenumbers

    previous_end = 0
    for match in _NUMBERS.finditer(text):
        start, end = match.span()
        if start < previous_end or not _looks_like_phone(text, start, end):
            continue
        window = text[start : end + _CONTEXT]
        for region in regions or (None,):
            matcher = phonenumbers.PhoneNumberMatcher(window, region, leniency=phonenumbers.Leniency.VALID, max_tries=8)
            for number in matcher:
                if number.start + start >= previous_end and number.start + start < end:
                    previous_end = start + number.end
                    yield start + number.start, previous_end
                break
            if previous_end > start:
                break


def _looks_like_phone(text: str, start: int, end: int) -> bool:
    """A country code, area code in brackets, or groups as of a phone number; bare digits only behind a word for it."""
    number = text[start:end]
    if _is_of_a_thing(text, start):
        return False
    if start and (text[start - 1].isalnum() or text[start - 1] in "._-/=#$€£:@%&?"):
        return number.startswith(("+", "(")) and not text[start - 1].isalnum()
    if number.startswith(("+", "(")):
        return True
    if re.match(r"(?:1[ .-])?\(?[2-9][0-9]{2}\)?[ .-]{1,2}[2-9][0-9]{2}[ .-][0-9]{4}(?![0-9])", number):
        return True
    if re.match(r"0[1-9][0-9]{0,4}[ /-]{1,3}[0-9]", number):
        return True
    return _PHONE_WORD.search(text, max(0, start - _CONTEXT), start) is not None


class Masking:
    """Masks personal data by kind; `counts` has how many of each kind were found."""

    name = "personal_data"

    def __init__(self, config: PersonalDataConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._kinds: dict[str, PersonalDataKind] = {kind: getattr(config, kind) for kind in KINDS}
        self._wanted = frozenset(kind for kind, handled in self._kinds.items() if handled.action != "keep")
        self.rules: Sequence[CleaningRule] = [
            CleaningRule(f"personal_data.{kind}", STEMMA, high=0)
            for kind, handled in self._kinds.items()
            if handled.action == "drop"
        ]

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        return [self._masked(document) for document in documents]

    def _masked(self, document: Document) -> Document | Broken:
        spans = find_personal_data(document.text, self._wanted, self._config.phone_regions)
        if not spans:
            return document
        kinds = Counter(item.kind for item in spans)
        self.counts.update({f"personal_data.{kind}": count for kind, count in kinds.items()})
        for rule in self.rules:
            if count := kinds[rule.name.rpartition(".")[2]]:
                return Broken(rule, count)
        return changed(document, self.mask(document.text, spans))

    def mask(self, text: str, spans: Sequence[PersonalDataSpan]) -> str:
        pieces, previous_end = [], 0
        for start, end, kind in spans:
            pieces += [text[previous_end:start], self._kinds[kind].replacement]
            previous_end = end
        return "".join([*pieces, text[previous_end:]])
