"""The expected form of a stage's payload, for folders that were made elsewhere."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus.model_folders.folder import broken_file, folder_problems
from corpus.model_folders.pretrained import non_finite_problem, non_finite_tensors
from infra.errors import ConfigError, Problem, StageError, quoted
from infra.io.foreign import dangers
from infra.io.json import parse_json, read_json
from tasks.stages import STAGES

if TYPE_CHECKING:
    import pyarrow as pa

DOCUMENT_COLUMNS = ("id", "text", "source", "group")


def check_payload(stage: str, folder: Path) -> None:
    """Raise ConfigError with everything that keeps `folder` from being this stage's payload."""
    if stage not in PAYLOADS:
        near = difflib.get_close_matches(stage, PAYLOADS, n=1, cutoff=0.4)
        fix = f"did you mean {near[0]}?" if near else f"stages that can be imported: {', '.join(PAYLOADS)}"
        raise ConfigError(Problem("unknown_stage", stage, "no artifact of this stage can be imported", fix))
    if folder.is_file():
        fix = "unpack an archive yourself, and inspect its content: tar --no-same-owner -xf ARCHIVE -C EMPTY_FOLDER"
        raise ConfigError(Problem("not_a_folder", str(folder), "expected a folder, but this is a file", fix))
    if not folder.is_dir():
        raise ConfigError(Problem("missing_folder", str(folder), "no such folder"))
    if problems := [Problem(danger.code, str(danger.path), danger.message, danger.fix) for danger in dangers(folder)]:
        raise ConfigError(*problems)
    if problems := [Problem("not_a_payload", str(path), message) for path, message in PAYLOADS[stage](folder)]:
        raise ConfigError(*problems)


def describe(folder: Path) -> str:
    """A headline for a payload, e.g. "imported: 3 files, 12.4 MB"."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"imported: {len(sizes):,} files, {sum(sizes) / 1e6:.1f} MB"


Faults = Iterator[tuple[Path, str]]


def _documents(folder: Path) -> Faults:
    parts = sorted((folder / "documents").glob("part-*.parquet"))
    if not parts:
        yield folder / "documents", "expected documents/part-*.parquet in this folder"
        return
    from corpus.documents.selection import SCHEMA, TEXT_PART

    texts: set[Path] = set()
    for part in parts:
        schema = yield from _parquet(part)
        if schema is None:
            continue
        name = (schema.metadata or {}).get(TEXT_PART, b"").decode()
        if not name:
            yield from _lacking(part, schema)
        elif schema.remove_metadata() != SCHEMA:
            yield (
                part,
                f"expected the columns {', '.join(SCHEMA.names)}, with the types of corpus/documents/selection.py",
            )
        elif Path(name).name != name:
            yield part, f"names the text part {name}; expected a file of the folder text/ next to documents/"
        else:
            texts.add(folder / "text" / name)
    for text in sorted(texts):
        if not text.is_file():
            yield text, "no such file, but documents/ names it; copy the folder text/ too"
            continue
        schema = yield from _parquet(text)
        if schema is not None:
            yield from _lacking(text, schema)


def _parquet(file: Path) -> Generator[tuple[Path, str], None, pa.Schema | None]:
    """The schema of a Parquet file; None, with what is wrong, where it is none."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_schema(file)
    except (OSError, pa.ArrowInvalid) as error:
        yield file, f"not a Parquet file: {error}".splitlines()[0]
        return None


def _lacking(file: Path, schema: pa.Schema) -> Faults:
    import pyarrow as pa

    wrong = [name for name in DOCUMENT_COLUMNS if name not in schema.names or schema.field(name).type != pa.string()]
    if wrong:
        yield (
            file,
            f"expected the string columns {', '.join(DOCUMENT_COLUMNS)}; wrong: {', '.join(wrong)}",
        )


def _shards(folder: Path) -> Faults:
    for side in ("train", "validation"):
        yield from _mds(folder / side)
    yield from _json_object(folder / "meta.json", "vocab_size", "sequence_length", "train_tokens", "validation_tokens")


def _mds(folder: Path) -> Faults:
    index = folder / "index.json"
    faults = list(_json_object(index, "shards"))
    yield from faults
    if faults:
        return
    try:
        for number, shard in enumerate(read_json(index)["shards"]):
            if shard["format"] != "mds":
                yield index, f"expected shards in the MDS format, not {quoted(shard['format'])}"
                return
            names = [str(shard[key]["basename"]) for key in ("raw_data", "zip_data") if shard.get(key)]
            if not any((folder / name).is_file() for name in names):
                yield (
                    index,
                    f"names {', '.join(map(quoted, names)) or f'no file for shard {number}'}, which does not exist",
                )
    except (LookupError, TypeError, ValueError, AttributeError, OSError) as error:
        yield index, f"expected shards with format and raw_data or zip_data: {type(error).__name__}: {error}"


def _tokenizer(folder: Path) -> Faults:
    yield from _json_object(folder / "tokenizer.json", "model")
    yield from _json_object(folder / "tokenizer_config.json")


def _model(folder: Path) -> Faults:
    wrong = list(_json_object(folder / "config.json"))
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        wrong.append((folder, "expected *.safetensors in this folder"))
    wrong += [(path, message) for path in weights if (message := broken_file(path))]
    wrong = wrong or [(folder, problem.message) for problem in folder_problems(folder, "")]
    yield from wrong
    if wrong:
        return
    try:
        names = non_finite_tensors(folder)
    except StageError as error:
        yield folder, error.problems[0].message
    else:
        if names:
            yield folder, non_finite_problem(names, "").message


def _lines(*keys: str) -> Callable[[Path], Faults]:
    def check(folder: Path) -> Faults:
        for name in ("train.jsonl", "heldout.jsonl"):
            yield from _json_lines(folder / name, keys)

    return check


def _json_lines(path: Path, keys: tuple[str, ...]) -> Faults:
    if not path.is_file():
        yield path, f"expected a file of JSON lines with the keys {', '.join(keys)}"
        return
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record: Any = parse_json(line)
            except ValueError:
                record = None
            texts = isinstance(record, dict) and all(isinstance(record.get(key), str) for key in keys)
            if not texts:
                yield Path(f"{path}:{number}"), f"expected a JSON object with the string keys {', '.join(keys)}"
                return


def _json_object(path: Path, *keys: str) -> Faults:
    try:
        data = read_json(path)
    except FileNotFoundError:
        yield path, "no such file, but this stage's payload has one"
        return
    except ValueError as error:
        yield path, f"not valid JSON: {error}"
        return
    missing = [key for key in keys if key not in data] if isinstance(data, dict) else list(keys) or ["an object"]
    if missing:
        yield path, f"expected the keys {', '.join(missing)}"


_CHECKS: dict[str, Callable[[Path], Faults]] = {
    "documents": _documents,
    "tokenizer": _tokenizer,
    "shards": _shards,
    "instructions": _lines("id", "prompt", "response", "source"),
    "preferences": _lines("id", "prompt", "chosen", "rejected", "source"),
    "model": _model,
    "reward_model": _model,
}
"""The kinds of artifacts that can be imported, each with a check that yields (path, what was expected)."""
_FETCHED = ("remote_shards",)
"""Stages whose artifacts name bytes elsewhere: there is nothing to import."""

PAYLOADS: dict[str, Callable[[Path], Faults]] = {
    name: _CHECKS[stage.makes] for name, stage in STAGES.items() if stage.makes in _CHECKS and name not in _FETCHED
}
"""The stages whose artifacts can be imported, each with its check."""
