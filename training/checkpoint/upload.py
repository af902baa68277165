"""Upload checkpoints to S3 in the background, by a thread of each rank, so that they survive the loss of the machine.

Every rank uploads its own files; the first one uploads all others and, once the ranks are done, the manifest. Training
never waits: a checkpoint written while another upload is in progress is skipped. Files are linked into the work
folder's `upload` until they are uploaded, so that the checkpoint may be removed meanwhile.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash

from infra.errors import StageError
from infra.io.files import link_or_copy
from infra.io.json import parse_own_json
from infra.io.s3_write import UploadStopped, check_writable, put, remove, upload
from infra.run import Run
from training.checkpoint.folder import MANIFEST, batch_of, checkpoints
from training.checkpoint.remote import (
    CHECKPOINTS,
    HASH,
    everywhere,
    manifest_name,
    outdated,
    remote_checkpoints,
    url_of,
)
from training.core import ranks

_FOLDER = "upload"
_POLL_S = 0.1
# Seconds to wait for a thread that has to stop; a request that it still sends afterwards is harmless.
_PROMPT_S = 2.0


def check_remote(remote: str, work_dir: Path, say: Callable[[str], None]) -> None:
    """Check that checkpoints can be written to `remote`; every rank must call.

    Raises StageError on every rank if the server refuses or the bucket does not exist, or if the server does not answer
    and this machine has no checkpoint to continue from. If it has one, `say` gets a message instead.
    """

    def check() -> None:
        try:
            check_writable(remote)
        except StageError as error:
            passing = all(problem.code == "source_unreachable" for problem in error.problems)
            if not (passing and checkpoints(work_dir / CHECKPOINTS)):
                raise
            say(f"{error}; training continues from this machine's checkpoint")

    everywhere(check)


class Uploader:
    """Uploads of one training.

    remote: the folder of this build on S3. keep, keep_hours: as in `CheckpointPlan`, for the uploaded checkpoints.
    companions: files of the work folder to upload with each checkpoint, in their state when it is written.
    """

    def __init__(self, remote: str, keep: int, keep_hours: float, run: Run, companions: Sequence[Path] = ()) -> None:
        self._remote = remote
        self._keep, self._keep_hours = keep, keep_hours
        self._run = run
        self._companions = companions
        self._work = run.work_dir / _FOLDER
        self._background = _Background()
        self._is_news = True
        """True if a successful upload is reported: the first one, and the first one after a failure."""
        self._is_behind = False
        if ranks.is_first():
            shutil.rmtree(self._work, ignore_errors=True)  # links of a process that was killed

    def offer(self, path: Path, *, must: bool = False) -> None:
        """Upload a whole checkpoint, unless an upload is in progress; every rank must call.

        Args:
            must: True to upload it in any case, after the current one.
        """
        is_behind = ranks.any_rank(self._background.is_busy) and not must
        if is_behind and not self._is_behind:
            self._say(
                "upload_behind",
                f"the checkpoint of batch {batch_of(path):,} is not uploaded: the one before is still on its way, so "
                "uploads take longer than the time between checkpoints",
            )
        self._is_behind = is_behind
        if not is_behind:
            item = self._pin(path)
            self._background.do(lambda: self._upload(item))

    def drop_after(self, batch: int) -> None:
        """Remove checkpoints of later batches, after pending uploads are done; every rank may call."""

        def drop() -> None:
            for checkpoint in remote_checkpoints(self._remote):
                if checkpoint.batch > batch:
                    remove(checkpoint.in_order_of_removal())

        if ranks.is_first():
            self._background.do(lambda: self._removed(drop))

    def finish(self, seconds: float) -> None:
        """Wait until everything is uploaded, for at most `seconds`; every rank must call."""
        if not ranks.any_rank(self._background.is_busy):
            return
        self._say("uploading", f"waiting up to {seconds:.0f} s until the newest checkpoint is uploaded")
        ends = time.monotonic() + seconds
        while ranks.any_rank(self._background.is_busy):
            if ranks.any_rank(time.monotonic() > ends):
                self._say("upload_late", f"the newest checkpoint was not uploaded within {seconds:.0f} s")
                return
            self._background.wait(_POLL_S)

    def stop(self) -> None:
        """Stop the thread, even during an upload."""
        self._background.stop(_PROMPT_S)
        if ranks.is_first():
            shutil.rmtree(self._work, ignore_errors=True)

    def _pin(self, path: Path) -> _QueuedCheckpoint:
        text, companions = ranks.from_first(
            ((path / MANIFEST).read_text(encoding="utf8"), {file.name: _content(file) for file in self._companions})
            if ranks.is_first()
            else ("", {})
        )
        files = parse_own_json(text)
        own_names = [name for name in files if _owner(name) == ranks.rank()]
        companions = {name: content for name, content in companions.items() if content}
        files |= {
            name: (len(content), getattr(xxhash, HASH)(content).hexdigest()) for name, content in companions.items()
        }
        manifest = json.dumps(files, sort_keys=True).encode()
        pinned = self._work / f"{path.parent.name}.{path.name}.{manifest_name(manifest)}"
        failure = ""
        try:
            pinned.mkdir(parents=True, exist_ok=True)
            for name in own_names:
                (pinned / name).unlink(missing_ok=True)
                link_or_copy(path / name, pinned / name)
            if ranks.is_first():
                for name, content in companions.items():
                    (pinned / name).write_bytes(content)
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
        if ranks.is_first():
            own_names += companions
        return _QueuedCheckpoint(path.parent.name, batch_of(path), manifest, pinned, own_names, failure)

    def _upload(self, item: _QueuedCheckpoint) -> None:
        """Upload, in the thread, this rank's files and, on the first rank, the manifest after all others are done."""
        url = url_of(self._remote, item.folder, item.batch, item.manifest)
        failure = item.failure
        try:
            for name in item.own_names if not failure else ():
                upload(item.pinned / name, f"{url}/{name}", lambda: self._background.is_stopped)
            if ranks.is_first():
                failure = failure or self._wait_for_others(item)
                if not failure:
                    put(item.manifest, f"{url}/{MANIFEST}")
        except UploadStopped:
            return
        except Exception as error:
            failure = str(error) if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
        if not ranks.is_first():
            with suppress(OSError):
                _write_whole(_mark(item, ranks.rank()), failure)
            return
        if failure:
            what = f"the checkpoint of batch {item.batch:,} was not uploaded"
            self._say("upload_failed", f"{what}: {failure}; training continues, and the next one is tried")
        elif self._is_news:
            self._say("uploaded", f"the checkpoint of batch {item.batch:,} is in {url}")
        self._is_news = bool(failure)
        if not failure:
            self._removed(self._remove_outdated)
        shutil.rmtree(item.pinned, ignore_errors=True)

    def _wait_for_others(self, item: _QueuedCheckpoint) -> str:
        """Wait until every other rank is done; return the error of the first one that failed, or an empty string."""
        failures = []
        for rank in range(1, ranks.world_size()):
            while not _mark(item, rank).exists():
                if self._background.is_stopped:
                    raise UploadStopped
                time.sleep(_POLL_S)
            failure = _mark(item, rank).read_text(encoding="utf8")
            failures += [f"rank {rank}: {failure}"] if failure else []
        return next(iter(failures), "")

    def _remove_outdated(self) -> None:
        younger_than = time.time() - self._keep_hours * 3600
        for checkpoint in outdated(remote_checkpoints(self._remote), self._keep, younger_than):
            remove(checkpoint.in_order_of_removal())

    def _removed(self, removing: Callable[[], None]) -> None:
        try:
            removing()
        except Exception as error:
            self._say("upload_kept", f"uploaded checkpoints that need not stay were not removed: {error}")

    def _say(self, name: str, message: str) -> None:
        with suppress(ValueError, OSError):  # the run has ended, or its disk is full
            self._run.event(name, message)


@dataclass(frozen=True)
class _QueuedCheckpoint:
    """A checkpoint to upload.

    pinned: the folder of its linked files. mine: names that this rank uploads. failure: the error if linking failed.
    """

    folder: str
    batch: int
    manifest: bytes
    pinned: Path
    own_names: Sequence[str]
    failure: str


class _Background:
    """Run tasks one after another in a daemon thread."""

    def __init__(self) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._left = 0
        self._thread: threading.Thread | None = None
        self.is_stopped = False

    @property
    def is_busy(self) -> bool:
        return self._left > 0

    def do(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            self._left += 1
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checkpoint-upload", daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait until no tasks are left, for at most `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, seconds)

    def stop(self, seconds: float) -> None:
        """Ask the thread to stop, and wait for it for at most `seconds`."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self.is_stopped)
                if self.is_stopped:
                    return
                task = self._tasks.popleft()
            try:
                task()
            finally:
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()


def _owner(name: str) -> int:
    """Rank that uploads a file of a checkpoint: the one that wrote it."""
    start = name.partition(".")[0]
    number = start.removeprefix("rank")
    return int(number) if start.startswith("rank") and number.isdigit() else 0


def _mark(item: _QueuedCheckpoint, rank: int) -> Path:
    """File that signals to the first rank that another one is done; it contains the error, or nothing."""
    return item.pinned / f"done.{rank}"


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf8")
    temporary.replace(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
