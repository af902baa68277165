"""Messages of a pipeline that the relay delivers to MLflow: plain facts, one JSON object per message.

Times are seconds since the epoch. A `build_id` names one pipeline run or one build of one stage. The process that
starts it generates the id (`new_build_id`), and it is never reused.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

WHOLE_RUN = ("report.html", "aux/corpus_report.html", "MODEL_CARD.md")
"""Files of an artifact that describe the entire pipeline run, and are with its run in MLflow."""

Status = Literal["FINISHED", "FAILED", "KILLED"]


def new_build_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class InputMessage:
    """One artifact that a stage reads. name: what the stage calls it; stage: who made it; digest: of its payload."""

    name: str
    stage: str
    digest: str
    fingerprint: str


@dataclass(frozen=True)
class SourceFile:
    """One file, or one built-in source, from outside the store."""

    path: str
    digest: str


@dataclass(frozen=True)
class Output:
    """The artifact that a build made. path: its folder; kind: a model becomes a logged model, all else a dataset."""

    stage: str
    digest: str
    fingerprint: str
    path: str
    kind: Literal["dataset", "model"] = "dataset"


@dataclass(frozen=True)
class Message:
    """Base of all messages: `build_id` is that of its subject."""

    kind: ClassVar[str] = ""
    build_id: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **dataclasses.asdict(self)}


@dataclass(frozen=True)
class PipelineStarted(Message):
    """A pipeline run begins. config: the whole config, nested or flat; tags: anything else worth a tag; name: what the
    page calls it, instead of pipeline and time; parent_id: the sweep that it is a trial of."""

    kind = "pipeline_started"
    pipeline: str
    time: float
    config: Mapping[str, Any] = field(default_factory=dict)
    flow_run_id: str = ""
    flow_run_url: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    parent_id: str = ""


@dataclass(frozen=True)
class StageStarted(Message):
    """A build of one stage begins, within the pipeline run `parent_id`.

    config: all keys of the stage's config, nested or flat; inputs, sources: what it reads;
    commit, dirty, lock: the code and the hash of requirements.lock; flow_run_*: the Prefect run it belongs to.
    """

    kind = "stage_started"
    parent_id: str
    pipeline: str
    stage: str
    fingerprint: str
    time: float
    version: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[InputMessage, ...] = ()
    sources: tuple[SourceFile, ...] = ()
    commit: str = ""
    dirty: bool = False
    lock: str = ""
    host: str = ""
    device: str = ""
    flow_run_id: str = ""
    flow_run_url: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MetricsFile(Message):
    """File to which the build writes its metric lines (the format of infra/run.py); followed until the build ends."""

    kind = "metrics_file"
    path: str


@dataclass(frozen=True)
class StageFinished(Message):
    """A build ended.

    metrics: where all metric lines lie now (the artifact's aux/metrics.jsonl), if the file that was followed may be
    gone; artifacts: small files worth a look in the page (report.html, MODEL_CARD.md, …); error: one line; tags: what
    the build cost.
    """

    kind = "stage_finished"
    status: Status
    time: float
    figures: Mapping[str, float] = field(default_factory=dict)
    headline: str = ""
    output: Output | None = None
    metrics: str = ""
    artifacts: tuple[str, ...] = ()
    error: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageReused(Message):
    """The pipeline run `build_id` needed a stage and found its artifact, made by the build `built_by`."""

    kind = "stage_reused"
    stage: str
    fingerprint: str
    digest: str
    built_by: str = ""
    time: float = 0.0


@dataclass(frozen=True)
class PipelineFinished(Message):
    """figures: those by which runs are compared, of built and reused stages alike, as `step.figure`; artifacts: files
    that describe the entire run (WHOLE_RUN); tags: what the run cost."""

    kind = "pipeline_finished"
    status: Status
    time: float
    error: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunForgotten(Message):
    """A pipeline run is removed for good, with the builds of its stages: nothing that it built is in the store."""

    kind = "run_forgotten"


@dataclass(frozen=True)
class RegisterModel(Message):
    """The model that the build `build_id` left at the folder `path` becomes the next version of `name`.

    description: of the version, one line; card: the file of its model card, which goes below that.
    """

    kind = "register_model"
    name: str
    path: str
    digest: str
    time: float = 0.0
    description: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    card: str = ""


@dataclass(frozen=True)
class PromoteModel(Message):
    """The version of `name` whose files have this digest gets the alias `promoted`."""

    kind = "promote_model"
    name: str
    digest: str
    time: float = 0.0


_CLASSES: dict[str, type[Message]] = {
    cls.kind: cls
    for cls in (
        PipelineStarted,
        StageStarted,
        MetricsFile,
        StageFinished,
        StageReused,
        PipelineFinished,
        RunForgotten,
        RegisterModel,
        PromoteModel,
    )
}


def from_json(data: Mapping[str, Any]) -> Message:
    """The message behind `to_json`; keys that this version does not know are left out.

    Raises ValueError for a kind that does not exist, TypeError for a key that is missing.
    """
    try:
        cls = _CLASSES[data["kind"]]
    except KeyError:
        raise ValueError(f"unknown kind of message: {data.get('kind')!r}") from None
    field_names = {f.name for f in dataclasses.fields(cls)}
    values = {key: value for key, value in data.items() if key in field_names}
    if cls is StageStarted:
        values["inputs"] = tuple(InputMessage(**item) for item in values.get("inputs", ()))
        values["sources"] = tuple(SourceFile(**item) for item in values.get("sources", ()))
    elif cls is StageFinished:
        values["output"] = Output(**values["output"]) if values.get("output") else None
    if "artifacts" in values:
        values["artifacts"] = tuple(values["artifacts"])
    return cls(**values)
