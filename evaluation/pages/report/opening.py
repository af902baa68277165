"""Opening of the report: the outcome, three numbers, one chart, samples; then the models and their use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evaluation.pages.parts import Figure, KeyFigure, Opening, Table
from evaluation.pages.report.benchmarks.answer_sections import answers
from evaluation.pages.report.training.alignment_sections import alignment, preference_tuning
from evaluation.pages.report.training.training_sections import pretraining, tuning
from evaluation.pages.summary import frank_verdict, results_table, what_was_built
from evaluation.pages.verdicts import Claim
from evaluation.pages.words import fixed, interval_of, percent, signed
from evaluation.results.artifacts import Artifact
from evaluation.results.pipeline import ROLES, PipelineResults
from infra.lineage.ledger import run_url
from infra.servers.settings import prefect_page
from infra.store.manifest import store_root

PAGES = (("register", "MODEL_CARD.md", "model card"), ("corpus_report", "aux/corpus_report.html", "corpus report"))


SAMPLES = 2
KEY_FIGURES = 3


def opening(pipeline: PipelineResults, judged: Sequence[Claim]) -> Opening | None:
    """Return the opening; None for a pipeline without a model that writes text."""
    if not pipeline.models:
        return None
    last = pipeline.models[-1]
    rows = results_table(pipeline, pipeline.models)
    columns = ["", *map(pipeline.long_name, pipeline.models)]
    note = "In brackets: 95 % intervals. The claims below say which differences are more than chance."
    table = Table("", columns, rows, note, numeric=tuple(range(1, len(columns)))) if rows else None
    model = pipeline.model(last)
    return Opening(
        what_was_built(pipeline, last),
        frank_verdict(pipeline, last),
        table,
        [*_weights(pipeline), *_pages(pipeline), *_servers(pipeline)],
        _commands(pipeline) if model.manifest else [],
        outcome=outcome(judged),
        key_figures=list(_key_figures(pipeline))[:KEY_FIGURES],
        chart=_chart(pipeline),
        samples=answers(pipeline, SAMPLES).samples,
    )


def outcome(judged: Sequence[Claim]) -> tuple[str, str] | None:
    """Return the state of all claims together, and `7 of 7 claims hold` with those that do not; None without claims."""
    if not judged:
        return None
    counts = {
        state: sum(claim.state == state for claim in judged) for state in ("holds", "slight", "undecided", "fails")
    }
    words = {"slight": "more by a little", "undecided": "undecided", "fails": "do not hold"}
    parts = [f"{counts['holds']} of {len(judged)} claims hold"]
    parts += [f"{counts[state]} {label}" for state, label in words.items() if counts[state]]
    worst = next(state for state in ("fails", "undecided", "slight", "holds") if counts[state])
    return worst, ", ".join(parts)


def _key_figures(pipeline: PipelineResults) -> Iterator[KeyFigure]:
    """Yield the figures to show in large print, the most telling first: language, answers, safety, then the rest."""
    for id in pipeline.steps("pretrain")[:1]:
        figures = pipeline.figures(id)
        if "bits_per_byte" in figures:
            note = (
                f"a bigram model's loss is {fixed(figures['bigram_loss'])}, its is {fixed(figures['validation_loss'])}"
            )
            note = note if {"bigram_loss", "validation_loss"} <= figures.keys() else ""
            yield KeyFigure(fixed(figures["bits_per_byte"], 3), "bits per byte of held-out text, base model", note)
    yield from _answer_figures(pipeline)
    for first, last in pipeline.first_and_last()[:1]:
        if paired := pipeline.paired_toxicity(first, last):
            before, after = (fixed(value) for value in paired.worst_of)
            note = f"{pipeline.long_name(first)}, then {pipeline.long_name(last)}"
            if untrained := pipeline.results("safety", first).get("toxicity", {}).get("untrained"):
                note += f"; untrained {fixed(untrained['expected_max_toxicity']['value'])}"
            yield KeyFigure(f"{before} → {after}", "expected maximum toxicity", note)
    for id in pipeline.steps("reward_model")[:1]:
        if accuracy := interval_of(pipeline.figures(id), "heldout_accuracy"):
            yield KeyFigure(percent(accuracy.value, 0), "held-out pairs ordered rightly", "the reward model")
    for task in pipeline.results("benchmarks", pipeline.models[-1]).get("tasks", {}):
        if score := pipeline.scores_of(pipeline.models[-1], task):
            floor = {"untrained": "an untrained model has", "chance": "guessing gives"}
            notes = [f"{words} {percent(score[name], 0)}" for name, words in floor.items() if name in score]
            yield KeyFigure(percent(score["value"], 0), f"right on {task}", ", ".join(notes[:1]))


def _answer_figures(pipeline: PipelineResults) -> Iterator[KeyFigure]:
    """Yield the one figure that shows best the effect of tuning and alignment on the answers."""
    for id in [*pipeline.steps("rlhf"), *pipeline.steps("preference_tuning"), *pipeline.steps("sft")]:
        figures = pipeline.figures(id)
        method = "instruction tuning" if id in pipeline.steps("sft") else pipeline.algorithm(id)
        before, after = (interval_of(figures, f"verified_{role}") for role in list(pipeline.roles(id)))
        if before and after:
            value = f"{percent(before.value, 0)} → {percent(after.value, 0)}"
            yield KeyFigure(value, "answers verified right", f"before and after {method}")
        elif gain := interval_of(figures, "reward_gain"):
            yield KeyFigure(signed(gain.value), f"reward on held-out prompts by {method}")
        elif rate := interval_of(figures, "win_rate"):
            yield KeyFigure(percent(rate.value, 0), f"held-out pairs whose chosen answer gained more by {method}")
        elif "heldout_loss_base" in figures:
            value = f"{fixed(figures['heldout_loss_base'])} → {fixed(figures['heldout_loss_sft'])}"
            yield KeyFigure(value, "loss on held-out instructions", f"before and after {method}")
        else:
            continue
        return


def _chart(pipeline: PipelineResults) -> Figure | None:
    """Return the first chart of the first training that drew one, without its caption, which its section has."""
    for stage, section_of in (
        ("pretrain", pretraining),
        ("sft", tuning),
        ("preference_tuning", preference_tuning),
        ("rlhf", alignment),
    ):
        for id in pipeline.steps(stage):
            if figures := section_of(pipeline, id).figures:
                name = (
                    pipeline.long_name(pipeline.roles(id)[list(pipeline.roles(id))[-1]])
                    if stage in ROLES
                    else "base model"
                )
                return Figure(f"{figures[0].title} of the {name}", figures[0].svg, "", "", figures[0].legend)
    return None


def _commands(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return commands that a user may run next."""
    addresses = [_address(pipeline.model(name)) for name in pipeline.models]
    commands = [("Talk to it:", f"stemma chat {addresses[-1]}")]
    if len(addresses) > 1:
        commands.append(("Two models side by side in the browser:", f"stemma serve {' '.join(addresses[-2:])}"))
    return commands


def _address(artifact: Artifact) -> str:
    return f"{artifact.stage}/{artifact.manifest.fingerprint[:8]}" if artifact.manifest else artifact.id


def _weights(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return a link to the folder of each model's weights: the report is two folders below the store's."""
    models = [(name, pipeline.model(name)) for name in pipeline.models]
    return [
        (f"weights of the {pipeline.long_name(name)}", _inside(artifact))
        for name, artifact in models
        if artifact.manifest
    ]


def _pages(pipeline: PipelineResults) -> list[tuple[str, str]]:
    pages = []
    for stage, file, label in PAGES:
        for id in pipeline.steps(stage):
            artifact = pipeline.artifacts[id]
            if artifact.manifest and (artifact.folder / file).is_file():
                pages.append((label if id == stage else f"{label} of {id}", f"{_inside(artifact)}{file}"))
    return pages


def _servers(pipeline: PipelineResults) -> list[tuple[str, str]]:
    """Return links to the run that built the last artifact, in MLflow and Prefect, if these are running now."""
    artifact = max(
        (artifact for artifact in pipeline.artifacts.values() if artifact.manifest), key=_finished, default=None
    )
    if artifact is None or artifact.manifest is None:
        return []
    root = store_root(artifact.folder)
    links = [("this run in MLflow", run_url(root, artifact.manifest.run_id))]
    if artifact.manifest.flow_run_id and (prefect := prefect_page(root)):
        links.append(("in Prefect", f"{prefect}/runs/flow-run/{artifact.manifest.flow_run_id}"))
    return [(label, url) for label, url in links if url]


def _finished(artifact: Artifact) -> str:
    return artifact.manifest.finished if artifact.manifest else ""


def _inside(artifact: Artifact) -> str:
    """Return the relative path from one artifact's folder to another's, which is at its address if only its records
    were brought here."""
    is_in_store = artifact.manifest is None or store_root(artifact.folder) == artifact.folder.parent.parent
    name = artifact.folder.name if is_in_store or artifact.manifest is None else artifact.manifest.fingerprint
    return f"../../{artifact.folder.parent.name}/{name}/"
