"""Sections of a first config as text: what was tried on the data decides them, and comments give the reasons."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from corpus.config import HELDOUT_SHARE, SUITES
from infra.io.yaml import read_plain, read_text

if TYPE_CHECKING:
    from corpus.recognition.fitting_rules import FittingRules
    from flows.planning.small_data import SmallSplit

LEAST_OF_LIMIT = 1.5
"""Multiple of the least number of rows of a suite below which a config lowers it, since later stages drop rows."""
SAMPLE_ERROR = 0.01
"""Distance from a limit of a suite that a share of a sample is taken for below it."""


def heldout_key(split: SmallSplit | None) -> str:
    """The key of the held-out share, to follow others in braces; "" for the default share."""
    return f", heldout_share: {split.heldout_share:g}" if split and split.heldout_share != HELDOUT_SHARE else ""


def about_split(split: SmallSplit | None) -> list[str]:
    return [f"# {note}" for note in split_notes(split)] if split and split.read and heldout_key(split) else []


def split_notes(split: SmallSplit | None) -> list[str]:
    """The reason for a held-out share that is not the default one."""
    if split is None or not heldout_key(split):
        return []
    parts = [f"{split.heldout:,} of {split.kept:,} documents"] if split.read else []
    parts += [f"{sides.heldout:,} of {sides.all:,} {name}" for name, sides in split.pairs.items()]
    return [
        f"little data: heldout_share {split.heldout_share:g} holds out {' and '.join(parts)}, the default "
        f"{HELDOUT_SHARE:g} too few; it is the same in all stages"
    ]


def validate_section(rules: FittingRules | None, split: SmallSplit | None = None) -> list[str]:
    """The section `validate`, whose share of texts that look like language is that of the sample where it is lower, and
    whose least number of rows is lower for small data."""
    lines = ["validate: # Great Expectations suites; configs/suites has their limits"]
    for kind in ("documents", "clean", "instructions", "preferences"):
        limits, keys, reasons = read_plain(read_text(SUITES / f"{kind}.yaml"))["limits"], [], []
        rows = _rows(split, kind)
        if rows is not None and rows < (1 if kind == "documents" else LEAST_OF_LIMIT) * limits["min_rows"]:
            keys.append(f"min_rows: {max(1, rows // 2)}")
            reasons.append(f"there are {rows}; by default at least {limits['min_rows']}")
        if rules is not None and rules.documents and kind in ("documents", "clean"):
            share, limit = (
                rules.language_like if kind == "documents" else rules.language_like_kept,
                limits["min_language_like_share"],
            )
            if share < limit + SAMPLE_ERROR:
                lowered = max(0, math.floor(100 * (share - 0.05)) / 100)
                keys.append(f"min_language_like_share: {lowered:g}")
                reasons.append(f"{share:.0%} of the sampled documents look like language; by default {limit:.0%} must")
        if keys:
            lines.append(f"  {kind}: {{{', '.join(keys)}}} # {'; '.join(reasons)}")
    return lines


def _rows(split: SmallSplit | None, kind: str) -> int | None:
    """Number of rows of small data that a suite counts; None for many, or none."""
    if split is None:
        return None
    if kind in split.pairs:
        return split.pairs[kind].trained
    return {"documents": split.read, "clean": split.kept}.get(kind) or None


def clean_section(rules: FittingRules | None) -> list[str]:
    """The section `clean`, with the reason for each rule that is turned off."""
    if rules is None or not rules.documents:
        return ["clean: # Gopher's rules, for prose"]
    tried = f"{rules.documents:,} sampled documents"
    if not rules.left_out:
        return [f"clean: # Gopher's rules, for prose; they drop {rules.dropped:.0%} of {tried}"]
    lines = [
        f"clean: # Gopher's rules, for prose, but for those that drop too many of {tried}",
        f"  # (their shares are below). The other rules drop {rules.dropped:.0%} of them.",
    ]
    for family, keys in rules.keys.items():
        if not isinstance(keys, Mapping):
            lines.append(f"  {family}: {yaml_value(keys)} # {_reasons(rules, family)}")
            continue
        lines.append(f"  {family}:")
        lines += [
            f"    {key}: {yaml_value(value)} # {_reasons(rules, f'{family}.{key}')}" for key, value in keys.items()
        ]
    return lines


def _reasons(rules: FittingRules, key: str) -> str:
    """The limits of a key that are turned off, and the shares that they would drop."""
    reasons = []
    for left in rules.left_out:
        name, limit = left.rule.name, left.rule.low if left.rule.high == math.inf else left.rule.high
        if name == key:
            reasons.append(f"{limit:,g} would drop {left.share:.0%}")
        elif name.startswith(f"{key}."):
            reasons.append(f"n={name.rpartition('.')[2]} would drop {left.share:.0%}")
    first, *more = reasons
    return ", ".join([first, *(reason.replace(" would drop", "") for reason in more)])


def yaml_value(value: Any) -> str:
    """A value in YAML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(yaml_value, value))}]"
    if isinstance(value, str):
        return _quoted(value)
    return json.dumps(value)


def _quoted(text: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z_./][A-Za-z0-9_./-]*", text) and text.lower() not in (
        "yes",
        "no",
        "on",
        "off",
        "null",
        "true",
        "false",
    )
    return text if is_plain else "'" + text.replace("'", "''") + "'"
