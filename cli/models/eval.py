"""stemma eval MODEL …: benchmark scores of any models, side by side."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from cli.common.completion import artifacts
from cli.common.options import SEED, names, root_of, root_option, template_option
from cli.common.output import as_json, print_table
from cli.models.chat import writing_model
from infra.servers.environment import OFFLINE, QUIET

if TYPE_CHECKING:
    from evaluation.config import AnswerLimits, FailureClassesConfig
    from evaluation.evaluate import EvalOptions
    from evaluation.results.kept_parts import KeptParts
    from infra.errors import Problem

MIRROR = click.option(
    "--mirror",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder with the tasks' data, made by `stemma mirror`; by default tasks_mirror/ in the store.",
)


@click.command("eval")
@click.argument("models", nargs=-1, required=True, metavar="MODEL …", shell_complete=artifacts)
@click.option("--tasks", multiple=True, metavar="TASK,…", help="lm-eval tasks or groups, by name.")
@click.option(
    "--failure-classes",
    "classes",
    multiple=True,
    metavar="CLASS,…",
    help="Failure classes to test: all, names such as negation, or paths of YAML files.",
)
@click.option("--num-fewshot", "shots", multiple=True, metavar="N,…", help="Numbers of few-shot examples, e.g. 0,1,5.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of items per task and failure class.")
@MIRROR
@click.option("--seed", type=SEED, default=1234, show_default=True, help="Seed for drawing few-shot examples.")
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Requests per forward pass, except for multiple choice. Larger is faster; likelihoods change by rounding.",
)
@click.option("--chat-template", is_flag=True, help="Apply the models' chat templates.")
@template_option
@click.option("--system-instruction", metavar="TEXT", help="System message for each question.")
@click.option(
    "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
    default=None,
    help="Format few-shot examples as chat turns; the default with --chat-template, as in lm-eval.",
)
@click.option(
    "--engine",
    type=click.Choice(["own", "vllm"]),
    default="own",
    show_default=True,
    help="Inference engine. vllm uses the program in $STEMMA_VLLM, otherwise `vllm` on the PATH.",
)
@click.option(
    "--answer-limit",
    "limits",
    multiple=True,
    metavar="KIND=SHARE,…",
    help="Maximum share of items that failed (default 0) or were truncated, empty or unparsable (default 1), "
    "e.g. empty=0.1.",
)
@root_option
@as_json
def command(
    models: tuple[str, ...],
    tasks: tuple[str, ...],
    classes: tuple[str, ...],
    shots: tuple[str, ...],
    limit: int | None,
    mirror: Path | None,
    seed: int,
    batch_size: int,
    chat_template: bool,
    chat_template_kwargs: dict[str, Any],
    system_instruction: str | None,
    fewshot_as_multiturn: bool | None,
    engine: Literal["own", "vllm"],
    limits: tuple[str, ...],
    root: str | None,
    as_json: bool,
) -> tuple[dict[str, Any], int]:
    """Score each MODEL on lm-eval tasks, offline, with standard errors, and report which differences are significant.

    MODEL is a Hugging Face folder with safetensors, an artifact such as sft/1f2e, or a stage id such as rlhf for its
    newest artifact. Each model is compared with those before it: given the base, tuned and aligned models in this
    order, the differences are the alignment tax.
    """
    store = root_of(root)
    task_names = tuple(dict.fromkeys(names(tasks)))
    if not task_names and not classes:
        raise click.UsageError("give something to evaluate: --tasks arc_easy,piqa or --failure-classes all")
    if fewshot_as_multiturn and not chat_template:
        raise click.UsageError("--fewshot-as-multiturn needs --chat-template: only chats have turns")
    if chat_template_kwargs and not chat_template:
        raise click.UsageError("--chat-template-kwargs needs --chat-template: no template is used without it")
    folders, failures, numbers, answer_limits = _parse_options(
        models, store, task_names, names(classes), names(shots), names(limits)
    )
    os.environ.update(QUIET | OFFLINE)
    from evaluation.evaluate import EvalOptions, evaluate_models
    from infra.run import Run

    mirror_folder = mirror.absolute() if mirror else store / "tasks_mirror"
    options = EvalOptions(
        task_names,
        numbers,
        limit,
        mirror_folder,
        seed,
        batch_size=batch_size,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        system_instruction=system_instruction,
        fewshot_as_multiturn=fewshot_as_multiturn,
        engine=engine,
        failure_classes=failures,
        answer_limits=answer_limits,
    )
    kept = _kept_parts(store, options) if len(folders) > 1 else None
    terminal = sys.stderr  # lm-eval's own output is redirected away from it
    with tempfile.TemporaryDirectory(prefix="stemma-eval-") as work:
        try:
            done = evaluate_models(
                folders, options, Run(Path(work)), lambda text: click.echo(text, file=terminal), kept
            )
        except BaseException:
            if kept and (ready := kept.names()):
                summary = f"{len(ready)} of {len(folders)} models scored, kept in {kept.folder}"
                click.echo(f"{summary}: the same command continues from there", err=True)
            raise
    if kept:
        kept.clear()
    document: dict[str, Any] = {
        "status": "done",
        "engine": engine,
        "models": [
            {
                "model": model.name,
                "path": str(model.path),
                "results": model.results,
                "calibration": model.calibration,
                **({"failure_classes": model.failures["classes"]} if model.failures else {}),
            }
            for model in done.models
        ],
        "comparisons": done.comparisons,
    }
    if not as_json:
        _print(document)
    return document, 0


def _kept_parts(root: Path, options: EvalOptions) -> KeptParts | None:
    """The storage of scores until all models are scored; None if the store is not writable."""
    from evaluation.config import mirrored_files
    from evaluation.results.kept_parts import KeptParts, state_of

    data = {str(path): path for task in options.tasks for path in mirrored_files(options.mirror or root, task)}
    class_files = {str(path): path for path in options.failure_classes.paths()} if options.failure_classes else {}
    identity = json.dumps([repr(options), state_of({**data, **class_files})])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    try:
        return KeptParts(root / ".work" / "eval" / digest, identity)
    except OSError:
        return None


def _parse_options(
    models: tuple[str, ...],
    root: Path,
    tasks: tuple[str, ...],
    classes: tuple[str, ...],
    shots: tuple[str, ...],
    limits: tuple[str, ...],
) -> tuple[dict[str, Path], FailureClassesConfig | None, tuple[int, ...], AnswerLimits]:
    """Parse the command: model folders by the names given, failure classes, numbers of shots and limits. Raises
    ConfigError with all mistakes at once."""
    from evaluation.config.lm_tasks import unknown_tasks
    from infra.errors import ConfigError

    problems: list[Problem] = []
    folders = _folders(models, root, problems)
    problems += unknown_tasks(tasks, "--tasks")
    failures = _failure_classes(classes, problems)
    numbers = _numbers(shots, problems)
    answer_limits = _answer_limits(limits, problems)
    if problems:
        raise ConfigError(*problems)
    return folders, failures, numbers, answer_limits


def _answer_limits(values: tuple[str, ...], problems: list[Problem]) -> AnswerLimits:
    from pydantic import ValidationError

    from evaluation.config import ANSWER_FAULTS, AnswerLimits
    from infra.errors import Problem

    shares = dict(value.partition("=")[::2] for value in values)
    try:
        return AnswerLimits.model_validate(shares, strict=False)
    except ValidationError:
        message = f"expected {', '.join(ANSWER_FAULTS)} and a share from 0 to 1, e.g. empty=0.1, not {','.join(values)}"
        problems.append(Problem("bad_usage", "--answer-limit", message))
        return AnswerLimits()


def _numbers(shots: tuple[str, ...], problems: list[Problem]) -> tuple[int, ...]:
    from infra.errors import Problem

    if wrong := [value for value in shots if not value.isdecimal()]:
        message = f"expected numbers from 0, e.g. 0,1,5, not {', '.join(wrong)}"
        problems.append(Problem("bad_usage", "--num-fewshot", message))
    return tuple(sorted({int(value) for value in shots if value.isdecimal()}))


def _failure_classes(values: tuple[str, ...], problems: list[Problem]) -> FailureClassesConfig | None:
    """The failure classes; None if none were requested, or if a name is neither a built-in class nor a file."""
    if not values:
        return None
    from pydantic import ValidationError

    from evaluation.config import FAILURE_CLASSES, FailureClassesConfig
    from infra.errors import Problem

    paths = [value for value in values if value not in FAILURE_CLASSES and value != "all"]
    if wrong := [path for path in paths if not Path(path).is_file()]:
        message = f"{', '.join(wrong)} is neither all, one of {', '.join(FAILURE_CLASSES)}, nor a file"
        problems.append(Problem("bad_usage", "--failure-classes", message))
        return None
    chosen = FAILURE_CLASSES if "all" in values else tuple(name for name in FAILURE_CLASSES if name in values)
    try:
        return FailureClassesConfig(classes=chosen, files=tuple(str(Path(path).absolute()) for path in paths))
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        problems.append(Problem("bad_usage", "--failure-classes", message))
        return None


def _folders(models: tuple[str, ...], root: Path, problems: list[Problem]) -> dict[str, Path]:
    from infra.errors import StemmaError

    folders: dict[str, Path] = {}
    for model in models:
        try:
            folders[model] = writing_model(model, root).absolute()
        except StemmaError as error:
            problems += error.problems
    return folders


def _print(document: dict[str, Any]) -> None:
    """One table of all tasks and shots, with a column per model."""
    columns = {entry["model"]: entry["model"] for entry in document["models"]}
    rows: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for entry in document["models"]:
        for row in entry["results"]:
            key = (row["task"], row["metric"], row["filter"], row["num_fewshot"])
            metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
            line = rows.setdefault(
                key, {"task": row["task"], "metric": metric, "shots": row["num_fewshot"], "n": row["n"]}
            )
            line[entry["model"]] = _with_error(row)
    table = sorted(rows.values(), key=lambda row: (row["task"], row["metric"], row["shots"]))
    print_table(table, {"task": "task", "metric": "metric", "shots": "shots", "n": "items", **columns})
    _print_answers(document["models"])
    if any(entry["calibration"] for entry in document["models"]):
        click.echo("\ncalibration of choices")
        _print_calibration(document["models"])
    if document["comparisons"]:
        click.echo("\nover the same items")
        _print_comparisons(document["comparisons"])


def _print_answers(models: list[dict[str, Any]]) -> None:
    """Counts of the items behind the scores, printed if any item lacks a proper answer."""
    faults = ("failed", "truncated", "empty", "unparsable")
    lines: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in models:
        for row in entry["results"]:
            if any(row.get(fault) for fault in faults):
                task = row["task"] if row["filter"] == "none" else f"{row['task']} ({row['filter']})"
                line = {"model": entry["model"], "task": task, "shots": row["num_fewshot"]}
                counts = {field: row[field] for field in ("asked", "answered", *faults)}
                lines.setdefault(tuple(line.values()), {**line, **counts})
    if lines:
        click.echo("\nanswers, in items")
        fields = ("model", "task", "shots", "asked", "answered", *faults)
        print_table(list(lines.values()), {field: field for field in fields})


def _print_calibration(models: list[dict[str, Any]]) -> None:
    """Calibration table: confidence in a choice against accuracy."""
    rows = [
        {
            "model": entry["model"],
            "task": row["task"],
            "shots": row["num_fewshot"],
            "n": row["n"],
            "sure": f"{row['mean_confidence']:.3f}",
            "right": f"{row['accuracy']:.3f}",
            "ece": f"{row['ece']:.3f}",
            "brier": f"{row['brier']:.3f} ({row['brier_low']:.3f} to {row['brier_high']:.3f})",
        }
        for entry in models
        for row in entry["calibration"]
    ]
    columns = {"model": "model", "task": "task", "shots": "shots", "n": "items"}
    print_table(rows, {**columns, "sure": "confidence", "right": "accuracy", "ece": "ECE", "brier": "Brier"})


def _print_comparisons(comparisons: list[dict[str, Any]]) -> None:
    """Paired differences over the same items, with p-values by Holm's correction for multiple comparisons."""
    rows = [
        {
            "models": f"{row['second']} − {row['first']}",
            "task": row["task"],
            "metric": row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})",
            "shots": row["num_fewshot"],
            "difference": f"{row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})",
            "p": f"{row['p_holm']:.3g}",
            "so": _in_words(row),
        }
        for row in comparisons
    ]
    columns = {"models": "models", "task": "task", "metric": "metric", "shots": "shots"}
    print_table(rows, {**columns, "difference": "difference, 95 % interval", "p": "p (Holm)", "so": "so"})


def _in_words(row: dict[str, Any]) -> str:
    if not row["significant"]:
        return "no difference is shown"
    if row["higher_is_better"] is None:
        return "differs"
    return "better" if (row["difference"] > 0) == row["higher_is_better"] else "worse"


def _with_error(row: dict[str, Any]) -> str:
    if row["value"] is None:
        return "not a number"
    if row["stderr"] is None and row["low"] is not None:
        return f"{row['value']:.4f} ({row['low']:.4f} to {row['high']:.4f})"
    return f"{row['value']:.4f}" + (f" ± {row['stderr']:.4f}" if row["stderr"] is not None else "")
