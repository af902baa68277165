"""Sections on the documents that were read, those that were removed and why, and those that are left."""

from __future__ import annotations

from typing import Any, NamedTuple

from markupsafe import Markup

from evaluation.pages.charts import Bar, bar_chart
from evaluation.pages.corpus.corpus import WORDS, Corpus
from evaluation.pages.parts import Figure, Section, Table
from evaluation.pages.words import compact, count, language, percent, size

SAMPLE_CHARACTERS = 1200
RULES_DRAWN = 14
RULES_SAMPLED = 5
CLASSES_DRAWN = 12


def funnel(corpus: Corpus) -> Section:
    rows, bars = [], []
    documents_read, bytes_read = corpus.totals(corpus.chain[0]) if corpus.chain else (0, 0)
    for id in corpus.chain:
        documents, text_bytes = corpus.totals(id)
        bars.append((WORDS[id], [Bar(documents, "train", "documents")]))
        kept = percent(text_bytes / max(1, bytes_read))
        rows.append([id, f"{documents:,}", percent(documents / max(1, documents_read)), size(text_bytes), kept])
    sized = [(WORDS[id], [Bar(corpus.totals(id)[1], "validation", "text")]) for id in corpus.chain]
    figures = [
        Figure(
            "Documents", bar_chart("Documents", bars, value_format=compact), "Documents that each stage leaves.", ""
        ),
        Figure("Text", bar_chart("Text", sized, value_format=size), "UTF-8 bytes of text that each stage leaves.", ""),
    ]
    columns = ["stage", "documents", "of those read", "text", "of that read"]
    lead = f"{documents_read:,} documents with {size(bytes_read)} of text were read."
    return Section("funnel", "Funnel", lead, figures, [Table("", columns, rows, numeric=(1, 2, 3, 4))])


def sources(corpus: Corpus) -> Section:
    if not corpus.chain:
        return Section("sources", "Sources")
    first, last = corpus.sources(corpus.chain[0]), corpus.sources(corpus.chain[-1])
    ingested = {row.get("name", row["source"]): row for row in corpus.json("ingest", "aux/sources.json") or []}
    shards = corpus.json("shard", "meta.json").get("sources", {})
    rows = []
    empty = {"documents": 0, "bytes": 0}
    generated = {name: {**source, **empty} for name, source in last.items() if name not in first}
    for name, read in {**first, **generated}.items():
        remaining = last.get(name, empty)
        train = shards.get(name, {}).get("train", {})
        rows.append(
            [
                name,
                read["licence"] or "unstated",
                language(read["language"]) or "–",
                f"{read['documents']:,}",
                f"{ingested.get(name, {}).get('quarantined', 0):,}",
                size(read["bytes"]),
                f"{remaining['documents']:,}",
                size(remaining["bytes"]),
                percent(remaining["bytes"] / read["bytes"]) if read["bytes"] else "–",
                f"{train['tokens']:,}" if train else "–",
            ]
        )
    columns = [
        "source",
        "licence",
        "language",
        "read",
        "put aside",
        "text",
        "left",
        "text left",
        "of it",
        "training tokens",
    ]
    note = "Put aside: records that could not be read, with file, line and reason in ingest's aux/quarantine.jsonl."
    unstated = [name for name, read in {**first, **generated}.items() if not read["licence"]]
    lead = f"{count(len(first) + len(generated), 'source')}."
    lead += f" No licence is stated for {', '.join(unstated)}." if unstated else ""
    return Section("sources", "Sources", lead, tables=[Table("", columns, rows, note, numeric=(3, 4, 5, 6, 7, 8, 9))])


def rules(corpus: Corpus) -> Section:
    counted = [(id, rule, n) for id in corpus.chain for rule, n in corpus.dropped(id).items() if n]
    counted.sort(key=lambda row: (-row[2], row[1]))
    read = corpus.totals(corpus.chain[0])[0] if corpus.chain else 0
    reasons = _reasons(corpus)
    rows = []
    for id, rule, n in counted:
        rule_reason = reasons.get((id, rule), Reason(_LOOSENED_BY.get(rule, id)))
        shares = [f"{n:,}", percent(n / max(1, read), 2)]
        rows.append(
            [rule.replace("_", " "), *shares, rule_reason.needs or "–", rule_reason.key, rule_reason.paper or "–"]
        )
    if not rows:
        return Section("rules", "Rules")
    drawn = [(rule.replace("_", " "), [Bar(n, "rlhf")]) for _, rule, n in counted[:RULES_DRAWN]]
    caption = "Documents that each rule dropped. A document is counted under the first rule that it breaks."
    figure = Figure("Dropped by rule", _wide_chart("Dropped by rule", drawn), caption, "", wide=True)
    columns = ["rule", "documents", "of those read", "a document needs", "loosened by the key", "paper"]
    table = Table("All rules", columns, rows, numeric=(1, 2), mono=(4,), folded=len(rows) > 12)
    samples = corpus.json("clean", "aux/samples.json")
    sampled_rules = [*(rule for _, rule, _ in counted if rule in samples)][:RULES_SAMPLED]
    folded = []
    for kind in ("kept", "changed", *sampled_rules):
        reason = reasons.get(("clean", kind))
        for row in samples.get(kind, [])[:2]:
            label = reason.of(row["value"]) if reason and "value" in row else kind
            folded.append((f"{row['source']}: {label}", _as_text({**row, "value": None})))
    return Section("rules", "Rules", "", [figure], [table], folded=folded)


_LOOSENED_BY = {
    "near_duplicate": "dedupe.near.threshold",
    "exact_duplicate": "dedupe.exact",
    "boilerplate": "dedupe.boilerplate",
    "substring": "dedupe.substrings.min_characters",
    "semantic_duplicate": "semantic_dedupe.threshold",
    "test_item": "decontaminate.ngram",
}
"""Config key behind a rule, for stages with few rules."""


class Reason(NamedTuple):
    """The reason why a rule drops a document: the key that loosens it, the bound that a document must meet (`≥ 0.8`),
    and the paper of the rule."""

    key: str
    needs: str = ""
    paper: str = ""

    def of(self, value: float) -> str:
        return f"{value:,.3g}, needs {self.needs}: {self.key}"


def _reasons(corpus: Corpus) -> dict[tuple[str, str], Reason]:
    """Return (stage, rule) → its reason, for stages that record their rules."""
    reasons = {}
    for id in corpus.chain:
        for rule, entry in corpus.json(id, "aux/counts.json").get("rules", {}).items():
            # "min_words (at least 15)", "min_confidence (0.2 to 1)"
            limit = str(entry["limit"]).removeprefix(rule).strip(" ()")
            condition = limit.replace("at least", "≥").replace("at most", "≤")
            reasons[id, rule] = Reason(f"{id}.{rule}", condition, entry["paper"])
    return reasons


def _wide_chart(title: str, rows: list[tuple[str, list[Bar]]]) -> Markup:
    return bar_chart(title, rows, value_format=compact, width=900, label_width=330)


def _as_text(row: dict[str, Any]) -> str:
    """Return a sample as text: the measured value, then the text, before and after for changed texts."""
    texts = {key: value for key, value in row.items() if key not in ("id", "source") and value not in (None, "")}
    return "\n\n".join(f"{key}: {str(value)[:SAMPLE_CHARACTERS]}" for key, value in texts.items())


def personal_data(corpus: Corpus) -> Section:
    counts = corpus.json("clean", "aux/counts.json")
    rows = [[name.replace("_", " "), f"{n:,}"] for name, n in counts.get("counts", {}).items() if n]
    if not rows:
        return Section("changes", "Personal data and repairs")
    lead = (
        f"{counts.get('changed', 0):,} documents were changed and kept: personal data masked, lines or text repaired."
    )
    table = Table("Found in the text", ["what", "times"], rows, numeric=(1,))
    return Section("changes", "Personal data and repairs", lead, tables=[table])


def duplicates(corpus: Corpus, stage: str = "dedupe") -> Section:
    """Return the section of `dedupe` or of `semantic_dedupe`."""
    counts = corpus.json(stage, "aux/counts.json")
    is_semantic = stage == "semantic_dedupe"
    id, heading = ("semantic", "Semantic duplicates") if is_semantic else ("duplicates", "Duplicates")
    if not counts:
        return Section(id, heading)
    rows = [[row["source"], row["original_source"], f"{row['documents']:,}"] for row in counts.get("pairs", [])]
    table = Table("Which source repeats which", ["source", "repeats", "documents"], rows, numeric=(2,))
    bins = counts.get("near", {}).get("similarities", [])
    drawn = [(f"from {row['from']:.2f}", [Bar(row["documents"], "sft")]) for row in bins]
    kind = (
        "Semantic duplicates that went, by the cosine" if is_semantic else "Near duplicates that went, by their Jaccard"
    )
    caption = f"{kind} similarity to the document that stayed."
    figures = [Figure("Similarity", bar_chart("Similarity", drawn, value_format=compact), caption, "")] if drawn else []
    folded = []
    for row in (corpus.json(stage, "aux/clusters.json") or [])[:6]:
        if not row["samples"]:
            continue
        duplicate = row["samples"][0]
        similar = f"one of similarity {duplicate['similarity']:.2f}"
        title = f"{row['kept']['source']}: {row['dropped']:,} dropped for it, {similar}"
        texts = (row["kept"]["text"][:SAMPLE_CHARACTERS], duplicate["text"][:SAMPLE_CHARACTERS])
        folded.append((title, "stayed:\n{}\n\nwent:\n{}".format(*texts)))
    dropped = sum(counts.get("dropped", {}).values())
    verb = "say the same as" if is_semantic else "repeat"
    lead = f"{dropped:,} of {counts.get('read', 0):,} documents {verb} another one."
    if cut := counts.get("substrings"):
        lead += (
            f" {count(cut['passages'], 'passage')} of at least {cut['min_bytes']:,} bytes that occurred before, "
            f"{size(cut['bytes_cut'])}, were cut out; {cut['changed']:,} documents stay without theirs."
        )
        for row in cut["samples"][:6]:
            title = f"{row['source']}: {row['bytes']:,} bytes cut, which {row['original_source']} has before"
            folded.append((title, row["text"][:SAMPLE_CHARACTERS]))
    return Section(id, heading, lead, figures, [table] if rows else [], folded=folded)


def contamination(corpus: Corpus) -> Section:
    report = corpus.json("decontaminate", "aux/contamination.json")
    if not report:
        return Section("contamination", "Test items in the text")
    rows = [
        [task, f"{counts['items']:,}", f"{counts['items_hit']:,}", f"{counts['documents_hit']:,}"]
        for task, counts in report["tasks"].items()
    ]
    hit = sum(counts["items_hit"] for counts in report["tasks"].values())
    lead = f"{hit:,} of {sum(counts['items'] for counts in report['tasks'].values()):,} test items were in the text."
    table = Table("", ["benchmark", "items", "found", "in documents"], rows, numeric=(1, 2, 3))
    folded = [(f"{row['task']}, item {row['item']}", _as_text(row)) for row in list(report["samples"])[:5]]
    return Section("contamination", "Test items in the text", lead, tables=[table], folded=folded)


def languages_and_lengths(corpus: Corpus) -> Section:
    before, after = (corpus.json(id, "aux/profile.json") for id in ("validate", "validate_clean"))
    figures = []
    for name, title in (("language", "Languages"), ("characters of text", "Lengths"), ("source", "Sources")):
        was, now = before.get(name, {}), after.get(name, {})
        classes = [*now, *(bucket for bucket in was if bucket not in now)]
        if name == "characters of text":
            classes.sort(key=lambda bucket: int(bucket.split(" ")[0].replace(",", "")))
        totals = [max(1, sum(counts.values())) for counts in (was, now)]
        drawn = []
        for bucket in classes if name == "characters of text" else classes[:CLASSES_DRAWN]:
            bars = [
                Bar(counts.get(bucket, 0) / total, style, when)
                for counts, total, style, when in (
                    (was, totals[0], "base", "as read"),
                    (now, totals[1], "train", "at the end"),
                )
                if counts
            ]
            drawn.append((language(bucket) if name == "language" else bucket, bars))
        if drawn:
            legend = [("as read", "base"), ("at the end", "train")]
            caption = {"characters of text": "Characters of a document."}.get(name, "Share of documents.")
            figures.append(Figure(title, bar_chart(title, drawn, value_format=percent), caption, "", legend))
    return Section("distributions", "Languages, lengths, sources", "", figures)
