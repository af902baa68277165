"""Bias and memorisation of the models side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evaluation.pages.charts import IntervalRow, Mark, interval_plot
from evaluation.pages.parts import Figure, Section, Table
from evaluation.pages.words import (
    between,
    between_percent,
    fixed,
    percent,
    signed,
)
from evaluation.results.pipeline import PipelineResults
from evaluation.statistics.intervals import Interval
from evaluation.statistics.paired import holm

PUBLISHED = {
    "winobias": "WinoBias: whom a pronoun stands for, with and against the stereotype",
    "winogender": "Winogender: whom a pronoun stands for, by its gender",
    "bbq": "BBQ: answers where the context contains them and where it does not",
    "stereoset": "StereoSet: language modelling (lms), stereotypes (ss, 50 is no preference) and both (icat)",
    "honest": "HONEST: sentences about people completed with hurtful words (share by HurtLex's category)",
    "bec_pro": "BEC-Pro: association of professions with words for women and for men, in nats",
}

PERSONAL_DATA = {
    "any": "any",
    "secret": "keys and passwords",
    "email": "e-mail addresses",
    "iban": "bank accounts",
    "card": "payment cards",
    "ip": "IP addresses",
    "phone": "phone numbers",
}


def bias(pipeline: PipelineResults) -> Section:
    by_model = {m: b for m in pipeline.models if (b := pipeline.results("safety", m).get("bias"))}
    if not by_model:
        return Section("bias", "Bias")
    categories = sorted({category for result in by_model.values() for category in result["by_category"]})

    def mark(model: str, cell: dict[str, float]) -> Mark:
        return Mark(model, pipeline.style(model), cell["value"], cell["low"], cell["high"])

    def row(label: str, cells: dict[str, dict[str, Any]]) -> IntervalRow:
        return IntervalRow(label, [mark(model, cell["stereotype_score"]) for model, cell in cells.items()], 50.0)

    rows = [row("overall", {model: result["overall"] for model, result in by_model.items()})]
    for name in categories:
        cells = {
            model: result["by_category"][name] for model, result in by_model.items() if name in result["by_category"]
        }
        rows.append(row(name, cells))
    chart = interval_plot(
        "stereotype score", rows, value_format=lambda v: f"{v:.0f} %", span=(0, 100), reference_label="no preference"
    )
    tested = len(by_model) * (1 + len(categories))
    unlike = [
        f"{model} {category} ({fixed(cell['stereotype_score']['value'], 0)} %)"
        for model, result in by_model.items()
        for category, cell in [("overall", result["overall"]), *result["by_category"].items()]
        if not cell["stereotype_score"]["low"] <= 50 <= cell["stereotype_score"]["high"]
    ]
    figure = Figure(
        "Stereotype score by category",
        chart,
        "Share of pairs whose stereotyping sentence is likelier; 50 is no preference. "
        + (f"Away from 50: {', '.join(unlike)}. " if unlike else "Every interval includes 50: no preference is shown. ")
        + f"Of {tested} intervals about {0.05 * tested:.1f} would miss 50 by chance alone.",
        "Whole sentences are compared, so that a term that is merely rare makes its sentence less likely; the second "
        "column of the table leaves the term out. A score of 50 also comes from a model that understands neither.",
        pipeline.legend(list(by_model)),
        wide=True,
    )
    cells_of = [
        (model, name, cell)
        for model, result in by_model.items()
        for name, cell in [("overall", result["overall"]), *result["by_category"].items()]
    ]
    scores = ("stereotype_score", "stereotype_score_shared")
    adjusted = [holm([cell[score]["p_value"] for _, _, cell in cells_of]) for score in scores]
    body = [
        [
            pipeline.long_name(model),
            name,
            f"{cell['pairs']}",
            *_score(cell[scores[0]], p_value),
            *_score(cell[scores[1]], p_shared),
        ]
        for (model, name, cell), p_value, p_shared in zip(cells_of, *adjusted, strict=True)
    ]
    columns = ["model", "category", "pairs", "stereotype score", "p (Holm)", "without the term itself", "p (Holm)"]
    note = "p against 50 %, corrected for the number of rows of its column (Holm 1979)."
    table = Table("Figures", columns, body, note, True, (2, 3, 4, 5, 6))
    return Section("bias", "Bias", "", [figure], [table, *_published_sets(pipeline, by_model)])


def _published_sets(pipeline: PipelineResults, by_model: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Return a table for each published set: every metric of every category, one column per model."""
    cells = {
        (row["set"], row["category"], row["metric"], model): row
        for model, result in by_model.items()
        for row in result.get("sets", [])
    }
    models = [model for model in by_model if any(key[3] == model for key in cells)]
    tables = []
    for kind in dict.fromkeys(key[0] for key in cells):
        lines = dict.fromkeys(key[1:3] for key in cells if key[0] == kind)
        rows = []
        for category, metric in lines:
            row_cells = [cells.get((kind, category, metric, model)) for model in models]
            n = next(cell["n"] for cell in row_cells if cell)
            rows.append([category, metric.replace("_", " "), f"{n}", *(_published(cell) for cell in row_cells)])
        tables.append(
            Table(
                PUBLISHED[kind],
                ["category", "metric", "n", *map(pipeline.long_name, models)],
                rows,
                "With 95 % intervals; p by Holm's method for all tests of a model's published sets.",
                numeric=tuple(range(2, 3 + len(models))),
            )
        )
    return tables


def _published(cell: Mapping[str, float] | None) -> str:
    if cell is None:
        return "–"
    digits = 1 if abs(cell["high"]) > 1 else 2
    interval = Interval(cell["value"], cell["low"], cell["high"])
    p = f", p = {cell['p_holm']:.2g}" if "p_holm" in cell else ""
    return f"{fixed(interval.value, digits)} {between(interval, digits)}{p}"


def _score(cell: dict[str, float], p_holm: float) -> list[str]:
    return [f"{cell['value']:.1f} % ({cell['low']:.1f} to {cell['high']:.1f})", f"{p_holm:.2g}"]


def memorisation(pipeline: PipelineResults) -> Section:
    rows: list[list[str]] = []
    memorizing: list[str] = []
    not_memorizing: list[str] = []
    skipped: list[str] = []
    for model in pipeline.models:
        results = pipeline.results("safety", model).get("memorisation")
        if not results:
            continue
        if "skipped" in results:
            skipped.append(f"{pipeline.long_name(model)}: {results['skipped']}")
            continue
        train, control = (Interval(**results[split]["exact_match"]) for split in ("train", "validation"))
        tokens = [results[split]["recited_tokens"]["value"] for split in ("train", "validation")]
        difference = Interval(**results["exact_match_difference"])
        rows.append(
            [
                pipeline.long_name(model),
                f"{results['train']['sequences']}",
                _trained_share(results),
                f"{percent(train.value)} {between_percent(train)}",
                f"{percent(control.value)} {between_percent(control)}",
                f"{signed(100 * difference.value, 1)} points {between_percent(difference)}",
                f"{fixed(tokens[0])} / {fixed(tokens[1])}",
            ]
        )
        (memorizing if difference.low > 0 else not_memorizing).append(pipeline.long_name(model))
        length = f"{results['continuation_tokens']} tokens after a prefix of {results['prefix_tokens']}"
    if not rows:
        said_so = " ".join(f"Not measured: {reason}." for reason in skipped)
        return Section(
            "memorisation", "Memorisation", said_so, tables=[*_exposure(pipeline), *_personal_data(pipeline)]
        )
    sentences = []
    if memorizing:
        sentences.append(f"Recited more of its training text than of text it never saw: {', '.join(memorizing)}.")
    if not_memorizing:
        sentences.append(f"Not shown to recite training text more than text it never saw: {', '.join(not_memorizing)}.")
    table = Table(
        f"Exact recitation of {length}",
        [
            "model",
            "documents",
            "sequences trained on",
            "training",
            "validation (control)",
            "difference",
            "recited tokens / control",
        ],
        rows,
        "A sample of the text that was trained on, greedy decoding and exact matches only: recitation with small "
        "changes is not seen. Boilerplate that is in both texts raises both columns.",
        numeric=(1, 2, 3, 4, 5, 6),
    )
    return Section(
        "memorisation",
        "Memorisation",
        " ".join(sentences),
        tables=[
            table,
            *_copies(pipeline),
            *_membership(pipeline),
            *_exposure(pipeline),
            *_personal_data(pipeline),
        ],
    )


def _copies(pipeline: PipelineResults) -> list[Table]:
    rows = []
    for model in pipeline.models:
        for row in pipeline.results("safety", model).get("memorisation", {}).get("by_copies", []):
            share = Interval(**row["exact_match"])
            copies = f"{row['at_least']}" + (f" to {row['at_most']}" if row["at_most"] > row["at_least"] else "")
            recited = f"{percent(share.value)} {between_percent(share)}"
            rows.append([pipeline.long_name(model), copies, f"{row['documents']:,}", f"{row['sequences']}", recited])
    note = "Copies are documents that begin with the same tokens and were trained on; different ones are asked."
    columns = ["model", "copies", "different documents", "asked", "recited exactly"]
    return [Table("Recitation by number of copies", columns, rows, note, numeric=(1, 2, 3, 4))] if rows else []


def _membership(pipeline: PipelineResults) -> list[Table]:
    rows = []
    for model in pipeline.models:
        inference = pipeline.results("safety", model).get("memorisation", {}).get("membership_inference")
        if inference:
            auc = Interval(**inference)
            conclusion = "not distinguishable" if auc.low <= 0.5 else "distinguishable"
            rows.append([pipeline.long_name(model), f"{fixed(auc.value)} {between(auc)}", conclusion])
    note = "How well a threshold on the loss separates training documents from validation text; 0.5 is guessing."
    columns = ["model", "AUC", "training text and other text"]
    return [Table("Membership inference", columns, rows, note, numeric=(1,))] if rows else []


def _exposure(pipeline: PipelineResults) -> list[Table]:
    """Return the exposure of each planted canary by each model."""
    rows = []
    for model in pipeline.models:
        for row in pipeline.results("safety", model).get("exposure", []):
            bits = Interval(**row["exposure"])
            rows.append(
                [
                    pipeline.long_name(model),
                    row["text"],
                    f"{row['planted']:,}",
                    "–" if row["trained"] is None else f"{row['trained']:,}",
                    f"{row['rank']:,} of {row['compared']:,}",
                    f"{fixed(bits.value, 1)} {between(bits, 1)}",
                    f"{row['p_holm']:.2g}",
                ]
            )
    columns = ["model", "canary", "planted", "trained on", "rank", "exposure in bits", "p"]
    note = (
        "Made-up secrets that were planted in the training text. Rank: the number of texts of the format that are "
        "at least as likely. Half of those that were never seen have less than 1 bit; the likeliest one has the "
        "most that this number of texts can show. p: how often an unseen one ranks as high, by Holm's method."
    )
    return [Table("Exposure of planted canaries", columns, rows, note, numeric=(2, 3, 4, 5, 6))] if rows else []


def _personal_data(pipeline: PipelineResults) -> list[Table]:
    """Return the share of the continuations for toxicity that contain personal data, by kind."""
    rows = []
    for model in pipeline.models:
        personal_data_rows = pipeline.results("safety", model).get("personal_data")
        if not personal_data_rows:
            continue
        for kind, cell in {"any": personal_data_rows["overall"], **personal_data_rows["by_kind"]}.items():
            share = Interval(cell["value"], cell["low"], cell["high"])
            rate = f"{percent(share.value)} {between_percent(share)}"
            counts = [f"{personal_data_rows['continuations']:,}", f"{cell['found']:,}"]
            rows.append([pipeline.long_name(model), PERSONAL_DATA[kind], *counts, rate])
    columns = ["model", "kind", "continuations", "with any", "share"]
    note = (
        "In the continuations that were drawn for toxicity, by the detectors that clean masks personal data with. They "
        "go by form: whether an address belongs to a person, and whether it was in the training text, is not checked."
    )
    return [Table("Personal data in continuations", columns, rows, note, numeric=(2, 3, 4))] if rows else []


def _trained_share(results: Mapping[str, Any]) -> str:
    """Return the part of the training split that the model saw."""
    return f"{results['trained_sequences']:,} of {results['training_sequences']:,}"
