"""Documents that a language model rewrites, or writes from others.

python -m corpus.generation.stage --config generate.yaml --input documents=DIR --out DIR
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from corpus.documents.parts import Document, DocumentWriter, document_parts, make_document
from corpus.documents.passes import write_json
from corpus.documents.selection import link_selections, write_selection
from corpus.documents.sources import SourceCounts, SourceFacts, read_sources, write_sources
from corpus.generation.asking import AskedDocument, Asking, check_name
from corpus.generation.config import GenerateConfig
from corpus.generation.prompts import metadata_of, prompt_of
from infra.errors import stage_error
from infra.io.files import link_or_copy
from infra.run import Result, Run

SECTION = "generate"


def generate(config: GenerateConfig, inputs: Mapping[str, Path], out_dir: Path, run: Run) -> Result:
    """Write documents/ (with text/, see `corpus.documents.selection`), sources.json and generation.json;
    aux/provenance.parquet with the original text of each document that was made, aux/unanswered.jsonl, aux/counts.json.

    What is made comes after all originals, in their order, in the group of its original and under the source
    `config.name`. The bytes follow from the answers alone, which are kept in `run.answers_dir`.
    Raises StageError as `Asking.documents` does; `source_name_taken`; `nothing_left` if no document comes of it.
    """
    facts = read_sources(inputs["documents"])
    check_name(config.name, SECTION, facts)
    prompt = prompt_of(config, config.task)
    made_dir = run.work_dir / "made"
    shutil.rmtree(made_dir, ignore_errors=True)
    originals, counts, left_out = SourceCounts(), SourceCounts(), Counter[str]()
    seen: set[int] = set()
    with (
        Asking(config, prompt, SECTION, inputs["documents"], out_dir, run) as asking,
        DocumentWriter(made_dir / "documents") as writer,
    ):
        for asked_document in asking.documents():
            originals.add(asked_document.document)
            for sample, answers in enumerate(asked_document.samples):
                made = _made(
                    asked_document, "\n\n".join(answer.text.strip() for answer in answers), asking, prompt.language
                )
                if made.id == asked_document.document.id or int(made.id, 16) in seen:
                    left_out["unchanged" if made.id == asked_document.document.id else "repeated"] += 1
                    continue
                seen.add(int(made.id, 16))
                asking.made(made.id, asked_document, sample, answers[0])
                writer.write(made)
                counts.add(made)
        asking.write_facts()
    read, text_bytes = originals.documents.total(), writer.text_bytes
    if config.keep_originals:
        counts = SourceCounts.sum([originals.as_json(), counts.as_json()])
        text_bytes = counts.bytes.total()
    documents = counts.documents.total()
    if not documents:
        raise stage_error("nothing_left", SECTION, "no document was made", "see aux/unanswered.jsonl")
    _link(inputs["documents"] if config.keep_originals else None, made_dir, out_dir, run)
    language = prompt.language or _only_language(facts)
    described = {**facts, config.name: SourceFacts(licence=config.licence, language=language)}
    write_sources(out_dir, described, counts)
    figures = {"documents": documents, "text_bytes": text_bytes, "made": writer.documents, **asking.figures()}
    figures |= {"left_unchanged": left_out["unchanged"], "left_repeated": left_out["repeated"]}
    dropped = {} if config.keep_originals else {"replaced by the text that was made of it": read}
    report = {"read": read, "kept": documents, "kept_bytes": text_bytes, "dropped": dropped, **figures}
    write_json(out_dir / "aux" / "counts.json", report)
    share = f"{asking.asked:,} of {read:,}" if asking.asked < read else f"{read:,}"
    headline = f"{writer.documents:,} documents made from {share} by {config.endpoint.model} ({prompt.name})"
    return Result(figures, headline)


def _made(asked_document: AskedDocument, text: str, asking: Asking, language: str | None) -> Document:
    original, config = asked_document.document, asking.config
    origin = {"from": original.id, "model": config.endpoint.model, "prompt": asking.prompt.name}
    metadata = json.dumps({**metadata_of(original), "generated": origin}, ensure_ascii=False)
    source = f"{config.name}/{original.source}"
    return make_document(text, source, original.group, language or original.language, metadata)


def _only_language(facts: Mapping[str, SourceFacts]) -> str:
    languages = {source.language for source in facts.values()}
    return languages.pop() if len(languages) == 1 else ""


def _link(originals: Path | None, made: Path, out_dir: Path, run: Run) -> None:
    """Join the parts of the originals, whose text is linked, and those of what was made."""
    folders = []
    for index, part in enumerate(document_parts(originals) if originals else []):
        folder = run.work_dir / "originals" / f"{index:05}"
        shutil.rmtree(folder, ignore_errors=True)
        write_selection(part, np.arange(pq.read_metadata(part).num_rows), folder)
        folders.append(folder)
    link_selections(folders, out_dir)
    linked = len(list((out_dir / "documents").iterdir()))
    for number, part in enumerate(sorted((made / "documents").iterdir()), linked):
        link_or_copy(part, out_dir / "documents" / f"part-{number:05}.parquet")


if __name__ == "__main__":
    from infra.alone import main

    main(generate, GenerateConfig)
