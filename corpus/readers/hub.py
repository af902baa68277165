"""Hugging Face datasets on disk: saved ones, folders of data files, and the contents of the hub's cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from corpus.readers.folders import is_record_file, is_side_file, split_of
from infra.errors import stage_error
from infra.io.bounded import read_bounded
from infra.io.contained import contained, contained_glob
from infra.io.json import BadJson, parse_json
from infra.io.sources import files_below
from infra.io.yaml import BadYaml, read_plain

SPLITS, STATE = "dataset_dict.json", "state.json"
"""Files that `save_to_disk` writes next to the splits of a dataset, and next to the files of a split."""
NOT_DATA = {"dataset_info.json", SPLITS, STATE, "dataset_infos.json"}
CARD = "README.md"
CARDS = (CARD, ".huggingface.yaml")
"""Files in which the `datasets` library looks for the files of a dataset's configurations."""
INDEX_BYTES = 50_000_000
CORRECT = "correct the dataset card, or set split and subset for the files that it lists"


def dataset_files(dataset: str, subset: str | None, split: str, revision: str | None) -> tuple[Path, ...]:
    """The data files of one split.

    Args:
        dataset: a folder (`save_to_disk`, or data files) or a name on the hub, which is looked up in the local
            cache.

    Raises StageError: `missing_source` for one that is not there, with the command that fetches it; `wrong_split` with
    the splits that there are; `unsafe_file` for an index or a link that leads out of the folder, `bad_index` for an
    index that cannot be read, each naming the file and the key.
    """
    folder = Path(dataset) if Path(dataset).is_dir() else _cached(dataset, revision)
    if (folder / SPLITS).exists():
        index_path, content = _index(folder, SPLITS)
        splits = _texts(content.get("splits"), f"{index_path}: splits")
        if split not in splits:
            raise _no_split(dataset, split, splits)
        folder = contained(folder, split, f"{index_path}: splits")
    if (folder / STATE).exists():
        index_path, content = _index(folder, STATE)
        rows = _rows(content.get("_data_files"), f"{index_path}: _data_files")
        return tuple(
            contained(folder, row.get("filename"), f"{index_path}: _data_files.{number}.filename")
            for number, row in enumerate(rows)
        )
    configured = _configured_patterns(folder, subset)
    if configured:
        if split not in configured:
            raise _no_split(dataset, split, configured)
        return tuple(sorted({path for pattern, key in configured[split] for path in _matches(folder, pattern, key)}))
    files = [path for path in sorted(files_below(folder)) if _is_data(path.relative_to(folder))]
    if subset:
        files = [path for path in files if subset in path.relative_to(folder).parts]
    return _files_of_split(dataset, folder, files, split)


def check_dataset(folder: Path) -> None:
    """Check a dataset's folder before the `datasets` library reads it, which follows every link and pattern.

    Raises:
        StageError: `unsafe_file` for a link, or a pattern of the dataset card, that leads out of the folder;
            `bad_index` for a card that cannot be read.
    """
    for _ in files_below(folder):
        pass
    for card in CARDS:
        configs, card_path = _configs(folder, card)
        for number, row in configs:
            key = f"{card_path}: configs.{number}"
            if row.get("data_dir") is not None:
                contained(folder, row["data_dir"], f"{key}.data_dir")
            for pattern, location in (entry for entries in _patterns(row, key).values() for entry in entries):
                contained(folder, pattern, location)


def _matches(folder: Path, pattern: Any, key: str) -> list[Path]:
    """The files that a pattern of a dataset card matches. Raises StageError as `contained_glob`, and `missing_source`
    where there are none."""
    files = contained_glob(folder, pattern, key)
    if not files:
        raise stage_error(
            "missing_source", key, f"there is no file {pattern} in {folder}", "download the dataset again"
        )
    return files


def _index(folder: Path, name: str) -> tuple[Path, dict[str, Any]]:
    """The path of an index that `datasets` wrote, and its content, a JSON object. Raises StageError `bad_index`."""
    path = contained(folder, name, str(folder))
    try:
        content = parse_json(read_bounded(path, INDEX_BYTES), nan=True)
    except BadJson as error:
        raise stage_error("bad_index", str(path), str(error), "download the dataset again") from None
    if not isinstance(content, dict):
        raise stage_error("bad_index", str(path), "expected a JSON object", "download the dataset again")
    return path, content


def _texts(value: Any, key: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise stage_error("bad_index", key, "expected a list of texts", "download the dataset again")
    return value


def _rows(value: Any, key: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise stage_error("bad_index", key, "expected a list of objects", "download the dataset again")
    return value


def _files_of_split(dataset: str, folder: Path, files: list[Path], split: str) -> tuple[Path, ...]:
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(split_of(path.relative_to(folder).as_posix(), split), []).append(path)
    unnamed = by_split.pop("", [])
    if unnamed and set(by_split) <= {"train"}:
        # Files that name no split are the training data, as on the hub; `train` in the name of one further file,
        # such as train_timetables.jsonl, names none either.
        by_split = {"train": sorted([*unnamed, *by_split.get("train", [])])}
    elif unnamed and split not in by_split and split == "train":
        by_split["train"] = unnamed
    elif unnamed and split == "train" and (candidates := [path for path in unnamed if ".txt" not in path.suffixes]):
        raise stage_error(
            "wrong_split",
            dataset,
            f"expected every data file to name its split, as others here do ({by_split[split][0].name}), found "
            f"{len(candidates):,} that name{'s' * (len(candidates) == 1)} none: {candidates[0].relative_to(folder)}",
            "use kind: files with the paths of the training files, or move the others elsewhere",
        )
    if split not in by_split:
        raise _no_split(dataset, split, by_split)
    return tuple(by_split[split])


def _is_data(path: Path) -> bool:
    return not is_side_file(path.as_posix()) and path.name not in NOT_DATA and is_record_file(path.name)


def _configured_patterns(folder: Path, subset: str | None) -> dict[str, list[tuple[Any, str]]]:
    """Split → patterns with their keys, from the front matter of the dataset's README; empty where it lists none."""
    configs, card_path = _configs(folder, CARD)
    if subset:
        chosen = [(number, row) for number, row in configs if str(row.get("config_name")) == subset]
    else:
        # As on the hub: the one that is marked, the one of that name, else the first.
        chosen = sorted(
            configs, key=lambda entry: (entry[1].get("default") is not True, entry[1].get("config_name") != "default")
        )
    return _patterns(chosen[0][1], f"{card_path}: configs.{chosen[0][0]}") if chosen else {}


def card_lists_files(folder: Path) -> bool:
    """Return True if the card of a dataset's folder lists the files of its splits. Raises StageError as
    `dataset_files`."""
    return bool(_configured_patterns(folder, None))


def _configs(folder: Path, card: str) -> tuple[list[tuple[int, dict[str, Any]]], Path]:
    """The configurations in the YAML of a dataset card with their numbers, and its path. Raises StageError `bad_index`
    for a card that cannot be read."""
    if not (folder / card).is_file():
        return [], folder / card
    path = contained(folder, card, str(folder))
    text = read_bounded(path, INDEX_BYTES).decode("utf8", "replace").replace("\r\n", "\n")
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL) if card == CARD else re.match(r"(.*)", text, re.DOTALL)
    if not front:
        return [], path
    try:
        facts = read_plain(front.group(1), tags=True)
    except BadYaml as error:
        line = f":{error.line + (card == CARD)}" if error.line else ""
        message = f"its front matter is not YAML: {error}"
        raise stage_error("bad_index", f"{path}{line}", message, "correct it, or remove it") from None
    config_rows = facts.get("configs") if isinstance(facts, dict) else None
    rows = enumerate(config_rows) if isinstance(config_rows, list) else ()
    return [(number, row) for number, row in rows if isinstance(row, dict)], path


def _patterns(config: Mapping[str, Any], key: str) -> dict[str, list[tuple[Any, str]]]:
    """Split → patterns of files with their keys, of one configuration. Raises StageError `bad_index`."""
    data_files = config.get("data_files")
    key = f"{key}.data_files"
    if data_files is None:
        return {}
    if isinstance(data_files, str):
        return {"train": [(data_files, key)]}
    if not isinstance(data_files, list):
        raise stage_error("bad_index", key, "expected a pattern of files, or a list of them with their splits", CORRECT)
    patterns: dict[str, list[tuple[Any, str]]] = {}
    for number, row in enumerate(data_files):
        if isinstance(row, str):
            patterns.setdefault("train", []).append((row, f"{key}.{number}"))
            continue
        split, paths = (row.get("split", "train"), row.get("path")) if isinstance(row, dict) else (None, None)
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(split, str) or not isinstance(paths, list) or not paths:
            raise stage_error("bad_index", f"{key}.{number}", "expected a pattern, or a split with its path", CORRECT)
        patterns.setdefault(split, []).extend((path, f"{key}.{number}.path") for path in paths)
    return patterns


def _cached(dataset: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(dataset, repo_type="dataset", revision=revision, local_files_only=True))
    except HFValidationError:
        raise stage_error(
            "missing_source",
            dataset,
            "no such folder, and not the name of a dataset on the Hub",
            "correct it in the config",
        ) from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        option = f" --revision {revision}" if revision else ""
        raise stage_error(
            "missing_source",
            dataset,
            f"no such folder, and no dataset of this name in the Hub's cache ({constants.HF_HUB_CACHE}); runs fetch "
            "nothing themselves",
            f"hf download --repo-type dataset {dataset}{option}",
        ) from None


def _no_split(dataset: str, split: str, splits: Iterable[str]) -> Exception:
    available = ", ".join(sorted(set(splits))) or "no data files"
    return stage_error(
        "wrong_split", dataset, f"expected the split {split}; the splits are: {available}", "set split or subset"
    )
