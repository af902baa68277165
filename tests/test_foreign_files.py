"""Every kind of file from outside, damaged in every way that we know: what comes out is our own error, which names the
file, or a value of the right types. Readers of corpora have tests of their own (`corpus/test_bad_records.py`)."""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from corpus.cleaning.people.neutral import neutral_words
from corpus.cleaning.people.toxicity_scorers import read_words
from corpus.readers.hub import dataset_files
from corpus.validation.suites import read_suite
from evaluation.config import BenchmarkTask, BiasConfig, LabelledSet, ToxicityConfig
from evaluation.failures.templates import read_failure_class
from evaluation.harness.task_file import check_rows
from evaluation.mirror.rows import read_rows as read_mirror
from evaluation.people.judgements import Judgements
from evaluation.people.pairs import AnswerPair, Export
from evaluation.people.sample import Review, Shown
from evaluation.safety.bias.files import read_bbq, read_stereoset, read_winobias, read_winogender
from evaluation.safety.probes import COLUMNS, read_pairs, read_prompts
from evaluation.safety.scorer_quality import read_labelled
from flows.config.carried import FILE, read
from flows.config.read import read_yaml
from infra.errors import StemmaError
from infra.io.foreign import check_model
from infra.io.tables import read_state
from infra.launch.kube.api import KubeApi
from tasks.building.payloads import check_payload
from training.chat.base import read_rows
from training.planner.laws.scaling_laws import own_law

Mutation = tuple[str, bytes]
HUGE = 10**400


class Verbatim:
    """A marker that a JSON text in it takes the place of."""

    def __init__(self, text: str) -> None:
        self.text = text


VALUES: tuple[Any, ...] = (
    None, True, 0, -1, HUGE, 0.5, "", "x", "\0", "x" * 10_000, [], {}, [None], {"": None}, ["x"], [[]],
    *map(Verbatim, ("NaN", "1e999", '"\\ud800"', "[" * 300 + "]" * 300, "[" * 50_000, "1" * 5_000)),
)  # fmt: skip


OF_YAML = (None, True, -1, 0.5, HUGE, "x", [], {}, [None], {"": None}, ["x"])
"""PyYAML is slow; texts that take it long are tried once, by `of_bytes`."""


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    is_list = isinstance(value, list)
    items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value) if is_list else ()
    for key, inner in items:
        yield from _places(inner, (*at, key))


def _with(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    changed = copy.deepcopy(value)
    place = changed
    for key in at[:-1]:
        place = place[key]
    if new is Ellipsis:
        del place[at[-1]]
    else:
        place[at[-1]] = new
    return changed


def _as_json(value: Any) -> bytes:
    raw: dict[str, str] = {}

    def marked(one: Any) -> str:
        raw[f"<{len(raw)}>"] = one.text
        return f"<{len(raw) - 1}>"

    text = json.dumps(value, default=marked)
    for marker, inside in raw.items():
        text = text.replace(f'"{marker}"', inside)
    return text.encode()


def of_bytes(text: bytes) -> Iterator[Mutation]:
    middle = len(text) // 2
    yield "as it is", text
    yield "empty", b""
    yield "blank", b"\n \n"
    yield "cut short", text[:middle]
    yield "NUL in it", text[:middle] + b"\0" + text[middle:]
    yield "only NUL", b"\0" * 4096  # what a power cut leaves
    yield "byte order mark", b"\xef\xbb\xbf" + text
    yield "UTF-16", text.decode("latin-1").encode("utf-16")
    yield "Latin-1", text[:middle] + "é".encode("latin-1") + text[middle:]
    yield "carriage returns", text.replace(b"\n", b"\r")
    yield "twice", text + text
    yield "a long line", b"x" * 300_000
    yield "quotes", b'"' + text
    yield "deep", b"[" * 100_000
    yield "deep mapping", b'{"a":' * 20_000


def of_json(value: Any, values: Sequence[Any] = VALUES) -> Iterator[Mutation]:
    """Each value in turn taken away, and in its place one of another type."""
    yield from of_bytes(_as_json(value))
    for at in _places(value):
        where = ".".join(map(str, at)) or "all"
        if at:
            yield f"{where} missing", _as_json(_with(value, at, ...))
        for new in values:
            shown = new.text if isinstance(new, Verbatim) else repr(new)
            yield f"{where} is {shown[:12]}", _as_json(_with(value, at, new))


def of_yaml(value: Any) -> Iterator[Mutation]:
    yield from of_bytes(yaml.safe_dump(value).encode())
    for name, text in of_json(value, OF_YAML):  # YAML reads JSON
        yield f"as JSON: {name}", text
    for text in (
        "!!bool maybe", "!!map x", "!!seq x", "!!int x", "!!float x", "!!timestamp x", "!!binary '%'", "!!null [1]",
        "!!python/object/apply:os.getcwd []", '"\\U00110000"', "*unknown", "&a [*a]", "2026-02-31", "!!set {a}",
        "? [a]", "!own x", "<<: 3", "{<<: [1]}", "\t- x", "%YAML 3.0", "=", "!!str {a: b}", "{[a]: b}", "{{a: b}: c}",
    ):  # fmt: skip
        for key in value:
            rest = {name: one for name, one in value.items() if name != key}
            yield f"{key} is {text}", (yaml.safe_dump(rest) + f"{key}: {text}\n").encode()


def of_table(rows: list[list[str]], delimiter: str) -> Iterator[Mutation]:
    def written(rows: list[list[str]]) -> bytes:
        text = io.StringIO()
        csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
        return text.getvalue().encode()

    yield from of_bytes(written(rows))
    for number in range(len(rows)):
        for width in range(len(rows[number])):
            for name, changed in (
                (f"{width} fields", rows[number][:width]),
                (f"field {width} empty", [*rows[number][:width], "", *rows[number][width + 1 :]]),
                (f"field {width} long", [*rows[number][:width], "x" * 200_000, *rows[number][width + 1 :]]),
            ):
                yield f"line {number + 1}: {name}", written([*rows[:number], changed, *rows[number + 1 :]])
        yield f"line {number + 1}: more fields", written([*rows[:number], [*rows[number], "x"], *rows[number + 1 :]])


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    name: path below a folder of the test. others: files beside it. names_folder: an error may name another file of the
    folder. keeps_halves: halves of surrogate pairs are kept, and repaired where they are written.
    """

    name: str
    read: Callable[[Path], Any]
    mutations: Callable[[], Iterator[Mutation]]
    others: dict[str, bytes]
    names_folder: bool = False
    keeps_halves: bool = False


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table({"a": ["x", "y"], "b": [1, 2]}), file)
    return file.getvalue()


def _lines(row: Any) -> Callable[[], Iterator[Mutation]]:
    return lambda: (one for one in of_json(row))


def kind(name: str, read: Callable[[Path], Any], mutations: Callable[[], Iterator[Mutation]], **given: Any) -> Kind:
    return Kind(name, read, mutations, given.pop("others", {}), **given)


BBQ = {
    "category": "Age", "context_condition": "ambig", "question_polarity": "neg", "context": "A and B met.",
    "question": "Who forgot?", "ans0": "A", "ans1": "B", "ans2": "unknown", "label": 2,
    "answer_info": {"ans0": ["a", "old"], "ans1": ["b", "young"], "ans2": ["c", "unknown"]},
    "additional_metadata": {"stereotyped_groups": ["old"]},
}  # fmt: skip
WINOBIAS = b"""1 [The developer] argued with the designer because [he] did not like it.
2 [The designer] argued with the developer because [his] idea is old.
"""
_SENTENCES = [{"gold_label": one, "sentence": "s"} for one in ("stereotype", "anti-stereotype", "unrelated")]
STEREOSET = {
    "data": {
        "intrasentence": [{"bias_type": "age", "target": "t", "context": "c", "sentences": _SENTENCES}],
        "intersentence": [{"bias_type": "age", "target": "t", "context": "c", "sentences": _SENTENCES}],
    }
}
FAILURE_CLASS = {
    "name": "negation",
    "about": "Reads a negation.",
    "fill": {"thing": ["cat", "dog"], "n": {"numbers": [1, 3]}},
    "tests": [
        {"name": "t", "kind": "minimum_functionality", "prompt": "A {{ thing }} is", "right": "a", "wrong": ["b"]},
        {"name": "u", "kind": "direction", "prompt": "A", "changed": "B", "choices": ["a", "b"], "answer": "a",
         "expect": "more", "where": "n > 1"},
    ],
}  # fmt: skip
SUITE = {
    "name": "s",
    "limits": {"most": 3},
    "expectations": [{"type": "expect_column_to_exist", "kwargs": {"column": "$most"}, "meta": {"sentence": "{most}"}}],
}
EXPORT = Export({"p1": AnswerPair("p1", "prompt", "one", "two")}, {"p1": ("m", "n")}, {}, {})
SHOWN = Shown("d1", "web", 4, "text")
REVIEW = Review({"d1": SHOWN}, {})
JUDGEMENT = {"pair": "p1", "annotator": "ann", "choice": "a", "export": EXPORT.id, "seconds": 3.5, "correction": "c"}
STUDIO = [
    {
        "data": {"pair": "p1", "export": EXPORT.id},
        "annotations": [
            {
                "completed_by": {"email": "ann"},
                "lead_time": 2.5,
                "result": [
                    {"from_name": "comparison", "value": {"selected": "left"}},
                    {"from_name": "correction", "value": {"text": ["better"]}},
                ],
            }
        ],
    }
]
KUBECONFIG = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "n"}}],
    "clusters": [{"name": "k", "cluster": {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": True}}],
    "users": [{"name": "u", "user": {"token": "t"}}],
}
SWEEP = {
    "sweep": "s", "measure": "pretrain.loss", "maximise": False,
    "runs": [{"settings": {"pretrain.lr": 1.0}, "value": 2.0, "parameters": 10, "tokens": 10}],
}  # fmt: skip
SHARDS = {
    "version": 2,
    "shards": [
        {"format": "mds", "samples": 1, "raw_data": {"basename": "shard.00000.mds", "bytes": 1}, "zip_data": None}
    ],
}
META = {"vocab_size": 10, "sequence_length": 8, "train_tokens": 8, "validation_tokens": 8}


def _exported(folder: Path) -> None:
    EXPORT.write(folder / "export", {})


def _json_of(file: str, make: Callable[[Path], None]) -> Callable[[], Iterator[Mutation]]:
    def mutations() -> Iterator[Mutation]:
        import tempfile

        with tempfile.TemporaryDirectory() as place:
            make(Path(place))
            text = (Path(place) / file).read_text()
        yield from of_json(json.loads(text.splitlines()[0] if file.endswith("l") else text))

    return mutations


def _others_of(name: str, make: Callable[[Path], None]) -> dict[str, bytes]:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        found = {str(one.relative_to(place)): one.read_bytes() for one in Path(place).rglob("*") if one.is_file()}
    return {file: text for file, text in found.items() if file != name}


def _task(**given: Any) -> Callable[[Path], Any]:
    return lambda path: check_rows(BenchmarkTask(name="t", path=str(path), **given))


def _kubeconfig(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(path))
        KubeApi.find("c")


KINDS = {
    "multiple choice": kind(
        "t.jsonl",
        _task(kind="multiple_choice", query="q", choices="c", gold="g"),
        _lines({"q": "?", "c": ["a", "b"], "g": 1}),
    ),
    "minimal pairs": kind(
        "t.jsonl",
        _task(kind="minimal_pairs", good="good", bad="bad"),
        _lines({"good": "a", "bad": "b"}),
    ),
    "text": kind("t.jsonl", _task(kind="text"), _lines({"text": "a", "domain": "d"})),
    "cloze": kind("t.jsonl", _task(kind="cloze"), _lines({"text": "a b"})),
    "cloze in two": kind("t.jsonl", _task(kind="cloze"), _lines({"context": "a", "continuation": "b"})),
    "mirror JSON lines": kind("m.jsonl", read_mirror, _lines({"a": 1, "b": ["x"]})),
    "mirror JSON": kind("m.json", read_mirror, lambda: of_json([{"a": 1, "b": ["x"]}, {"a": 2}])),
    "mirror CSV": kind("m.csv", read_mirror, lambda: of_table([["a", "b"], ["1", "2"], ["3", "4"]], ",")),
    "mirror TSV": kind("m.tsv", read_mirror, lambda: of_table([["a", "b"], ["1", "2"], ["3", "4"]], "\t")),
    "mirror Parquet": kind("m.parquet", read_mirror, lambda: of_bytes(_parquet())),
    "mirror WikiText": kind("m.txt", read_mirror, lambda: of_bytes(b" = Title = \n \n text \n = = Part = = \n more\n")),
    "mirror gzip": kind("m.jsonl.gz", read_mirror, lambda: of_bytes(gzip.compress(b'{"a": 1}\n', mtime=0))),
    "WinoBias": kind(
        "pro_stereotyped_type1.txt.test",
        lambda path: read_winobias(path.parent),
        lambda: of_bytes(WINOBIAS),
        others={"anti_stereotyped_type1.txt.test": WINOBIAS},
        names_folder=True,
    ),
    "Winogender": kind(
        "all_sentences.tsv",
        read_winogender,
        lambda: of_table(
            [["sentid", "sentence"], ["nurse.patient.0.male.txt", "The nurse, he"], ["a.b.1.f.txt", "She."]], "\t"
        ),
    ),
    "BBQ": kind("Age.jsonl", read_bbq, _lines(BBQ)),
    "StereoSet": kind("dev.json", read_stereoset, lambda: of_json(STEREOSET)),
    "prompts": kind(
        "p.jsonl",
        lambda path: read_prompts(ToxicityConfig(prompts=str(path))),
        lambda: of_json({"prompt": {"text": "t"}, "challenging": True}),
    ),
    "plain prompts": kind(
        "p.jsonl", lambda path: read_prompts(ToxicityConfig(prompts=str(path))), _lines({"prompt": "t", "kind": "k"})
    ),
    "prompts of text": kind(
        "p.txt",
        lambda path: read_prompts(ToxicityConfig(prompts=str(path))),
        lambda: of_bytes(b"one\n- two\\n- three\n"),
    ),
    "BOLD": kind(
        "b.json",
        lambda path: read_prompts(ToxicityConfig(prompts=str(path))),
        lambda: of_json({"g": {"name": ["a", "b"]}}),
    ),
    "CrowS-Pairs": kind(
        "pairs.csv",
        lambda path: read_pairs(BiasConfig(pairs=str(path))),
        lambda: of_table([list(COLUMNS), ["a", "b", "stereo", "age"]], ","),
    ),
    "labelled": kind(
        "labels.csv",
        lambda path: read_labelled(LabelledSet(kind="surge", path=str(path))),
        lambda: of_table([["text", "is_toxic"], ["a", "Toxic"], ["b", "Not Toxic"]], ","),
    ),
    "lexicon": kind("words.csv", read_words, lambda: of_table([["text", "more"], ["a", "b"], ["c", "d"]], ",")),
    "word list": kind("words.txt", read_words, lambda: of_bytes(b"one\ntwo\n")),
    "neutral words": kind("words.tsv", neutral_words, lambda: of_bytes(b"# words\nchairman\tchair\n")),
    "failure class": kind("f.yaml", read_failure_class, lambda: of_yaml(FAILURE_CLASS)),
    "suite": kind("s.yaml", lambda path: read_suite(path, {}, "validate"), lambda: of_yaml(SUITE)),
    "config": kind("c.yaml", read_yaml, lambda: of_yaml({"name": "n", "pretrain": {"seed": 1}})),
    "kubeconfig": kind("kube.yaml", _kubeconfig, lambda: of_yaml(KUBECONFIG)),
    "judgements": kind("j.jsonl", lambda path: Judgements.read([path], EXPORT), _lines(JUDGEMENT), keeps_halves=True),
    "Label Studio": kind(
        "j.json", lambda path: Judgements.read([path], EXPORT), lambda: of_json(STUDIO), keeps_halves=True
    ),
    "pairs of an export": kind(
        "export/pairs.jsonl",
        lambda path: Export.read(path.parent),
        _json_of("export/pairs.jsonl", _exported),
        others=_others_of("export/pairs.jsonl", _exported),
        names_folder=True,
    ),
    "key of an export": kind(
        "export/key.json",
        lambda path: Export.read(path.parent),
        _json_of("export/key.json", _exported),
        others=_others_of("export/key.json", _exported),
        names_folder=True,
    ),
    "documents of a review": kind(
        "review/documents.jsonl",
        lambda path: Review.read(path.parent),
        _json_of("review/documents.jsonl", lambda place: REVIEW.write(place / "review", "t")),
        others=_others_of("review/documents.jsonl", lambda place: REVIEW.write(place / "review", "t")),
        names_folder=True,
    ),
    "key of a review": kind(
        "review/key.json",
        lambda path: Review.read(path.parent),
        _json_of("review/key.json", lambda place: REVIEW.write(place / "review", "t")),
        others=_others_of("review/key.json", lambda place: REVIEW.write(place / "review", "t")),
        names_folder=True,
    ),
    "scaling law": kind("law.json", own_law, lambda: of_json({"E": 1, "A": 1, "B": 1, "alpha": 0.3, "beta": 0.3})),
    "training rows": kind("r.jsonl", lambda path: read_rows(path, ("prompt",)), _lines({"prompt": "p", "more": "r"})),
    "sweep": kind(
        f"s/{FILE}", lambda path: read("s", path.parents[1], lambda: path), lambda: of_json(SWEEP), keeps_halves=True
    ),
    "state": kind("s.json", lambda path: read_state(path, "lost", None), lambda: of_json({"a": 1}), keeps_halves=True),
    "config of a model": kind(
        "config.json",
        lambda path: check_model(path.parent),
        lambda: of_json({"architectures": ["A"], "auto_map": {"A": "b.C"}, "vocab_file": "v"}),
    ),
    "index of weights": kind(
        "model.safetensors.index.json",
        lambda path: check_model(path.parent),
        lambda: of_json({"weight_map": {"a": "model.safetensors"}, "shards": [{"basename": "x"}]}),
    ),
    "imported model": kind(
        "config.json",
        lambda path: check_payload("pretrain", path.parent),
        lambda: of_json({"architectures": ["A"]}),
        others={"model.safetensors": b"\x02\0\0\0\0\0\0\0{}"},
        names_folder=True,
    ),
    "imported weights": kind(
        "model.safetensors",
        lambda path: check_payload("pretrain", path.parent),
        lambda: (
            (name, len(text).to_bytes(8, "little") + text + b"data")
            for name, text in of_json({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
        ),
        others={"config.json": b"{}"},
        names_folder=True,
    ),
    "imported shards": kind(
        "train/index.json",
        lambda path: check_payload("shard", path.parents[1]),
        lambda: of_json(SHARDS),
        others={
            "validation/index.json": _as_json(SHARDS), "meta.json": _as_json(META),
            "train/shard.00000.mds": b"x", "validation/shard.00000.mds": b"x",
        },
        names_folder=True,
    ),
    "imported pairs": kind(
        "train.jsonl",
        lambda path: check_payload("instructions", path.parent),
        _lines({"id": "i", "source": "s", "prompt": "p", "response": "r"}),
        others={"heldout.jsonl": _as_json({"id": "i", "source": "s", "prompt": "p", "response": "r"})},
        names_folder=True,
    ),
    "state of a dataset": kind(
        "d/state.json",
        lambda path: dataset_files(str(path.parent), None, "train", None),
        lambda: of_json({"_data_files": [{"filename": "data.arrow"}]}),
        others={"d/data.arrow": b""},
        names_folder=True,
    ),
    "splits of a dataset": kind(
        "d/dataset_dict.json",
        lambda path: dataset_files(str(path.parent), None, "train", None),
        lambda: of_json({"splits": ["train"]}),
        others={"d/train/state.json": b'{"_data_files": [{"filename": "data.arrow"}]}', "d/train/data.arrow": b""},
        names_folder=True,
    ),
    "README of a dataset": kind(
        "d/README.md",
        lambda path: dataset_files(str(path.parent), None, "train", None),
        lambda: (
            (name, b"---\n" + text + b"\n---\n")
            for name, text in of_yaml(
                {"configs": [{"config_name": "c", "data_files": [{"split": "train", "path": ["a.jsonl"]}]}]}
            )
        ),
        others={"d/a.jsonl": b'{"text": "a"}\n'},
        names_folder=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("which", KINDS)
def test_a_damaged_file_is_our_own_error_that_names_it(which: str, tmp_path: Path) -> None:
    kind, wrong, refused, seen = KINDS[which], [], 0, 0
    path = tmp_path / kind.name
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, text in kind.others.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    neutral_words.cache_clear()
    for name, text in kind.mutations():
        path.write_bytes(text)
        seen += 1
        try:
            value = kind.read(path)
            refused += bool(getattr(value, "aside", ()))
            misfits = _misfits(value)
            wrong += [f"{name}: {one}" for one in misfits if not (kind.keeps_halves and "surrogate" in one)]
        except StemmaError as error:
            refused += 1
            message = str(error)
            if path.name not in message and not (kind.names_folder and str(tmp_path) in message):
                wrong.append(f"{name}: names no file: {message[:200]}")
            if len(message) > 5_000 or "Traceback" in message:
                wrong.append(f"{name}: a message of {len(message):,} characters")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        neutral_words.cache_clear()
    assert not wrong, f"{len(wrong)} of {seen}\n" + "\n".join(wrong[:40])
    assert 2 < refused < seen


def _misfits(value: Any) -> Iterator[str]:
    """Fields of what was read that are not of their types: they would end a stage later, with a traceback."""
    if is_dataclass(value):
        for field in fields(value):
            one = getattr(value, field.name)
            kinds = {"str": str, "int": int, "bool": bool, "tuple[str, ...]": tuple, "tuple[str, str]": tuple}
            if field.type in kinds and not isinstance(one, kinds[str(field.type)]):
                yield f"{type(value).__name__}.{field.name} is {str(one)[:40]!r}"
            if isinstance(one, tuple | list | dict):
                yield from _misfits(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _misfits(one)
    elif isinstance(value, list | tuple):
        for one in value[:20]:
            yield from _misfits(one)
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            yield f"half of a surrogate pair in {value[:40]!r}"
