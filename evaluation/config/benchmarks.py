"""Config of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from evaluation.config.task_sources import DATA_DIR, how_to_mirror, lm_eval_files, mirrored_files
from infra.config import Config, Seed, StageConfig, outside_identity
from infra.io.sources import Source, SourcePath, expand

ProjectTask = Literal["minimal_pairs", "cloze"]
PROJECT_TASKS: tuple[str, ...] = ("minimal_pairs", "cloze")
TAKES_SHOTS_FROM_FILES = ("multiple_choice", "cloze", "minimal_pairs")
TAKES_DELIMITER = ("multiple_choice", "cloze")
ROWS_FOR_SHOTS = 20
"""Rows that are put aside for shots where no other split has some."""
IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class BenchmarkTask(Config):
    """One benchmark: a built-in task, an lm-eval task by name, a file of questions, or a task in an lm-eval YAML.

    In YAML, built-in tasks and lm-eval's are given as plain strings: `tasks: [minimal_pairs, arc_easy]`.
    """

    name: str = Field(pattern=IDENTIFIER)
    """The name in results and the report. For kind lm_eval: the task or group as its YAML names it."""
    kind: Literal["project", "multiple_choice", "cloze", "minimal_pairs", "text", "lm_eval"] = "project"
    """multiple_choice: chooses one of several answers to the query. cloze: tests if the last word (or `continuation`)
    is the model's most likely one. minimal_pairs: tests if the good sentence is the more likely one. text: bits per
    byte and perplexity of complete documents, overall and by `domain`. lm_eval: defined by its YAML; without `path` it
    is lm-eval's own task of this name, with data from `tasks_mirror`."""
    path: SourcePath | None = None
    """A file of rows: JSON Lines, a JSON list, Parquet, Arrow, CSV or TSV, or the folder of a Hugging Face dataset, of
    which the split test (or validation) is read. Lists in CSV cells are JSON. For kind lm_eval a YAML file or a
    folder of them."""
    query: FieldName = "query"
    """multiple_choice: the field that holds the question."""
    choices: FieldName = "choices"
    """multiple_choice: the field that holds the list of answers."""
    gold: FieldName = "gold"
    """multiple_choice: the field that holds the index of the right answer, from 0."""
    query_suffix: str = "\nAnswer:"
    """multiple_choice: text between query and answer (llm-foundry's gauntlet: a new line and `Answer:`)."""
    delimiter: str | None = None
    """multiple_choice, cloze: text between query or context and each answer. By default a space, and none where the
    answer begins with one, where the query ends with white space or is code, and in scripts without spaces between
    words, such as Chinese, Japanese and Thai."""
    text: FieldName = "text"
    """cloze: the field that holds a passage whose last word must be predicted (LAMBADA, Paperno et al. 2016). text: the
    document."""
    domain: FieldName = "domain"
    """Field with the kind of text of a document, if there is one; for kind text."""
    context: FieldName = "context"
    """cloze: the field that holds the context, in files that separate it from the `continuation`."""
    continuation: FieldName = "continuation"
    """cloze: the field that holds the text that must follow the context."""
    good: FieldName = "good"
    """minimal_pairs: the field that holds the acceptable sentence (sentence_good in BLiMP, Warstadt et al. 2020)."""
    bad: FieldName = "bad"
    """minimal_pairs: the field that holds the unacceptable sentence."""
    shots_path: SourcePath | None = None
    """multiple_choice, cloze, minimal_pairs: a file with the same fields, from which few-shot examples are drawn; rows
    that are also scored are left out. By default, rows of `path` are reserved for them (`rows_for_shots`)."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> BenchmarkTask:
        if self.shots_path and self.kind not in TAKES_SHOTS_FROM_FILES:
            raise ValueError(f"shots_path is for tasks of the kinds {', '.join(TAKES_SHOTS_FROM_FILES)}")
        if self.delimiter is not None and self.kind not in TAKES_DELIMITER:
            raise ValueError(
                f"delimiter is for tasks of the kinds {' and '.join(TAKES_DELIMITER)}; a YAML of lm-eval's kind has "
                "target_delimiter"
            )
        if self.kind == "project":
            if self.name not in PROJECT_TASKS:
                raise ValueError(
                    f"{self.name!r} is not a built-in task; expected {' or '.join(PROJECT_TASKS)}, "
                    "or a task with `kind` and `path`"
                )
            if self.path is not None:
                raise ValueError(
                    "a task with `path` needs `kind`: multiple_choice, cloze, minimal_pairs, text or lm_eval"
                )
        elif self.path is None and self.kind != "lm_eval":
            raise ValueError(f"a task of kind {self.kind} needs `path`")
        elif self.path is None:
            from evaluation.config.lm_tasks import known_tasks, unknown_name

            if self.name not in known_tasks():
                raise ValueError(f"lm-eval has no task {self.name!r}; {unknown_name(self.name, PROJECT_TASKS)}")
        return self

    @property
    def built_in(self) -> bool:
        """True if it is one of lm-eval's own, whose data are in a mirror."""
        return self.kind == "lm_eval" and self.path is None

    @property
    def puts_rows_aside(self) -> bool:
        """True if its shots are rows of the file that is scored."""
        return self.shots_path is None and self.kind in ("project", *TAKES_SHOTS_FROM_FILES)


def _as_task(task: Any) -> Any:
    if not isinstance(task, str):
        return task
    return {"name": task} if task in PROJECT_TASKS else {"name": task, "kind": "lm_eval"}


TaskByName = Annotated[
    BenchmarkTask, BeforeValidator(_as_task, json_schema_input_type=ProjectTask | str | BenchmarkTask)
]


FailureClassName = Literal[
    "arithmetic_digits", "arithmetic_words", "copying", "negation", "number_agreement", "ordering"
]
FAILURE_CLASSES: tuple[FailureClassName, ...] = (
    "arithmetic_digits", "arithmetic_words", "copying", "negation", "number_agreement", "ordering",
)  # fmt: skip
FAILURE_CLASSES_DIR = DATA_DIR.parents[1] / "configs" / "failure_classes"


class FailureClassesConfig(Config):
    """Templated tests by class of failure, as CheckList's (Ribeiro et al. 2020)."""

    classes: tuple[FailureClassName, ...] = FAILURE_CLASSES
    """Names of classes in configs/failure_classes; [] for none."""
    files: tuple[SourcePath, ...] = ()
    """Custom classes: YAML files like those in configs/failure_classes."""
    cases: int = Field(30, ge=1)
    """Number of cases drawn per templated test."""
    by: Literal["likelihood", "answer"] = "likelihood"
    """likelihood: the most likely of the choices, which suits small models too. answer: the model's greedy answer;
    directional tests always use likelihoods."""
    max_new_tokens: int = Field(12, ge=1)
    """by: answer: maximum length of an answer, in tokens."""
    batch_size: int = outside_identity(32, ge=1)
    """Requests per forward pass."""

    @model_validator(mode="after")
    def _has_classes(self) -> FailureClassesConfig:
        if not self.classes and not self.files:
            raise ValueError("expected at least one of `classes` or `files`")
        names = [path.stem for path in self.paths()]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"each class needs a unique name; given twice: {', '.join(repeated)}")
        return self

    def paths(self) -> list[Path]:
        """The YAML files of all classes."""
        return [*(FAILURE_CLASSES_DIR / f"{name}.yaml" for name in self.classes), *map(Path, self.files)]


ANSWER_FAULTS = ("failed", "truncated", "empty", "unparsable")


class AnswerLimits(Config):
    """Maximum share of each task's items, from 0 to 1, that may lack a proper answer; above it the stage fails.

    These counts are reported with each score, whatever the limits.
    """

    failed: float = Field(0.0, ge=0, le=1)
    """Items without an answer, or with a likelihood that is not a finite number."""
    truncated: float = Field(1.0, ge=0, le=1)
    """Items whose prompt does not fit the context, or whose answer was cut off at its length limit. A base model seldom
    ends an answer by itself, so that all are allowed by default."""
    empty: float = Field(1.0, ge=0, le=1)
    """Written answers without any text."""
    unparsable: float = Field(1.0, ge=0, le=1)
    """Written answers in which the task's filter, such as a regular expression, finds nothing."""


class BenchmarksConfig(StageConfig):
    tasks: tuple[TaskByName, ...] = Field(
        (BenchmarkTask(name="minimal_pairs"), BenchmarkTask(name="cloze")), min_length=1
    )
    """Built-in and lm-eval tasks by name, or custom tasks by file."""
    tasks_mirror: SourcePath | None = None
    """The folder with the data of lm-eval's own tasks, as `stemma mirror TASK FROM --mirror DIR` fills it."""
    failure_classes: FailureClassesConfig | None = None
    """Templated tests of common failures: `{}` for all built-in classes, `{classes: [negation], files: [mine.yaml]}`
    for some of them and custom ones; none by default."""
    num_fewshot: int = Field(0, ge=0, le=64)
    """Number of few-shot examples before each question, drawn from rows that are not scored. 0 is zero-shot; one of
    lm-eval's own tasks then keeps the number in its YAML."""
    shots: tuple[Annotated[int, Field(ge=0, le=64)], ...] = ()
    """Several numbers of shots, e.g. [0, 1, 5]: each task is also scored with each, in a separate table."""
    rows_for_shots: int | None = Field(None, ge=1)
    """Rows of built-in tasks and of files that are reserved for few-shot examples, evenly over each file and at most a
    fourth of it. They are never scored, not even with 0 shots, so that all numbers of shots score the same rows. By
    default 20 or the largest number of shots; none without shots."""
    chat_template: bool = False
    """Ask questions in each model's own chat template, as lm-eval's `--apply_chat_template` does. Failure classes are
    asked without it."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of variables of the models' own chat templates, such as `enable_thinking: false` of Qwen3 and SmolLM3;
    needs `chat_template`. One that a template does not read is refused."""
    system_instruction: str | None = None
    """Text before each question; with `chat_template` that of the system's message, as lm-eval's
    `--system_instruction`. For a template that rejects such a message it is left out, as in lm-eval."""
    fewshot_as_multiturn: bool | None = None
    """Pass few-shot examples as turns of the chat; by default with `chat_template`, as on lm-eval's command line."""
    tuned_on: tuple[str, ...] = outside_identity(())
    """Names of the tasks whose kind instruction tuning has seen. The report then compares the others with them, model
    by model and by number of shots, in one table: the effect of tuning on some kinds of tasks on kinds that it never
    saw (Wei et al. 2022, "FLAN"; Sanh et al. 2022, "T0"). This only labels the tasks: keep the other kinds out of the
    instructions."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of items per task; null: all."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Level of the intervals, from the analytic standard error; 0.95 is 95 %."""
    seed: Seed = 17
    """Seed for drawing few-shot examples."""
    batch_size: int = outside_identity(32, ge=1)
    """Requests per forward pass."""
    answer_limits: AnswerLimits = AnswerLimits()
    """Share of items that may fail, or be truncated, empty or unparsable, before the stage fails."""
    engine: Literal["own", "vllm"] = "own"
    """Engine that answers the tasks: own is the built-in engine, vllm a vLLM server configured in `launch.vllm`, whose
    results differ by rounding. Failure classes always use own."""

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: tuple[BenchmarkTask, ...]) -> tuple[BenchmarkTask, ...]:
        names = [task.name for task in tasks]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"each task needs a unique name; given twice: {', '.join(repeated)}")
        return tasks

    @model_validator(mode="after")
    def _rows_for_shots_where_asked(self) -> BenchmarksConfig:
        """Fill in the number of rows for shots only if shots are requested, so that it affects the identity only
        then."""
        if self.rows_for_shots is None and self.most_shots and any(task.puts_rows_aside for task in self.tasks):
            object.__setattr__(self, "rows_for_shots", max(ROWS_FOR_SHOTS, self.most_shots))
        return self

    @property
    def most_shots(self) -> int:
        return max(self.num_fewshot, *self.shots, 0)

    @model_validator(mode="after")
    def _turns_of_a_chat(self) -> BenchmarksConfig:
        if self.fewshot_as_multiturn and not self.chat_template:
            raise ValueError("fewshot_as_multiturn: expected `chat_template: true`, since only a chat has turns")
        if self.chat_template_kwargs and not self.chat_template:
            raise ValueError("chat_template_kwargs: expected `chat_template: true` too, whose variables it sets")
        return self

    @model_validator(mode="after")
    def _tuned_on_tasks(self) -> BenchmarksConfig:
        if unknown := sorted(set(self.tuned_on) - {task.name for task in self.tasks}):
            raise ValueError(f"tuned_on: expected names of tasks, not {', '.join(unknown)}")
        return self

    @model_validator(mode="after")
    def _mirror_where_needed(self) -> BenchmarksConfig:
        built_in = [task.name for task in self.tasks if task.built_in]
        if built_in and self.tasks_mirror is None:
            raise ValueError(
                f"{', '.join(built_in)}: expected minimal_pairs or cloze; tasks of lm-eval's own need "
                "`tasks_mirror`, the "
                "folder with their data"
            )
        return self

    def sources(self) -> list[Source]:
        """The files of every task: what its `path` names, the data files that a YAML of lm-eval's kind names, and those
        of the mirror."""
        sources = []
        for index, task in enumerate(self.tasks):
            key = f"benchmarks.tasks.{index}.path"
            if task.built_in:
                mirror = Path(str(self.tasks_mirror))
                files, fix = mirrored_files(mirror, task.name), how_to_mirror(task.name, mirror)
                sources.append(Source(f"benchmarks.tasks.{index}", files, fix=fix))
            elif task.kind == "project":
                sources.append(Source(key, (DATA_DIR / f"{task.name}.jsonl",)))
            elif task.kind == "lm_eval":
                sources.append(Source(key, lm_eval_files(Path(str(task.path)))))
            else:
                sources.append(Source(key, expand([str(task.path)])))
            if task.shots_path and self.most_shots:
                sources.append(Source(f"benchmarks.tasks.{index}.shots_path", (Path(task.shots_path),)))
        if self.failure_classes:
            sources.append(Source("benchmarks.failure_classes", tuple(self.failure_classes.paths())))
        return sources
