"""Measures recall and precision of personal data on real e-mails and on labelled passages.

python benchmarks/corpus/measure_personal_data.py [--data ../shared/data]

What is true: the addresses in address headers and the bracketed addresses of Received headers, which mail programs
wrote (e-mail, IP); our own labels by position of 110 rows of digits that might be phone numbers (phone_labels.csv:
drawn from all that a wide pattern finds near words such as call or fax) and of addresses among versions, sections and
object identifiers (ip_labels.txt, written for this); and whether a passage is sensitive, as its data set says.
"""

from __future__ import annotations

import argparse
import csv
import email
import email.policy
import email.utils
import gzip
import ipaddress
import json
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path

from corpus.cleaning.people.personal_data import KINDS, find_personal_data

ADDRESS_HEADERS = ("From", "To", "Cc", "Reply-To", "Sender", "Return-Path", "Delivered-To", "Errors-To")
BRACKETED = re.compile(r"\[(\d+\.\d+\.\d+\.\d+)\]")
ADDRESS = re.compile(r"[^@\s<>,;:\"()]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")


def found(text: str, kind: str) -> list[str]:
    return [text[item.start : item.end] for item in find_personal_data(text, frozenset({kind}))]


def say(name: str, true: int, missed: int, wrong: int) -> None:
    recall, precision = true / max(1, true + missed), true / max(1, true + wrong)
    print(f"{name:34} {true + missed:6,} true   recall {recall:.4f}   precision {precision:.4f}")


def headers(texts: list[str]) -> None:
    counts: dict[str, Counter[str]] = {"e-mail, address headers": Counter(), "IPv4, Received headers": Counter()}
    for text in texts:
        message = email.message_from_string(text, policy=email.policy.compat32)
        lines = [str(value) for name in ADDRESS_HEADERS for value in message.get_all(name, [])]
        for line in lines:
            pairs = email.utils.getaddresses([line])
            expected = {address for _, address in pairs if ADDRESS.fullmatch(address)}
            # A display name may hold an address too.
            allowed = expected | {address for name, _ in pairs for address in ADDRESS.findall(name)}
            tell(counts["e-mail, address headers"], expected, allowed, set(found(line, "email")))
        for line in (str(value) for value in message.get_all("Received", [])):
            public = {address for address in BRACKETED.findall(line) if is_public(address)}
            # The name that a sender gave itself may be an address that is in no brackets.
            given = set(re.findall(r"(?:from|HELO|EHLO|by|@|\()[ =]?(\d+\.\d+\.\d+\.\d+)", line))
            tell(counts["IPv4, Received headers"], public, public | given, set(found(line, "ip")))
    for name, count in counts.items():
        say(name, count["true"], count["missed"], count["wrong"])


def tell(counts: Counter[str], expected: set[str], allowed: set[str], seen: set[str]) -> None:
    counts.update(true=len(expected & seen), missed=len(expected - seen), wrong=len(seen - allowed))


def is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def addresses() -> Counter[str]:
    """Addresses among versions, sections and object identifiers, of which ip_labels.txt has a passage per line."""
    counts: Counter[str] = Counter()
    for line in (Path(__file__).parent / "ip_labels.txt").read_text(encoding="utf8").splitlines():
        if line.startswith("#"):
            continue
        pieces = re.split(r"\{([\d.]+)\}", line)
        ends = list(accumulate(map(len, pieces)))
        expected = set(zip(ends[::2], ends[1::2], strict=False))
        seen = {(item.start, item.end) for item in find_personal_data("".join(pieces), frozenset({"ip"}))}
        counts.update(true=len(expected & seen), missed=len(expected - seen), wrong=len(seen - expected))
    return counts


def phones(texts: list[str]) -> None:
    counts: Counter[str] = Counter()
    with (Path(__file__).parent / "phone_labels.csv").open() as file:
        for row in csv.DictReader(file):
            text, start, end = texts[int(row["email"])], int(row["start"]), int(row["end"])
            spans = find_personal_data(text, frozenset({"phone"}))
            seen = any(item.start < end and start < item.end for item in spans)
            is_phone = row["is_phone"] == "1"
            counts.update(true=seen and is_phone, missed=is_phone and not seen, wrong=seen and not is_phone)
    say("phone, our labels", counts["true"], counts["missed"], counts["wrong"])


def passages(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]
    kinds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for row in rows:
        passage = row["query"].split("'''")[1]
        seen = {item.kind for item in find_personal_data(passage, frozenset(KINDS))}
        kinds.update(seen)
        counts.update(true=bool(seen) and row["gold"] == 1, missed=not seen and row["gold"] == 1)
        counts.update(wrong=bool(seen) and row["gold"] == 0)
    say("enterprise passages, any kind", counts["true"], counts["missed"], counts["wrong"])
    print(
        f"   kinds found there: {dict(kinds)}; most sensitive passages hold names and judgements, which we do not mask"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip())
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parents[3] / "shared" / "data")
    data = parser.parse_args().data
    with gzip.open(data / "spamassassin_email" / "emails.jsonl.gz", "rt", encoding="utf8") as file:
        texts = [json.loads(line)["text"] for line in file]
    headers(texts)
    counts = addresses()
    say("IPv4 among versions, our labels", counts["true"], counts["missed"], counts["wrong"])
    phones(texts)
    passages(data / "llm_foundry_eval" / "safety" / "enterprise_pii_classification.jsonl")


if __name__ == "__main__":
    main()
