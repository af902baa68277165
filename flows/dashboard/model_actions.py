"""The actions of the page of a model: try it, export it, promote it.

Each is the command of its name in a process, so that the same checks hold and the page itself loads no model. What runs
is known to this process alone; the results are those of the commands: `<root>/exports/`, and the store's promotions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from evaluation.release.registrations import newest_registration, refusals_of
from flows.dashboard.reading import ReadingStore, address_of
from flows.dashboard.served_model import ParentPipe, ServedModel
from flows.dashboard.steering import RefusedError
from infra.errors import StemmaError
from infra.io.foreign import WRITES_TEXT
from infra.io.json import parse_own_json, read_own_json
from infra.store.ancestry import locate
from infra.store.layout import EXPORTS
from infra.store.manifest import Manifest
from infra.store.promotions import Promotions

READ_ONLY = "this page only reads the store; run stemma up, and use its page"
NOT_WRITABLE = "this page has no permission to write to its store"
ACTIONS = ("try", "export", "promote")


@dataclass
class ModelAction:
    """One action, as the page shows it. reason: why it is refused; "" if it is not."""

    name: str
    label: str
    about: str
    reason: str = ""


@dataclass
class ModelJob:
    """An action that was asked for. state: running, done or failed. page: address that opens once it is done."""

    state: str = "running"
    message: str = ""
    page: str = ""


class ModelActions:
    """Actions on the models of a store. is_read_only: the page was opened to read."""

    def __init__(self, root: Path, *, is_read_only: bool) -> None:
        self._root = root
        self._is_read_only = is_read_only
        self._jobs: dict[tuple[str, str], ModelJob] = {}
        self._lock = threading.Lock()
        self._served: ServedModel | None = None
        self._parent: ParentPipe | None = None

    def reason_to_refuse(self) -> str:
        """Return why nothing may be done from this page; "" if something may."""
        if self._is_read_only:
            return READ_ONLY
        return "" if os.access(self._root, os.W_OK) else NOT_WRITABLE

    def of(self, store: ReadingStore, folder: Path, manifest: Manifest) -> list[ModelAction]:
        """Return the actions on a model, each with the reason why it is refused."""
        address, overall = address_of(folder, manifest), self.reason_to_refuse()
        refused = "a gate rejected it" if refusals_of(store, manifest.digest) else ""
        others = self._models_to_try(store, folder, manifest)[1:]
        companion = f" next to {others[0]}, which it was made from" if others else ""
        target = self._target(address)
        exported = f"it was exported to {target}" if target.exists() else ""
        return [
            ModelAction(
                "try",
                "Try it",
                f"Chat with it{companion}, on the CPU of this server.",
                overall
                or ("" if _writes_text(store, folder, manifest) else "it scores text and does not generate any"),
            ),
            ModelAction(
                "export",
                "Export",
                f"Write it to {target} for transformers and the Hub, after a separate process has checked it.",
                overall or refused or exported,
            ),
            ModelAction(
                "promote",
                "Promote",
                "Make it the promoted model of its name; refused if it is worse than the current one.",
                overall or refused or self._reason_not_to_promote(store, manifest),
            ),
        ]

    def states(self, address: str) -> dict[str, Any]:
        """Return what became of the actions that were asked for, by name."""
        jobs = {name: self._jobs.get((address, name)) for name in ACTIONS}
        return {name: vars(job) for name, job in jobs.items() if job is not None}

    def start(self, store: ReadingStore, folder: Path, manifest: Manifest, name: str) -> ModelJob:
        """Start an action. Raises RefusedError with the reason why it is refused."""
        address = address_of(folder, manifest)
        action = next(action for action in self.of(store, folder, manifest) if action.name == name)
        if action.reason:
            forbidden = action.reason in (READ_ONLY, NOT_WRITABLE)
            raise RefusedError(action.reason, HTTPStatus.FORBIDDEN if forbidden else HTTPStatus.CONFLICT)
        with self._lock:
            job = self._jobs.get((address, name))
            if job is not None and job.state == "running":
                raise RefusedError("it is already running")
            job = self._jobs[address, name] = ModelJob()
            self._parent = self._parent or ParentPipe()
            works: dict[str, Callable[[], None]] = {
                "try": lambda: self._try(store, self._models_to_try(store, folder, manifest), job),
                "export": lambda: self._export(store, address, job),
                "promote": lambda: self._promote(store, address, job),
            }
            job.message = {"try": "loading the model", "export": "writing and checking it"}.get(name, "comparing it")
        threading.Thread(target=self._watched, args=(works[name], job), daemon=True).start()
        return job

    def served(self, address: str) -> ServedModel | None:
        """Return the process that answers for a model; None if it is not tried, or its process has ended."""
        served = self._served
        return served if served and served.is_ready and served.models[0] == address else None

    def _watched(self, work: Callable[[], None], job: ModelJob) -> None:
        try:
            work()
        except Exception as error:  # it would end in the log of the page alone
            job.state, job.message = "failed", str(error)

    def _try(self, store: ReadingStore, models: list[str], job: ModelJob) -> None:
        assert self._parent is not None
        if self.served(models[0]) is None:
            if self._served is not None:
                self._served.end()
            self._served = ServedModel(models, store.place, self._parent)
            if trouble := self._served.wait_until_ready():
                job.state, job.message = "failed", trouble
                return
        job.state, job.message, job.page = "done", "loaded", f"/model/{models[0]}/chat/"

    def _export(self, store: ReadingStore, address: str, job: ModelJob) -> None:
        target = self._target(address)
        target.parent.mkdir(exist_ok=True)
        document = self._command(job, "export", address, str(target), "--root", store.place)
        if document:
            job.state, job.message = "done", f"written to {document['path']}"

    def _promote(self, store: ReadingStore, address: str, job: ModelJob) -> None:
        document = self._command(job, "promote", address, "--root", store.place)
        if document:
            before = f"; previously {document['before']['model']}" if document["before"] else ""
            job.state, job.message = "done", f"promoted as {document['name']}{before}"

    def _command(self, job: ModelJob, *words: str) -> Mapping[str, Any] | None:
        """Return the document of a command that is done; None, and the reason in the job, of one that failed."""
        assert self._parent is not None
        ended = subprocess.run(
            [sys.executable, "-m", "infra.process.lifetime", "cli.main", *words, "--json"],
            env=self._parent.variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            start_new_session=True,
            pass_fds=(self._parent.read_end,),
            check=False,
        )
        document: Any = None
        with suppress(ValueError, RecursionError):
            document = parse_own_json(ended.stdout)
        if isinstance(document, dict) and document.get("status") == "done":
            return document
        errors = document.get("errors", []) if isinstance(document, dict) else []
        messages = [str(error.get("message", "")) for error in errors]
        job.state = "failed"
        job.message = "; ".join(messages) or ended.stderr.decode(errors="replace")[-500:].strip() or "it was ended"
        return None

    def _target(self, address: str) -> Path:
        return self._root / EXPORTS / address.replace("/", "-")

    def _models_to_try(self, store: ReadingStore, folder: Path, manifest: Manifest) -> list[str]:
        """Return the address of a model, and that of the one that it was made from, if that writes text too."""
        models = [address_of(folder, manifest)]
        source = manifest.inputs.get("model")
        located = locate(store, source) if source is not None else None
        if located is not None and _writes_text(store, *located):
            models.append(address_of(*located))
        return models

    def _reason_not_to_promote(self, store: ReadingStore, manifest: Manifest) -> str:
        if newest_registration(store, manifest.digest) is None:
            return "it is not registered: run a pipeline with the section register"
        with suppress(OSError, StemmaError):
            for name, promotion in Promotions(store.root).all().items():
                if promotion.digest == manifest.digest:
                    return f"it is already promoted as {name}"
        return ""


def _writes_text(store: ReadingStore, folder: Path, manifest: Manifest) -> bool:
    with suppress(OSError, ValueError, AttributeError, StemmaError):
        config = read_own_json(store.peek(manifest, "config.json", folder=folder) / "config.json")
        kinds = config.get("architectures") or []
        return not kinds or any(str(kind).endswith(WRITES_TEXT) for kind in kinds)
    return False
