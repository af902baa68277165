"""Documents asked about, in their order: pieces and samples of each, counts of failures, and the origin of each
text."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from corpus.documents.parts import Document, document_parts, read_documents
from corpus.documents.selection import read_table
from corpus.documents.source_names import unknown_source
from corpus.documents.sources import SourceFacts, source_name
from corpus.generation.answers import AnswerStore, EndpointAnswer
from corpus.generation.config import GenerationConfig
from corpus.generation.endpoint import Endpoint, EndpointFailure, Request
from corpus.generation.prompts import EndpointPrompt, pieces_of
from corpus.readers.record import Unreadable
from infra.errors import Problem, StageError, stage_error
from infra.process.pace import Pace
from infra.run import Run
from infra.secrets import hide

POLL_S = 0.2
AHEAD = 8
"""Documents in progress per request in progress: one slow answer blocks no other until this many are done."""
FAULTS = ("failed", "truncated", "empty", "unparsable")
UNANSWERED = "aux/unanswered.jsonl"
PROVENANCE = pa.schema(
    [
        *((name, pa.string()) for name in ("id", "original", "source", "prompt", "model", "answered_by")),
        ("sample", pa.int32()),
        ("text", pa.string()),
    ]
)
"""id: of what was made. original, source, text: of the document that it was made from. prompt: name and digest of the
prompt in generation.json. model: as the config names it; answered_by: as the endpoint does."""
_ROWS = 1000


@dataclass
class AskedDocument:
    """A document with the answers to its requests. samples: per sample, the answers to the pieces in their order;
    empty where it was not asked about. fault: failed, truncated or empty, by the worst of its answers."""

    document: Document
    pieces: list[str] = field(default_factory=list)
    samples: list[list[EndpointAnswer]] = field(default_factory=list)
    fault: str = ""
    reason: str = ""


class Asking:
    """Asks about the documents of an artifact, keeps count, and writes the provenance of what is made.

    Used as a context, around one pass of `documents`. section: the stage's, for errors.
    """

    def __init__(
        self, config: GenerationConfig, prompt: EndpointPrompt, section: str, artifact: Path, out_dir: Path, run: Run
    ) -> None:
        self.config, self.prompt, self._section, self._run = config, prompt, section, run
        self._artifact, self._out = artifact, out_dir
        self.faults: Counter[str] = Counter()
        self.asked = self.total = 0
        self._reasons: Counter[str] = Counter()
        self._rows: list[dict[str, Any]] = []
        (out_dir / "aux").mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Asking:
        self._store = AnswerStore(self._run.answers_dir)
        self._runner = asyncio.Runner()
        self._runner.__enter__()
        self.endpoint = Endpoint(self.config.endpoint, self.config.sampling, self._store, f"{self._section}.endpoint")
        self._unanswered = (self._out / UNANSWERED).open("w", encoding="utf8")
        self._provenance = pq.ParquetWriter(self._out / "aux" / "provenance.parquet", PROVENANCE, compression="zstd")
        self._begun = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runner.run(self._end())
        self._runner.close()  # once the answers that came are on the disk
        self._store.close()
        self._unanswered.close()
        self._flush()
        self._provenance.close()
        seconds, counts = time.monotonic() - self._begun, self.endpoint.counts
        message = (
            f"{counts['requests']:,} requests in {seconds:.1f} s, {counts['cached']:,} answers from the cache, "
            f"{counts['repeated']:,} requests sent again"
        )
        self._run.event("generation", message, seconds=round(seconds, 3), **counts)

    def documents(self) -> Iterator[AskedDocument]:
        """All documents in order, those that were asked about with their answers.

        Raises StageError: what `Endpoint.ask` raises; `bad_answers` as soon as more are without a proper answer than
        `answer_limits` allows. Raises Cancelled.
        """
        chosen, self.total = chosen_documents(self.config, self._section, self._artifact)
        waiting: deque[tuple[AskedDocument, asyncio.Task[list[EndpointAnswer | EndpointFailure]] | None]] = deque()
        documents = (self._begin(document, chosen) for document in read_documents(self._artifact))
        most = AHEAD * self.config.endpoint.concurrency
        with Pace(self._run, "documents", self.total) as pace:
            while True:
                while len(waiting) < most and (entry := next(documents, None)) is not None:
                    waiting.append(entry)
                if not waiting:
                    return
                asked_document, task = waiting[0]
                if task is not None:
                    self._runner.run(self._until_done(task, waiting))
                    self._take(asked_document, task.result())
                    pace.add(1, len(asked_document.document.text.encode()))
                waiting.popleft()
                yield asked_document

    def made(self, id: str, asked_document: AskedDocument, sample: int, answer: EndpointAnswer) -> None:
        """Record the result made of a document."""
        document = asked_document.document
        self._rows.append(
            {
                "id": id,
                "original": document.id,
                "source": document.source,
                "prompt": f"{self.prompt.name} {self.prompt.digest}",
                "model": self.config.endpoint.model,
                "answered_by": answer.model,
                "sample": sample,
                "text": document.text,
            }
        )
        if len(self._rows) == _ROWS:
            self._flush()

    def fault(self, asked_document: AskedDocument, fault: str, reason: str) -> None:
        """Count a document without a proper answer. Raises StageError `bad_answers` beyond the limit."""
        self.faults[fault] += 1
        self._reasons[f"{fault}: {reason}"] += 1
        line = {
            "id": asked_document.document.id,
            "source": asked_document.document.source,
            "fault": fault,
            "reason": hide(reason),  # an endpoint may quote the key in its refusal
        }
        self._unanswered.write(json.dumps(line, ensure_ascii=False) + "\n")
        limit = getattr(self.config.answer_limits, fault)
        if self.faults[fault] <= limit * self.total:
            return
        most = next(text for text, _ in self._reasons.most_common() if text.startswith(f"{fault}: "))
        raise StageError(
            Problem(
                "bad_answers",
                f"{self._section}.answer_limits.{fault}",
                f"{self.faults[fault]:,} of the {self.asked:,} documents asked about so far {_WORDS[fault]}, of "
                f"{self.total:,} to ask about; at most {100 * limit:.3g} % are allowed; most often: "
                f"{most.removeprefix(f'{fault}: ')}",
                _FIXES[fault],
            )
        )

    def figures(self) -> dict[str, float]:
        counts = self.endpoint.counts
        names = ("requests", "cached", "repeated", "prompt_tokens", "completion_tokens")
        by_fault = {fault: self.faults[fault] for fault in FAULTS}
        answered = self.asked - self.faults["failed"]
        return {"asked": self.asked, "answered": answered, **by_fault, **{name: counts[name] for name in names}}

    def write_facts(self) -> None:
        """Write generation.json: the model, the sampling and the prompt, to the extent that they are part of the
        result."""
        config = self.config
        facts = {
            "model": config.endpoint.model,
            "model_version": config.endpoint.model_version,
            "sampling": config.sampling.model_dump(mode="json"),
            "seed": config.seed,
            "prompt": {
                "name": self.prompt.name,
                "digest": self.prompt.digest,
                "system": self.prompt.system,
                "text": self.prompt.text,
            },
        }
        (self._out / "generation.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", "utf8")

    def _begin(
        self, document: Document, chosen: set[str] | None
    ) -> tuple[AskedDocument, asyncio.Task[list[EndpointAnswer | EndpointFailure]] | None]:
        sources = self.config.from_sources
        is_chosen = chosen is None or document.id in chosen
        if not is_chosen or (sources is not None and source_name(document.source) not in sources):
            return AskedDocument(document), None
        pieces = [piece for piece in pieces_of(document.text, self.config.cut_characters) if piece.strip()]
        if not pieces:
            return AskedDocument(document), None
        return AskedDocument(document, pieces), self._start(self._ask(document, pieces))

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._runner.get_loop().create_task(work)
        task.add_done_callback(
            lambda ended: ended.cancelled() or ended.exception()
        )  # of several that fail one is raised
        return task

    async def _ask(self, document: Document, pieces: Sequence[str]) -> list[EndpointAnswer | EndpointFailure]:
        """The answers of all samples, one after the other, each to all pieces."""
        requests = []
        for sample in range(self.config.samples):
            for number, piece in enumerate(pieces):
                try:
                    messages = self.prompt.messages(document, piece)
                except Unreadable as why:
                    return [EndpointFailure(str(why))]
                requests.append(Request(messages, sample, self._seed(document, sample, number)))
        return await asyncio.gather(*map(self.endpoint.ask, requests))

    def _seed(self, document: Document, sample: int, piece: int) -> int | None:
        if self.config.seed is None:
            return None
        named = f"{self.config.seed}/{document.id}/{sample}/{piece}"
        return int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big") >> 1

    async def _until_done(
        self, task: asyncio.Task[Any], waiting: Iterable[tuple[AskedDocument, asyncio.Task[Any] | None]]
    ) -> None:
        """Return once a task is done, or raise what a later one raised: no more is then worth asking."""
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_S)
            self._run.stop_if_cancelled()
            for _, other in waiting:
                if other is not None and other.done() and (error := other.exception()) is not None:
                    raise error

    async def _end(self) -> None:
        """End what is under way, and the connections."""
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.endpoint.close()

    def _take(self, asked_document: AskedDocument, answers: Sequence[EndpointAnswer | EndpointFailure]) -> None:
        self.asked += 1
        size = len(asked_document.pieces)
        if failed := next((answer for answer in answers if isinstance(answer, EndpointFailure)), None):
            asked_document.fault, asked_document.reason = "failed", failed.reason
        else:
            received = [answer for answer in answers if isinstance(answer, EndpointAnswer)]
            faults = [answer.fault for answer in received]
            asked_document.fault = next((fault for fault in FAULTS if fault in faults), "")
            asked_document.reason = _REASONS.get(asked_document.fault, "")
            samples = [received[start : start + size] for start in range(0, len(received), size)]
            bad = {"failed", "empty"} if self.config.keep_truncated else {"failed", "empty", "truncated"}
            asked_document.samples = [
                some for some in samples if all(answer.text.strip() and answer.fault not in bad for answer in some)
            ]
        if asked_document.fault:
            self.fault(asked_document, asked_document.fault, asked_document.reason)

    def _flush(self) -> None:
        if self._rows:
            self._provenance.write_table(pa.Table.from_pylist(self._rows, PROVENANCE))
            self._rows = []


_WORDS = {
    "failed": "got no answer",
    "truncated": "got an answer that was cut off",
    "empty": "got an empty answer",
    "unparsable": "got an answer without any of the requested content",
}
_FIXES = {
    "failed": "look at the reason, the endpoint's log and aux/unanswered.jsonl; shorten cut_characters where texts are "
    "too long for the model; or raise the limit. Answers so far are kept",
    "truncated": "raise sampling.max_tokens, shorten cut_characters, or raise the limit. Answers so far are kept",
    "empty": "try the prompt at the endpoint by hand, or raise the limit. Answers so far are kept",
    "unparsable": "try the prompt at the endpoint by hand, use a better model, or raise the limit. Answers so far are "
    "kept",
}
_REASONS = {
    "failed": "the endpoint's content filter",
    "truncated": "it reached sampling.max_tokens",
    "empty": "no text",
}


def chosen_documents(config: GenerationConfig, section: str, artifact: Path) -> tuple[set[str] | None, int]:
    """The ids of the documents to ask about, None for all of the sources, and their number. Raises StageError
    `unknown_source`, `nothing_to_ask`."""
    ids: list[str] = []
    known: set[str] = set()
    for part in document_parts(artifact):
        table = read_table(part, ["id", "source"])
        names = [source_name(source) for source in table["source"].to_pylist()]
        known.update(names)
        chosen_names = set(names) if config.from_sources is None else set(config.from_sources)
        ids += [id for id, name in zip(table["id"].to_pylist(), names, strict=True) if name in chosen_names]
    key = f"{section}.from_sources"
    if problems := [problem for name in config.from_sources or () for problem in unknown_source(key, name, known)]:
        raise StageError(*problems)
    if not ids:
        raise stage_error("nothing_to_ask", section, "expected documents to send to the model, found none")
    if config.max_documents is None or len(ids) <= config.max_documents:
        return None, len(ids)
    chosen = set(nsmallest(config.max_documents, set(ids)))
    return chosen, sum(id in chosen for id in ids)


def check_name(name: str, section: str, facts: Mapping[str, SourceFacts]) -> None:
    """Raise StageError `source_name_taken` where the documents have a source of the name that what is made gets."""
    if name in facts:
        message = f"the documents already have a source named {name}"
        raise stage_error("source_name_taken", f"{section}.name", message, "choose another name for the generated text")
