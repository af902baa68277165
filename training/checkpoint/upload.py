"""Uploads checkpoints to S3 behind training, by a thread of each rank, so that a machine that is lost takes none along.

Every rank uploads its own files, the first one all others and, once the ranks are done, the manifest. Training never
waits: a checkpoint that is written while another is still on its way is left out. Files are linked into the work
folder's `upload` as long as they are needed, so that a checkpoint may be removed meanwhile.
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
# A thread that is to stop is waited for so long; what it does then is one request, and harms nobody.
_PROMPT_S = 2.0


def check_remote(place: str, work_dir: Path, say: Callable[[str], None]) -> None:
    """Makes sure that checkpoints can be written to `place`; every rank must call.

    Raises StageError on every rank: the server refuses, there is no such bucket; or it does not answer, and no
    checkpoint of this machine is there to go on from. Else `say` is told that it does not.
    """

    def check() -> None:
        try:
            check_writable(place)
        except StageError as error:
            passing = all(problem.code == "source_unreachable" for problem in error.problems)
            if not (passing and checkpoints(work_dir / CHECKPOINTS)):
                raise
            say(f"{error}; training goes on from this machine's checkpoint")

    everywhere(check)


class Uploader:
    """The uploads of one training.

    place: the folder on S3 of this build. keep, keep_hours: as in `CheckpointPlan`, of what lies there.
    beside: files of the work folder that go along with each checkpoint as they are when it is written.
    """

    def __init__(self, place: str, keep: int, keep_hours: float, run: Run, beside: Sequence[Path] = ()) -> None:
        self._place = place
        self._keep, self._keep_hours = keep, keep_hours
        self._run = run
        self._beside = beside
        self._work = run.work_dir / _FOLDER
        self._background = _Background()
        self._is_news = True
        """Whether an upload that ends well is told: the first one, and the first after trouble."""
        self._is_behind = False
        if ranks.is_first():
            shutil.rmtree(self._work, ignore_errors=True)  # links of a process that was killed

    def offer(self, path: Path, *, must: bool = False) -> None:
        """Has a whole checkpoint uploaded, unless one is on its way; every rank must call.

        must: it is uploaded in any case, after that one.
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
        """Takes away those of later batches, once what is on its way is there; every rank may call."""

        def drop() -> None:
            for one in remote_checkpoints(self._place):
                if one.batch > batch:
                    remove(one.in_order_of_removal())

        if ranks.is_first():
            self._background.do(lambda: self._removed(drop))

    def finish(self, seconds: float) -> None:
        """Waits until all is uploaded, but no longer than so many seconds; every rank must call."""
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
        """Ends the thread, whatever is on its way."""
        self._background.stop(_PROMPT_S)
        if ranks.is_first():
            shutil.rmtree(self._work, ignore_errors=True)

    def _pin(self, path: Path) -> _Item:
        text, beside = ranks.from_first(
            ((path / MANIFEST).read_text(encoding="utf8"), {one.name: _content(one) for one in self._beside})
            if ranks.is_first()
            else ("", {})
        )
        files = parse_own_json(text)
        mine = [name for name in files if _owner(name) == ranks.rank()]
        beside = {name: content for name, content in beside.items() if content}
        files |= {name: (len(content), getattr(xxhash, HASH)(content).hexdigest()) for name, content in beside.items()}
        manifest = json.dumps(files, sort_keys=True).encode()
        pinned = self._work / f"{path.parent.name}.{path.name}.{manifest_name(manifest)}"
        failure = ""
        try:
            pinned.mkdir(parents=True, exist_ok=True)
            for name in mine:
                (pinned / name).unlink(missing_ok=True)
                link_or_copy(path / name, pinned / name)
            if ranks.is_first():
                for name, content in beside.items():
                    (pinned / name).write_bytes(content)
        except OSError as error:
            failure = f"{type(error).__name__}: {error}"
        if ranks.is_first():
            mine += beside
        return _Item(path.parent.name, batch_of(path), manifest, pinned, mine, failure)

    def _upload(self, item: _Item) -> None:
        """In the thread: brings this rank's files and, on the first one, the manifest when all others are done."""
        url = url_of(self._place, item.folder, item.batch, item.manifest)
        failure = item.failure
        try:
            for name in item.mine if not failure else ():
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
            self._say("upload_failed", f"{what}: {failure}; training goes on, and the next one is tried")
        elif self._is_news:
            self._say("uploaded", f"the checkpoint of batch {item.batch:,} lies in {url}")
        self._is_news = bool(failure)
        if not failure:
            self._removed(self._remove_outdated)
        shutil.rmtree(item.pinned, ignore_errors=True)

    def _wait_for_others(self, item: _Item) -> str:
        """Returns once every other rank has done its part: what went wrong with the first that failed, or nothing."""
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
        for one in outdated(remote_checkpoints(self._place), self._keep, younger_than):
            remove(one.in_order_of_removal())

    def _removed(self, removing: Callable[[], None]) -> None:
        try:
            removing()
        except Exception as error:
            self._say("upload_kept", f"uploaded checkpoints that need not stay were not removed: {error}")

    def _say(self, name: str, message: str) -> None:
        with suppress(ValueError, OSError):  # the run has ended, or its disk is full
            self._run.event(name, message)


@dataclass(frozen=True)
class _Item:
    """A checkpoint on its way.

    pinned: the folder of its linked files. mine: those that this rank uploads. failure: why they are not there.
    """

    folder: str
    batch: int
    manifest: bytes
    pinned: Path
    mine: Sequence[str]
    failure: str


class _Background:
    """Does one thing after another in a thread that ends with the process."""

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
        """Until nothing is left to do, but no longer than so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._left, seconds)

    def stop(self, seconds: float) -> None:
        """Asks the thread to end, and waits for it for so many seconds."""
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
    """The rank that uploads a checkpoint's file: the one that wrote it."""
    start = name.partition(".")[0]
    number = start.removeprefix("rank")
    return int(number) if start.startswith("rank") and number.isdigit() else 0


def _mark(item: _Item, rank: int) -> Path:
    """Tells the first rank that another one is done; what went wrong, or nothing, stands in it."""
    return item.pinned / f"done.{rank}"


def _write_whole(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf8")
    aside.replace(path)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
