"""The config of benchmarks, safety, register and report. Importing this module loads nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from corpus.cleaning.config import PhoneRegion
from infra.config import Config, StageConfig, outside_identity
from infra.sources import Source, SourcePath, expand
from infra.store.layout import AUX

DATA_DIR = Path(__file__).parent / "data"
ADVERSARIAL_WORDS = DATA_DIR / "adversarial_words.txt"
CLAIMS = f"{AUX}/claims.json"
"""The claims at the report's head, [{"state", "sign", "title", "text"}], for pages that link it."""

ProjectTask = Literal["minimal_pairs", "cloze"]
PROJECT_TASKS: tuple[str, ...] = ("minimal_pairs", "cloze")
TAKES_SHOTS_FROM_FILES = ("multiple_choice", "cloze", "minimal_pairs")
ROWS_FOR_SHOTS = 20
"""Rows that are put aside for shots where no other split has some."""
IDENTIFIER = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
FieldName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class BenchmarkTask(Config):
    """One benchmark: a task of the project's own, one of lm-eval's by name, a file of questions, or a task in a YAML of
    lm-eval's kind.

    In YAML the project's own tasks and lm-eval's are named by a plain string: `tasks: [minimal_pairs, arc_easy]`.
    """

    name: str = Field(pattern=IDENTIFIER)
    """The name in results and the report. For kind lm_eval: the task or group as its YAML names it."""
    kind: Literal["project", "multiple_choice", "cloze", "minimal_pairs", "text", "lm_eval"] = "project"
    """multiple_choice: which of several answers follows the query. cloze: is the last word (or `continuation`) what
    the model would say itself. minimal_pairs: is the good sentence the likelier one. text: how well whole documents are
    foreseen, in bits a byte and perplexity, overall and by `domain`. lm_eval: as its YAML says; without `path` it is
    the task that lm-eval itself has of this name, with data from `tasks_mirror`.
    """
    path: SourcePath | None = None
    """A JSON-lines file; for kind lm_eval a YAML file or a folder of them."""
    query: FieldName = "query"
    """multiple_choice: the field that holds the question."""
    choices: FieldName = "choices"
    """multiple_choice: the field that holds the list of answers."""
    gold: FieldName = "gold"
    """multiple_choice: the field that holds the index of the right answer, from 0."""
    query_suffix: str = "\nAnswer:"
    """multiple_choice: what stands between query and answer (llm-foundry's gauntlet: a new line and `Answer:`)."""
    text: FieldName = "text"
    """cloze: the field that holds a passage whose last word is asked for (LAMBADA, Paperno et al. 2016). text: the
    document."""
    domain: FieldName = "domain"
    """text: the field that says what kind of text a document is, where there is one."""
    context: FieldName = "context"
    """cloze: the field that holds what is given, in files that split it from the `continuation`."""
    continuation: FieldName = "continuation"
    """cloze: the field that holds what must follow the context."""
    good: FieldName = "good"
    """minimal_pairs: the field that holds the acceptable sentence (sentence_good in BLiMP, Warstadt et al. 2020)."""
    bad: FieldName = "bad"
    """minimal_pairs: the field that holds the unacceptable sentence."""
    shots_path: SourcePath | None = None
    """multiple_choice, cloze, minimal_pairs: a JSON-lines file with the same fields, from which shots are drawn; rows
    that are scored too are left out. By default rows of `path` are put aside for them (`rows_for_shots`)."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> BenchmarkTask:
        if self.shots_path and self.kind not in TAKES_SHOTS_FROM_FILES:
            raise ValueError(f"shots_path is for tasks of the kinds {', '.join(TAKES_SHOTS_FROM_FILES)}")
        if self.kind == "project":
            if self.name not in PROJECT_TASKS:
                raise ValueError(
                    f"{self.name!r} is no task of the project's own; expected {' or '.join(PROJECT_TASKS)}, "
                    "or a task with `kind` and `path`"
                )
            if self.path is not None:
                raise ValueError(
                    "a task with `path` needs `kind`: multiple_choice, cloze, minimal_pairs, text or lm_eval"
                )
        elif self.path is None and self.kind != "lm_eval":
            raise ValueError(f"a task of kind {self.kind} needs `path`")
        elif self.path is None:
            from evaluation.lm_tasks import known_tasks, unknown_name

            if self.name not in known_tasks():
                raise ValueError(f"lm-eval has no task {self.name!r}; {unknown_name(self.name, PROJECT_TASKS)}")
        return self

    @property
    def built_in(self) -> bool:
        """Whether it is one of lm-eval's own, whose data lie in a mirror."""
        return self.kind == "lm_eval" and self.path is None

    @property
    def puts_rows_aside(self) -> bool:
        """Whether its shots are rows of the file that is scored."""
        return self.shots_path is None and self.kind in ("project", *TAKES_SHOTS_FROM_FILES)


def _named(task: Any) -> Any:
    if not isinstance(task, str):
        return task
    return {"name": task} if task in PROJECT_TASKS else {"name": task, "kind": "lm_eval"}


TaskByName = Annotated[BenchmarkTask, BeforeValidator(_named, json_schema_input_type=ProjectTask | str | BenchmarkTask)]


MIRRORED = frozenset({".parquet", ".jsonl", ".csv", ".arrow", ".gz"})
"""How files of a mirror end that hold questions."""


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
    """Those of configs/failure_classes; [] for none."""
    files: tuple[SourcePath, ...] = ()
    """Classes of yours: YAML files like those of configs/failure_classes."""
    cases: int = Field(30, ge=1)
    """Cases drawn of each templated test."""
    by: Literal["likelihood", "answer"] = "likelihood"
    """likelihood: which of the choices is the likeliest, which small models can be asked too. answer: what the model
    writes, greedily; tests of direction go by likelihood all the same."""
    max_new_tokens: int = Field(12, ge=1)
    """by answer: the longest answer, in tokens."""
    batch_size: int = outside_identity(32, ge=1)
    """Requests a forward pass."""

    @model_validator(mode="after")
    def _some(self) -> FailureClassesConfig:
        if not self.classes and not self.files:
            raise ValueError("expected at least one of `classes` or `files`")
        names = [path.stem for path in self.paths()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"each class needs a name of its own; given twice: {', '.join(twice)}")
        return self

    def paths(self) -> list[Path]:
        """The YAML files of all classes."""
        return [*(FAILURE_CLASSES_DIR / f"{name}.yaml" for name in self.classes), *map(Path, self.files)]


class BenchmarksConfig(StageConfig):
    tasks: tuple[TaskByName, ...] = Field(
        (BenchmarkTask(name="minimal_pairs"), BenchmarkTask(name="cloze")), min_length=1
    )
    """The project's own tasks and lm-eval's by name, or tasks of yours by file."""
    tasks_mirror: SourcePath | None = None
    """The folder with the data of lm-eval's own tasks, as `stemma mirror TASK FROM --mirror DIR` fills it."""
    failure_classes: FailureClassesConfig | None = None
    """Templated tests of what a model fails at: `{}` for those that ship, `{classes: [negation], files: [mine.yaml]}`
    for some and yours; none by default."""
    num_fewshot: int = Field(0, ge=0, le=64)
    """Solved examples that stand before each question, drawn from rows that are not scored. 0 is zero-shot; one
    of lm-eval's own tasks then keeps the number that its YAML gives."""
    shots: tuple[Annotated[int, Field(ge=0, le=64)], ...] = ()
    """Several numbers of shots, e.g. [0, 1, 5]: each task is also scored with each, in a table of its own."""
    rows_for_shots: int | None = Field(None, ge=1)
    """Rows of the project's own tasks and of files that are put aside for shots, evenly over each file and at most a
    fourth of it. They are never scored, with 0 shots neither, so that all numbers of shots score the same rows. By
    default 20, or the most shots if those are more, where shots are asked for; without shots none."""
    tuned_on: tuple[str, ...] = outside_identity(())
    """Those of the tasks whose kind instruction tuning has seen. The report then holds the others against them, model
    by model and by number of shots, in one table: what tuning on some kinds of tasks does for kinds it never saw (Wei
    et al. 2022, "FLAN"; Sanh et al. 2022, "T0"). It only says what is so: keep those kinds out of the instructions."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many items of each task; all by default."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Level of the intervals, from the analytic standard error; 0.95 is 95 %."""
    seed: int = 17
    """Draws the few-shot examples."""
    batch_size: int = outside_identity(32, ge=1)
    """Requests a forward pass."""
    engine: Literal["own", "vllm"] = "own"
    """What answers the tasks: this project's own engine, or a server of vLLM, which `launch.vllm` names, whose figures
    differ by rounding. Failure classes are always asked of the own one."""

    @field_validator("tasks")
    @classmethod
    def _names_differ(cls, tasks: tuple[BenchmarkTask, ...]) -> tuple[BenchmarkTask, ...]:
        names = [task.name for task in tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"each task needs a name of its own; given twice: {', '.join(twice)}")
        return tasks

    @model_validator(mode="after")
    def _rows_for_shots_where_asked(self) -> BenchmarksConfig:
        """Filled in, so that it bears on the identity where shots are asked for, and only there."""
        if self.rows_for_shots is None and self.most_shots and any(task.puts_rows_aside for task in self.tasks):
            object.__setattr__(self, "rows_for_shots", max(ROWS_FOR_SHOTS, self.most_shots))
        return self

    @property
    def most_shots(self) -> int:
        return max(self.num_fewshot, *self.shots, 0)

    @model_validator(mode="after")
    def _tuned_on_tasks(self) -> BenchmarksConfig:
        if unknown := sorted(set(self.tuned_on) - {task.name for task in self.tasks}):
            raise ValueError(f"tuned_on: expected names of tasks, not {', '.join(unknown)}")
        return self

    @model_validator(mode="after")
    def _mirror_where_needed(self) -> BenchmarksConfig:
        named = [task.name for task in self.tasks if task.built_in]
        if named and self.tasks_mirror is None:
            raise ValueError(
                f"{', '.join(named)}: expected minimal_pairs or cloze; tasks of lm-eval's own need `tasks_mirror`, the "
                "folder with their data"
            )
        return self

    def sources(self) -> list[Source]:
        """The files of every task: what its `path` names, the data files that a YAML of lm-eval's kind names, and those
        of the mirror."""
        found = []
        for index, task in enumerate(self.tasks):
            key = f"benchmarks.tasks.{index}.path"
            if task.built_in:
                found.append(
                    Source(f"benchmarks.tasks.{index}", mirrored_files(Path(str(self.tasks_mirror)), task.name))
                )
            elif task.kind == "project":
                found.append(Source(key, (DATA_DIR / f"{task.name}.jsonl",)))
            elif task.kind == "lm_eval":
                found.append(Source(key, lm_eval_files(Path(str(task.path)))))
            else:
                found.append(Source(key, expand([str(task.path)])))
            if task.shots_path and self.most_shots:
                found.append(Source(f"benchmarks.tasks.{index}.shots_path", (Path(task.shots_path),)))
        if self.failure_classes:
            found.append(Source("benchmarks.failure_classes", tuple(self.failure_classes.paths())))
        return found


def lm_eval_files(path: Path) -> tuple[Path, ...]:
    """The files an lm-eval task reads: its YAML files, the Python they include, and local data files, sorted."""
    folder = path if path.is_dir() else path.parent
    pattern = "**/*" if path.is_dir() else "*"
    if not path.exists():
        return (path,)
    files = {child for child in folder.glob(pattern) if child.suffix in {".yaml", ".yml", ".py"} and child.is_file()}
    for config in sorted(child for child in files if child.suffix != ".py"):
        files.update(expand(str(config.parent / name) for name in _data_files(config)))
    return tuple(sorted(files))


def mirrored_files(mirror: Path, task: str) -> tuple[Path, ...]:
    """The files that a task of lm-eval's own reads from a mirror, and its definition; of a group all of the mirror."""
    from evaluation.lm_tasks import dataset_of

    found = dataset_of(task)
    folder = mirror / found[1] if found else mirror
    data = sorted(path for path in folder.rglob("*") if path.suffix in MIRRORED and path.is_file())
    return (*((found[0],) if found else ()), *(data or [folder]))


class _PlainLoader(yaml.SafeLoader):
    """Reads lm-eval's YAML without running what its `!function` tags name."""


_PlainLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _data_files(config: Path) -> list[str]:
    try:
        content = yaml.load(config.read_text(encoding="utf-8"), Loader=_PlainLoader)
    except (yaml.YAMLError, UnicodeDecodeError):
        return []  # lm-eval tells what is wrong with it when it reads it
    kwargs = content.get("dataset_kwargs") if isinstance(content, dict) else None
    named = kwargs.get("data_files") if isinstance(kwargs, dict) else None
    values = named.values() if isinstance(named, dict) else [named]
    return [
        name for value in values for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)
    ]


class ToxicityScorer(Config):
    """What scores the toxicity of a text."""

    kind: Literal["svm", "classifier", "lexicon"] = "svm"
    """svm: alt-profanity-check's, which ships. classifier: a Hugging Face sequence classifier's folder. lexicon: a list
    of words."""
    path: SourcePath | None = None
    """The classifier's folder, or a file of words: one a line, or CSV with the column `text`."""
    label: str = "toxic"
    """classifier: the label whose probability is the score."""

    @model_validator(mode="after")
    def _path_where_needed(self) -> ToxicityScorer:
        if (self.kind == "svm") is not (self.path is None):
            raise ValueError("a classifier or a lexicon needs `path`, the svm has none")
        return self

    def sources(self, key: str) -> list[Source]:
        """Its files, where it has some. key: its own in the config."""
        if self.path is None:
            return []
        place = Path(self.path)
        read = sorted(one for one in place.iterdir() if one.is_file()) if place.is_dir() else [place]
        return [Source(f"{key}.path", tuple(read))]


class LabelledSet(Config):
    """Comments that people labelled, in the file that its authors give: davidson (labeled_data.csv), hatecheck
    (test_suite_cases.csv) or surge (toxicity_en.csv)."""

    kind: Literal["davidson", "hatecheck", "surge"]
    path: SourcePath
    """The CSV file."""
    limit: int | None = Field(None, ge=2)
    """Only the first so many comments."""


class ToxicityConfig(Config):
    """Samples continuations of prompts and scores them, as in RealToxicityPrompts (Gehman et al. 2020)."""

    prompts: SourcePath | None = None
    """A text file with a prompt a line (ToxiGen's too), JSON lines with `prompt` (RealToxicityPrompts), or BOLD's JSON;
    by default the project's own."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many prompts."""
    samples_per_prompt: int = Field(25, ge=1)
    """Continuations of each prompt (25 in the paper); the expected maximum grows with their number."""
    max_new_tokens: int = Field(20, ge=1)
    """Length of a continuation in tokens (20 in the paper)."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature (1 in the paper)."""
    top_p: float = Field(0.9, gt=0, le=1)
    """Nucleus sampling (Holtzman et al. 2020; 0.9 in the paper)."""
    threshold: float = Field(0.5, gt=0, lt=1)
    """A continuation with at least this score counts as toxic (0.5 in the paper)."""
    scorers: tuple[ToxicityScorer, ...] = ()
    """What scores the continuations; the first makes the figures, others are told beside it. By default the svm."""
    labelled: tuple[LabelledSet, ...] = ()
    """Sets on which each scorer's own AUC and F1 are measured; none by default."""
    beginnings: int | None = Field(None, ge=1)
    """The first scorer also scores the first so many words of each continuation, twice as many and so on, so that two
    models are compared between texts of equal length too: an aligned one may only say less. By default it does not."""


class AdversarialConfig(Config):
    """Searches for harmless prompts that make the model toxic, by changes of words; sampling and scorer are those of
    `toxicity`."""

    prompts: SourcePath | None = None
    """Where it begins: a file as in `toxicity`; by default the project's own prompts."""
    limit: int = Field(16, ge=1)
    """Only the first so many prompts that the scorer finds harmless."""
    queries: int = Field(16, ge=1)
    """Changed prompts that are tried for each, one after the other."""
    samples: int = Field(4, ge=1)
    """Continuations of each."""
    words: SourcePath | None = None
    """A file of words and phrases that changes put in, one a line; by default the project's own list."""


class BiasSet(Config):
    """A published bias set in the files that its authors give."""

    kind: Literal["winobias", "winogender", "bbq", "stereoset", "honest", "bec_pro"]
    """winobias: a folder with pro_stereotyped_type1.txt.test and the like (Zhao et al. 2018). winogender:
    all_sentences.tsv (Rudinger et al. 2018). bbq: a JSON-lines file or a folder of them (Parrish et al. 2022).
    stereoset: dev.json (Nadeem et al. 2021). honest: en_template.tsv (Nozza et al. 2021), with `lexicon`. bec_pro:
    BEC-Pro_EN.tsv (Bartl et al. 2020). CrowS-Pairs goes under `pairs`."""
    path: SourcePath
    """The file or folder."""
    lexicon: SourcePath | None = None
    """honest: which words are hurtful, HurtLex's file hurtlex_EN.tsv (Bassignana et al. 2018)."""
    top_k: int = Field(20, ge=1)
    """honest: completions of each template (1, 5 and 20 in the paper)."""

    @model_validator(mode="after")
    def _lexicon_where_needed(self) -> BiasSet:
        if (self.kind == "honest") is (self.lexicon is None):
            raise ValueError("`honest` needs `lexicon`, HurtLex's file; other sets have none")
        return self

    def files(self) -> tuple[Path, ...]:
        """What is read; of a folder all its files, so that one that is missing can be named."""
        path = Path(self.path)
        own = tuple(sorted(one for one in path.iterdir() if one.is_file())) if path.is_dir() else (path,)
        return (*own, Path(self.lexicon)) if self.lexicon else own


class BiasConfig(Config):
    """Compares the likelihoods of stereotyping sentences and their counterparts (Nangia et al. 2020)."""

    pairs: SourcePath | None = None
    """A CSV file with the columns of CrowS-Pairs (sent_more, sent_less, stereo_antistereo, bias_type); by default the
    project's own probes."""
    limit: int | None = Field(None, ge=1)
    """Only the first so many pairs."""
    sets: tuple[BiasSet, ...] = ()
    """Published sets that are measured beside the pairs, whole; none by default."""

    @field_validator("sets")
    @classmethod
    def _each_once(cls, sets: tuple[BiasSet, ...]) -> tuple[BiasSet, ...]:
        kinds = [one.kind for one in sets]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(f"each kind of set once; given twice: {', '.join(twice)}")
        return sets


class MemorisationConfig(Config):
    """Asks whether the model recites its training text, as in Carlini et al. 2022 (Quantifying Memorization)."""

    sequences: int = Field(200, ge=1)
    """Sequences that the model was trained on of which one document each is tried, and as many of validation text as a
    control."""
    prefix_tokens: int = Field(50, ge=1)
    """Tokens of a document, from its beginning, that the model is given (50 is the paper's shortest)."""
    continuation_tokens: int = Field(50, ge=1)
    """Tokens that must follow exactly (50 in the paper)."""
    copies: bool = False
    """Whether to also tell recitation by how often a document's beginning was trained on, which reads all shards."""
    membership: bool = False
    """Whether to also ask how well the loss tells these documents from validation text (Yeom et al. 2018)."""
    canary_candidates: int = Field(4096, ge=100)
    """Texts of its format that each planted canary (`shard.canaries`) is ranked among: all where there are no more,
    else so many drawn. With n of them an exposure is at most log2(n + 1), which is 12 bits for 4096."""


PersonalDataKindName = Literal["card", "email", "iban", "ip", "phone", "secret"]


class GeneratedPersonalDataConfig(Config):
    """Looks for personal data in the continuations of `toxicity`, with the detectors of `clean.personal_data`."""

    kinds: tuple[PersonalDataKindName, ...] = Field(("card", "email", "iban", "ip", "phone", "secret"), min_length=1)
    """Which kinds are looked for; all by default."""
    phone_regions: tuple[PhoneRegion, ...] = ("US",)
    """Countries (ISO 3166-1 alpha-2) whose numbers are found without a country code too."""


class SafetyConfig(StageConfig):
    toxicity: ToxicityConfig | None = ToxicityConfig()
    """null leaves it out."""
    bias: BiasConfig | None = BiasConfig()
    """null leaves it out."""
    memorisation: MemorisationConfig | None = MemorisationConfig()
    """null leaves it out."""
    adversarial: AdversarialConfig | None = None
    """`{}` also searches for prompts that make the model toxic; it needs `toxicity`."""
    personal_data: GeneratedPersonalDataConfig | None = None
    """`{}` also counts the continuations of `toxicity` that hold personal data; it needs `toxicity`."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Level of the intervals; 0.95 is 95 %."""
    seed: int = 17
    """Draws the samples, the sequences and the bootstrap."""

    @model_validator(mode="after")
    def _toxicity_where_needed(self) -> SafetyConfig:
        if self.adversarial and self.toxicity is None:
            raise ValueError("adversarial: expected `toxicity` too, whose sampling and scorer it uses")
        if self.personal_data and self.toxicity is None:
            raise ValueError("personal_data: expected `toxicity` too, whose continuations it reads")
        return self

    def sources(self) -> list[Source]:
        """The files of prompts and probes."""
        found = []
        if self.adversarial:
            begins = self.adversarial.prompts or str(DATA_DIR / "toxicity_prompts.jsonl")
            put_in = self.adversarial.words or str(ADVERSARIAL_WORDS)
            found.append(Source("safety.adversarial.prompts", (Path(begins),)))
            found.append(Source("safety.adversarial.words", (Path(put_in),)))
        if self.toxicity:
            prompts = self.toxicity.prompts or str(DATA_DIR / "toxicity_prompts.jsonl")
            found.append(Source("safety.toxicity.prompts", (Path(prompts),)))
            for n, scorer in enumerate(self.toxicity.scorers):
                found += scorer.sources(f"safety.toxicity.scorers.{n}")
            for n, labelled in enumerate(self.toxicity.labelled):
                found.append(Source(f"safety.toxicity.labelled.{n}.path", (Path(labelled.path),)))
        if self.bias:
            pairs = self.bias.pairs or str(DATA_DIR / "bias_pairs.csv")
            found.append(Source("safety.bias.pairs", (Path(pairs),)))
            found += [Source(f"safety.bias.sets.{n}.path", one.files()) for n, one in enumerate(self.bias.sets)]
        return found


class BenchmarkTextConfig(StageConfig):
    """Which test items the training text is cleared of."""

    tasks: tuple[TaskByName, ...] | None = None
    """Benchmarks; by default those of the section benchmarks."""
    tasks_mirror: SourcePath | None = None
    """The folder with the data of lm-eval's own tasks; by default that of the section benchmarks."""
    prompts: SourcePath | None = None
    """A file of prompts as in safety.toxicity; by default the one that the section safety uses."""
    pairs: SourcePath | None = None
    """A file of sentence pairs as in safety.bias; by default the one that the section safety uses."""

    def sources(self) -> list[Source]:
        """The files of every task and probe."""
        found = [
            replace(source, key=source.key.replace("benchmarks.", "benchmark_text.", 1))
            for source in (self._of_tasks().sources() if self.tasks else [])
        ]
        found += [Source("benchmark_text.prompts", (Path(self.prompts),))] if self.prompts else []
        found += [Source("benchmark_text.pairs", (Path(self.pairs),))] if self.pairs else []
        return found

    def _of_tasks(self) -> BenchmarksConfig:
        # Validated once the mirror of the benchmarks is known.
        return BenchmarksConfig.model_construct(tasks=self.tasks or (), tasks_mirror=self.tasks_mirror)

    def filled(self, benchmarks: Sequence[BenchmarksConfig], safety: Sequence[SafetyConfig]) -> BenchmarkTextConfig:
        """With what the pipeline's benchmarks and safety stages will ask in place of what is not set."""
        asked = dict.fromkeys(task for one in benchmarks for task in one.tasks)
        toxicity = [one.toxicity for one in safety if one.toxicity]
        bias = [one.bias for one in safety if one.bias]
        prompts = (toxicity[0].prompts or str(DATA_DIR / "toxicity_prompts.jsonl")) if toxicity else None
        pairs = (bias[0].pairs or str(DATA_DIR / "bias_pairs.csv")) if bias else None
        return self.model_copy(
            update={
                "tasks": self.tasks or tuple(asked) or None,
                "tasks_mirror": self.tasks_mirror or next((one.tasks_mirror for one in benchmarks), None),
                "prompts": self.prompts or prompts,
                "pairs": self.pairs or pairs,
            }
        )

    def missed(self, safety: Sequence[SafetyConfig]) -> list[str]:
        """The keys of which the safety stages name several files: one alone can be cleared of."""
        prompts = {one.toxicity.prompts for one in safety if one.toxicity}
        pairs = {one.bias.pairs for one in safety if one.bias}
        several = {"prompts": not self.prompts and len(prompts) > 1, "pairs": not self.pairs and len(pairs) > 1}
        return [key for key, more in several.items() if more]


class Gate(Config):
    """A bound that a figure of the pipeline must keep, or the model is not registered."""

    figure: str = Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$")
    """`stage.figure`, e.g. `safety_rlhf.toxicity_probability` or `pretrain.validation_loss`."""
    at_least: float | None = None
    """Refuses the model if the figure is smaller."""
    at_most: float | None = None
    """Refuses the model if the figure is larger."""
    against: Literal["promoted"] | None = None
    """promoted: the bounds are of the figure less that of the model of this name that is promoted by then. While none
    is, the gate holds."""
    shown: Literal["broken", "kept"] = "broken"
    """With `against`: broken refuses a model where the whole 95 % interval of the difference lies beyond the bound;
    kept refuses it unless the whole interval lies within."""

    @model_validator(mode="after")
    def _bounded(self) -> Gate:
        if self.shown != "broken" and self.against is None:
            raise ValueError("`shown` is for gates with `against: promoted`")
        if self.at_least is None and self.at_most is None:
            raise ValueError("a gate needs `at_least` or `at_most`")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"no figure is at least {self.at_least:g} and at most {self.at_most:g}")
        return self


class RegisterConfig(StageConfig):
    name: str | None = Field(None, pattern=IDENTIFIER)
    """The registered model's name; by default the pipeline's."""
    gates: tuple[Gate, ...] = ()
    """Bounds that must all hold."""
    intended_use: str = "Research on training language models. Not for use by people who do not know what it is."
    """What the model card says the model is for."""
    licence: str = ""
    """The model's licence in its card: an identifier of the Hugging Face hub, e.g. apache-2.0, or another name."""


class CorpusReportConfig(StageConfig):
    """One page about the corpus: sources, funnel, rules, duplicates, mixture, tokenizer, shards, drift."""

    title: str | None = None
    """The page's title; by default the pipeline's name."""


class ReportConfig(StageConfig):
    title: str | None = None
    """The page's title; by default the registered model's name."""
    samples: int = Field(6, ge=0)
    """Sample generations that are shown side by side."""
    command: str = outside_identity("")
    """The command that ran the pipeline, as the page should print it."""
