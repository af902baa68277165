"""Trackers that get copies: W&B, Trackio, TensorBoard. Each is imported when its first build begins.

A build of a stage is one run of a tracker, of the group (W&B, Trackio) or folder (TensorBoard) of its pipeline run.
"""

from __future__ import annotations

import importlib
import json
import netrc
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WANDB_HOST = "api.wandb.ai"


@dataclass(frozen=True)
class TrackedBuild:
    """One build of a stage. settings: flat; offline: no connection to a service."""

    id: str
    run_id: str
    pipeline: str
    stage: str
    settings: Mapping[str, str]
    offline: bool = False


@dataclass(frozen=True)
class Value:
    """One point of a metric. time: seconds since the epoch."""

    name: str
    step: int
    value: float
    time: float


@dataclass(frozen=True)
class End:
    """The end of a build. figures: its results; links: what it made and where, by name."""

    status: str
    figures: Mapping[str, float]
    headline: str
    links: Mapping[str, str]
    time: float


class Tracker(ABC):
    """One build in a tracker. Constructed again for a build that goes on, it continues the same run."""

    @abstractmethod
    def __init__(self, build: TrackedBuild, folder: Path) -> None:
        """Begin or continue the run. folder: where the tracker keeps what it writes, in the store."""

    @abstractmethod
    def log(self, values: Sequence[Value]) -> None: ...

    @abstractmethod
    def finish(self, end: End) -> None: ...


class Wandb(Tracker):
    """A W&B run. Steps are a separate metric, since W&B drops points of a step before its last one."""

    def __init__(self, build: TrackedBuild, folder: Path) -> None:
        # Its own errors are not reported to its makers; the relay's standard streams stay the relay's.
        os.environ |= {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
        wandb: Any = importlib.import_module("wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._wandb = wandb
        self._run = wandb.init(
            project=build.pipeline,
            id=build.id,
            name=f"{build.stage} {build.run_id}",
            group=build.run_id,
            job_type=build.stage,
            config=dict(build.settings),
            dir=str(folder),
            mode="offline" if build.offline or not _has_wandb_key() else "online",
            resume="allow",
            reinit="create_new",
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Sequence[Value]) -> None:
        for step, figures in _by_step(values):
            self._run.log({"step": step, **figures})

    def finish(self, end: End) -> None:
        links = {f"link/{name}": link for name, link in end.links.items()}
        self._run.summary.update({**end.figures, "headline": end.headline, "status": end.status, **links})
        self._run.finish(exit_code=0 if end.status == "FINISHED" else 1)


class Trackio(Tracker):
    """A Trackio run, in a database below the store unless TRACKIO_DIR names another place."""

    def __init__(self, build: TrackedBuild, folder: Path) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project=build.pipeline,
            name=f"{build.stage} {build.run_id} {build.id[:8]}",
            group=build.run_id,
            config=dict(build.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, values: Sequence[Value]) -> None:
        for step, figures in _by_step(values):
            self._run.log(figures, step=step)

    def finish(self, end: End) -> None:
        links = {f"link/{name}": link for name, link in end.links.items()}
        self._run.log({**end.figures, "headline": end.headline, "status": end.status, **links})
        self._run.finish()


class TensorBoard(Tracker):
    """Event files, by the writer of the tensorboard package, which needs neither TensorFlow nor torch."""

    def __init__(self, build: TrackedBuild, folder: Path) -> None:
        event_file_writer: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        self._shapes: Any = importlib.import_module("tensorboard.compat.proto.tensor_shape_pb2")
        log_dir = folder / build.pipeline / build.run_id / build.stage
        is_new = not log_dir.is_dir()
        self._writer = event_file_writer.EventFileWriter(str(log_dir))
        if is_new:
            rows = "\n".join(f"| {key} | {value} |" for key, value in build.settings.items())
            self._text("settings", f"| key | value |\n|---|---|\n{rows}")

    def log(self, values: Sequence[Value]) -> None:
        for value in values:
            scalar = self._summaries.Summary.Value(tag=value.name, simple_value=value.value)
            self._add(scalar, value.step, value.time)
        self._writer.flush()

    def finish(self, end: End) -> None:
        for name, value in end.figures.items():
            self._add(self._summaries.Summary.Value(tag=name, simple_value=value), 0, end.time)
        links = "\n".join(f"- {name}: `{link}`" for name, link in end.links.items())
        self._text("result", f"{end.status}: {end.headline}\n\n{links}")
        self._writer.close()

    def _text(self, tag: str, text: str) -> None:
        data = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        tensor = self._tensors.TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=self._shapes.TensorShapeProto(dim=[self._shapes.TensorShapeProto.Dim(size=1)]),
        )
        metadata = self._summaries.SummaryMetadata(plugin_data=data)
        self._add(self._summaries.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor), 0, None)

    def _add(self, value: Any, step: int, time: float | None) -> None:
        summary = self._summaries.Summary(value=[value])
        at = {} if time is None else {"wall_time": time}
        self._writer.add_event(self._events.Event(step=step, summary=summary, **at))


TRACKERS: dict[str, type[Tracker]] = {"wandb": Wandb, "trackio": Trackio, "tensorboard": TensorBoard}


def _by_step(values: Sequence[Value]) -> list[tuple[int, dict[str, float]]]:
    """Return the figures of each step; a figure that comes again begins a further entry."""
    steps: list[tuple[int, dict[str, float]]] = []
    for value in values:
        if not steps or steps[-1][0] != value.step or value.name in steps[-1][1]:
            steps.append((value.step, {}))
        steps[-1][1][value.name] = value.value
    return steps


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(WANDB_HOST) is not None
    return False


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return settings by dotted key, as texts."""
    flat: dict[str, str] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, item in value.items():
                add(f"{prefix}.{key}" if prefix else str(key), item)
        elif prefix:
            flat[prefix] = value if isinstance(value, str) else json.dumps(value)

    add("", config)
    return flat
