"""Garbage of a store: abandoned work, and artifacts that are not ancestors of a needed or pinned artifact."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.runs.journal import RunJournal
from flows.runs.journal_forms import HAS_ARTIFACT, READS, is_whole
from flows.runs.trials import best_runs
from infra.errors import Problem, stage_error
from infra.io.json import parse_own_json, read_own_json
from infra.io.s3 import read_object
from infra.io.s3_write import put_if
from infra.io.tables import damaged, read_state
from infra.store.ancestry import ancestry, artifact_member, locate
from infra.store.layout import MANIFEST
from infra.store.left_memory import remove_memory
from infra.store.manifest import InputArtifact, Manifest
from infra.store.roots import url_of
from infra.store.states import kept_states, remove_state
from infra.store.store import Store, is_full

_LOST = "correct it, or delete it: then nothing is pinned"


class Pins:
    """The pinned artifacts of a store, by their place in it: `clean/2f20dd552d78493b`."""

    def __init__(self, root: Path) -> None:
        self._path = root / "pins.json"
        url = url_of(root)
        self._url = f"{url}/pins.json" if url else ""

    def read(self) -> list[str]:
        """Raise StageError `damaged_state` for a damaged file, since what is pinned is unknown then."""
        return self._read()[0]

    def _read(self) -> tuple[list[str], str | None]:
        """The pins, and the ETag of the object that they were read from."""
        pins, etag = self._of_url() if self._url else (read_state(self._path, _LOST, []), None)
        if not isinstance(pins, list) or not all(isinstance(pin, str) for pin in pins):
            raise damaged(self._path, "expected a list of artifacts", _LOST)
        return pins, etag

    def _of_url(self) -> tuple[Any, str | None]:
        stored = read_object(self._url)
        try:
            return (parse_own_json(stored[0]), stored[1]) if stored else ([], None)
        except ValueError as error:
            raise damaged(self._path, f"{self._url}: {error}", _LOST) from error

    def add(self, artifact: str) -> None:
        with self._alone():
            pins, etag = self._read()
            self._write(sorted({*pins, artifact}), etag)

    def remove(self, artifact: str) -> bool:
        """False if it was not pinned."""
        if artifact not in self.read():
            return False
        with self._alone():
            pins, etag = self._read()
            if artifact not in pins:
                return False
            self._write([pin for pin in pins if pin != artifact], etag)
            return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let only one process change the pins at a time; on an object store the ETag ensures it."""
        state = self._path.parent / ".state"
        state.mkdir(parents=True, exist_ok=True)
        with open(state / "pins.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, pins: list[str], etag: str | None) -> None:
        if self._url:
            if not put_if(json.dumps(pins, indent=1).encode(), self._url, etag):
                raise stage_error(
                    "pinned_meanwhile", self._url, "another machine changed the pins", "run the command again"
                )
            return
        hidden = self._path.with_name(".pins.json")
        hidden.write_text(json.dumps(pins, indent=1) + "\n", encoding="utf8")
        hidden.replace(self._path)


STALE_S = 24 * 3600.0
ASK_AGAIN_S = 1.0
"""Seconds for which the needs of runs are cached: reading them takes the journals of all runs."""
REGISTER = "register"

StoredArtifact = tuple[Path, Manifest]


@dataclass(frozen=True)
class Garbage:
    """A folder that can go: an artifact, or unfinished work. `bytes` is what its removal frees: the size of its files,
    but for those that have another name outside of what can go with it."""

    id: str
    folder: Path
    bytes: int
    reason: str


@dataclass
class Survey:
    """The needed folders, and why; the garbage; and problems that keep us from knowing, in which case nothing may be
    removed."""

    needed: dict[str, str] = field(default_factory=dict)
    artifacts: list[Garbage] = field(default_factory=list)
    work: list[Garbage] = field(default_factory=list)
    states: list[Garbage] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def survey(store: Store, *, spare_adopted: bool = True, spare_states: bool = True) -> Survey:
    """Return the needed artifacts of a store and the garbage in it.

    Needed are, each with all that it descends from or requires: the artifacts of the newest finished run of every
    pipeline (for a run of a part, also the newest of the other parts, back to the last full run); every registered
    model; pins; what a run in progress or a living lease refers to; the best trial of each sweep; adopted
    artifacts, unless `spare_adopted` is False.

    Args:
        spare_states: whether states of needed trainings stay (infra/store/states.py); what went on from one is no
            reason.
    """
    result = Survey(problems=[*_unreadable(store), *_lost_runs(store)])
    everything = list(store.manifests())
    ancestors: dict[str, str] = {}
    for reason, artifacts in _roots(store, everything, spare_adopted):
        family = ancestry(store, artifacts)
        for artifact in artifacts:
            result.needed.setdefault(artifact_member(store, *artifact).id, reason)
        for member in family.artifacts:
            ancestors.setdefault(member.id, f"an ancestor of what is {reason}")
        for member in family.members.values():
            if member.input is None:
                continue
            # Another artifact of its address was asked for with the same inputs: its ancestors are those of the lost.
            if member.stand_in is None:
                child = next(link.child for link in family.links if link.parent == member.id)
                message = f"is not in the store, so the other ancestors of {child} are unknown"
                result.problems.append(Problem("broken_lineage", member.input.path, message, f"build {child} again"))
    result.needed = ancestors | result.needed
    members = [artifact_member(store, folder, manifest) for folder, manifest in everything]
    freed = _freed(
        store,
        [artifact for artifact, member in zip(everything, members, strict=True) if member.id not in result.needed],
    )
    for (folder, manifest), member in zip(everything, members, strict=True):
        if member.id not in result.needed:
            result.artifacts.append(Garbage(member.id, folder, freed[folder], _why_not(manifest, folder)))
        elif not spare_states:
            result.states += _states(member.id, folder, manifest)
    result.work = list(_stale_work(store))
    return result


def _freed(store: Store, artifacts: list[StoredArtifact]) -> dict[Path, int]:
    """The bytes that each of these artifacts frees if all go; a file that several of them have counts with the last."""
    freed: dict[Path, int] = {}
    names: Counter[tuple[int, int]] = Counter()
    for folder, manifest in artifacts:
        if store.remote is not None:
            freed[folder] = sum(file.size for file in manifest.files)
            continue
        freed[folder] = 0
        for file in manifest.files:
            with suppress(OSError):  # a missing file frees nothing
                status = os.stat(folder / file.path)
                names[status.st_dev, status.st_ino] += 1
                if names[status.st_dev, status.st_ino] == status.st_nlink:
                    freed[folder] += status.st_size
    return freed


def remove(store: Store, garbage: Iterable[Garbage]) -> list[Garbage]:
    """Remove folders and return the removed ones.

    A folder that is being built is left alone. So is one that a run has needed since the survey: removing many takes
    a while. A folder is renamed before it is deleted, so that no reader ever takes a half-deleted one for an artifact.
    """
    removed = []
    needed, asked_at = _needed_by_now(store), time.monotonic()
    for item in garbage:
        if time.monotonic() - asked_at > ASK_AGAIN_S:
            needed, asked_at = _needed_by_now(store), time.monotonic()
        if item.folder in needed:
            continue
        stage, name = item.folder.parent.name, item.folder.name
        with _left_alone(store, f"{stage}/{name.partition('.')[0]}") as is_ours, suppress(FileNotFoundError):
            if is_ours:
                if item.id.startswith(".work/"):
                    remove_memory(item.folder)
                store.remove(item.folder, store.read(item.folder))
                removed.append(item)
    return removed


@contextmanager
def _left_alone(store: Store, key: str) -> Iterator[bool]:
    """Yield True if no builder works on it, and none starts within the block.

    A lease is a row that has to be written. Where the disk is full no other builder can take one either, and what is
    removed makes room for the next.
    """
    try:
        lease = store.leases.acquire(key, stop_if=lambda: True)
    except sqlite3.OperationalError as error:
        if not is_full(error):
            raise
        holder = store.leases.table.read(key)
        yield holder is None or holder.is_dead()
        return
    try:
        yield lease is not None
    finally:
        if lease is not None:
            lease.release()


def _states(artifact: str, folder: Path, manifest: Manifest) -> Iterator[Garbage]:
    for state in kept_states(folder):
        if state.is_there:
            size = sum(file.size for file in state.files(manifest))
            reason = (
                f"the state of {artifact} after {state.batch:,} batches; no training can continue from it afterwards"
            )
            yield Garbage(f"{artifact} state {state.batch}", state.folder, size, reason)


def remove_states(store: Store, states: Iterable[Garbage]) -> list[Garbage]:
    """Remove states from their artifacts and return those that were removed. Artifacts being built are left alone."""
    removed = []
    for item in states:
        artifact = item.folder.parents[2]
        with _left_alone(store, f"{artifact.parent.name}/{artifact.name.partition('.')[0]}") as is_ours:
            manifest = store.read(artifact)
            state = next((kept for kept in kept_states(artifact) if kept.folder == item.folder), None)
            if is_ours and manifest is not None and state is not None:
                remove_state(artifact, manifest, state)
                removed.append(item)
    return removed


def refuse_if_unsure(survey: Survey) -> None:
    """Raise StageError if it is uncertain which artifacts are needed."""
    if survey.problems:
        first = survey.problems[0]
        message = f"nothing was removed: {first.message}" + (
            f" ({len(survey.problems)} such)" * (len(survey.problems) > 1)
        )
        raise stage_error(first.code, first.path, message, first.fix)


def _roots(
    store: Store, everything: list[StoredArtifact], spare_adopted: bool
) -> Iterator[tuple[str, list[StoredArtifact]]]:
    yield "registered", [artifact for artifact in everything if artifact[1].stage == REGISTER]
    pins = set(Pins(store.root).read())
    yield "pinned", [artifact for artifact in everything if artifact_member(store, *artifact).id in pins]
    yield "in use", list(_in_use(store))
    journals = _journals(store)
    for name in sorted({start["pipeline"] for _, start in journals}):
        runs = [(journal, start) for journal, start in journals if start["pipeline"] == name]
        yield f"of the newest run of {name}", list(_newest(store, runs))
    for sweep, run_id in best_runs(store):
        result = RunJournal(store.layout.runs, run_id).result() or {"stages": []}
        rows = [row for row in result["stages"] if row["status"] in HAS_ARTIFACT]
        yield f"of the best trial of sweep {sweep}", [artifact for row in rows if (artifact := _located(store, row))]
    if spare_adopted:
        yield "imported", [artifact for artifact in everything if artifact[1].adopted is not None]


def _lost_runs(store: Store) -> Iterator[Problem]:
    runs = store.runs()
    for folder in sorted(runs.iterdir()) if runs.is_dir() else []:
        if problem := RunJournal(runs, folder.name).lost_beginning():
            yield problem


def _journals(store: Store) -> list[tuple[RunJournal, dict]]:
    """The runs of a store, newest first, each with what it was about."""
    runs = store.runs()
    folders = sorted(runs.iterdir(), reverse=True) if runs.is_dir() else []
    journals = [RunJournal(runs, folder.name) for folder in folders]
    return [(journal, start) for journal in journals if "pipeline" in (start := journal.start_record())]


def _newest(store: Store, runs: list[tuple[RunJournal, dict]]) -> Iterator[StoredArtifact]:
    seen: set[str] = set()
    for journal, start in runs:
        result = journal.result()
        if result is None:
            continue
        rows = {row["stage"]: row for row in result["stages"] if row["status"] in HAS_ARTIFACT}
        for row in rows.values():
            if row["stage"] not in seen and (artifact := _located(store, row)):
                yield artifact
        if start.get("time", 0) > time.time() + STALE_S:
            continue  # the clock was ahead then, and has been set since: any other may be newer
        seen |= set(rows)
        if result["status"] == "done" and is_whole(start):
            return


def _in_use(store: Store) -> Iterator[StoredArtifact]:
    """Artifacts that runs which have not ended made so far or read of earlier runs, artifacts that are being built
    again, and artifacts that builds in progress read."""
    for journal, _ in _journals(store):
        if journal.result() is None and _goes_on(journal):
            lines = journal.read()
            rows = [line for line in lines if line["kind"] == "stage" and line["status"] in HAS_ARTIFACT]
            yield from (artifact for row in rows if (artifact := _located(store, row)))
            reads = [InputArtifact(**row) for line in lines if line["kind"] == READS for row in line["artifacts"]]
            yield from (artifact for each in reads if (artifact := locate(store, each)))
    for run in store.remote.runs.going() if store.remote else ():
        if time.time() - run["modified"] < STALE_S:
            inputs = [InputArtifact(path=f"{row['stage']}/{row['fingerprint']}", **row) for row in run["artifacts"]]
            yield from (artifact for each in inputs if (artifact := locate(store, each)))
    for key in store.being_built():
        stage, _, name = key.partition("/")
        if manifest := store.find(stage, name):
            yield store.path(manifest), manifest
        for folder in _inputs_of_build(store.layout.work(stage, name)):
            if manifest := store.read(folder):
                yield folder, manifest


def _needed_by_now(store: Store) -> set[Path]:
    """The folders that runs and builds in progress need; of a root on an object store there are none meanwhile, see
    `infra.store.at_work`."""
    if store.remote is not None:
        return set()
    return {member.folder for member in ancestry(store, _in_use(store)).artifacts if member.folder}


def _goes_on(journal: RunJournal) -> bool:
    """True if the run's process lives here, or may live elsewhere: its journal was written to within a day."""
    return journal.works() or time.time() - journal.path.stat().st_mtime < STALE_S


def _inputs_of_build(work: Path) -> list[Path]:
    try:
        job = read_own_json(work / "scratch" / "job.json")
    except (FileNotFoundError, ValueError):
        return []
    return [Path(folder) for folder in job["inputs"].values()]


def _located(store: Store, row: dict) -> StoredArtifact | None:
    """The artifact of a step. Its folder may have another name than the step."""
    stage = Path(row["path"]).parent.name if row.get("path") else row["stage"]
    name = row["fingerprint"]
    return locate(store, InputArtifact(stage, name, row["digest"], f"{stage}/{name}"))


def _why_not(manifest: Manifest, folder: Path) -> str:
    if "." in folder.name:
        return "replaced by a later build, and no needed artifact descends from it"
    if manifest.adopted is not None:
        return "imported, and no needed artifact descends from it"
    made = f"made by {manifest.pipeline} on {manifest.finished[:10]}" if manifest.pipeline else "made by no pipeline"
    return f"{made}, not needed since"


def _unreadable(store: Store) -> Iterator[Problem]:
    for stage in store.stages():
        for folder in store.folders(stage):
            if store.read(folder) is None:
                message = "cannot be read, so the ancestors of its artifact are unknown"
                yield Problem(
                    "unreadable_manifest", str(folder / MANIFEST), message, "move the folder out of the store"
                )


def _stale_work(store: Store) -> Iterator[Garbage]:
    """Unfinished work that no living lease holds and that was not touched for a day."""
    living = set(store.being_built())
    for folder in sorted((store.root / ".work").glob("*/*")):
        touched, size = _last_touch(folder)
        key = f"{folder.parent.name}/{folder.name}"
        if touched and folder.is_dir() and key not in living and time.time() - touched > STALE_S:
            days = (time.time() - touched) / 86400
            yield Garbage(f".work/{key}", folder, size, f"unfinished, untouched for {days:.0f} days")


def _last_touch(folder: Path) -> tuple[float, int]:
    """Return the last time that anything below a folder was written, and the bytes of its files. A build makes and
    removes files meanwhile: what is gone counts as nothing."""
    touched, size = 0.0, 0
    for directory, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            with suppress(FileNotFoundError):
                status = os.lstat(os.path.join(directory, name))
                touched = max(touched, status.st_mtime)
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return touched, size
