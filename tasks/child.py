"""The process of one stage: builds it once, in a session of its own, and says how it ended in a file.

    python -m tasks.child JOB.json

Its own process, because a stage owns torch's threads and random state, may be killed as a whole, and gives back its
memory. It ends with its whole process group as soon as whoever started it is gone.
"""

from __future__ import annotations

import importlib
import json
import platform
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra.errors import Problem, StageError, StemmaError
from infra.launch.config import LaunchConfig
from infra.process import hold_lifeline
from infra.run import Result, Run, open_journal
from infra.store.store import disk_error

JOURNAL = "journal.jsonl"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Job:
    """What the child is to do. All paths are absolute; `inputs` are finished artifacts, `out` is empty."""

    node: str
    stage: str
    config: dict[str, Any]
    launch: dict[str, Any]
    inputs: dict[str, str]
    out: str
    scratch: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf8")

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text(encoding="utf8")))


@dataclass(frozen=True)
class Outcome:
    """How the child ended; `status` is built or one of the words of `infra.errors`."""

    status: str
    figures: dict[str, float]
    headline: str
    problems: list[dict[str, str]]
    device: str = ""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf8")

    @classmethod
    def read(cls, path: Path) -> Outcome | None:
        return cls(**json.loads(path.read_text(encoding="utf8"))) if path.exists() else None


def main(job_path: Path) -> int:
    hold_lifeline()
    cancelled = False

    def cancel(*_: Any) -> None:
        nonlocal cancelled
        cancelled = True

    signal.signal(signal.SIGTERM, cancel)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job.read(job_path)
    scratch = Path(job.scratch)
    with open_journal(scratch / JOURNAL) as journal:
        run = Run(scratch, LaunchConfig(**job.launch), journal=journal, is_cancelled=lambda: cancelled)
        outcome = _build(job, run)
    outcome.write(scratch / OUTCOME)
    return 0 if outcome.status == "built" else 1


def _build(job: Job, run: Run) -> Outcome:
    try:
        stage = importlib.import_module(f"tasks.{job.stage}").STAGE
        config = stage.config.model_validate(job.config)
        inputs = {name: Path(folder) for name, folder in job.inputs.items()}
        result: Result = stage.build(config, inputs, Path(job.out), run)
        figures = {name: float(value) for name, value in result.figures.items()}
        return Outcome("built", figures, result.headline, [], _device())
    except StemmaError as error:
        return _failed(error)
    except OSError as error:
        told = disk_error(error, job.node, Path(job.out))
        if isinstance(told, StageError):
            return _failed(told)
        return _crashed(job, error)
    except Exception as error:
        return _crashed(job, error)


def _device() -> str:
    """What the stage computed on, as far as it used torch at all."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu ({platform.machine()})"


def _failed(error: StemmaError) -> Outcome:
    return Outcome(error.status, {}, "", [problem.as_json() for problem in error.problems])


def _crashed(job: Job, error: Exception) -> Outcome:
    """Something that no message was written for: the traceback goes to the stage's log, its last line to the user."""
    traceback.print_exc()
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    return Outcome("failed", {}, "", [Problem("crashed", job.node, line, f"stemma logs {job.node}").as_json()])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
