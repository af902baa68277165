"""Hugging Face datasets on disk: saved ones, folders of data files, and what lies in the hub's cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from infra.errors import stage_error
from infra.json import read_json
from infra.sources import files_below
from infra.yaml import BadYaml, read_plain

SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json", ".txt")
COMPRESSIONS = ("", ".gz", ".zst", ".bz2", ".xz")
# The words that the hub itself looks for in file names where a dataset does not list its files.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
NOT_DATA = {"dataset_info.json", "dataset_dict.json", "state.json", "dataset_infos.json"}


def dataset_files(dataset: str, subset: str | None, split: str, revision: str | None) -> tuple[Path, ...]:
    """The data files of one split.

    dataset: a folder (`save_to_disk`, or data files) or a name on the hub, which is looked up in the local cache.
    Raises StageError: `missing_source` for one that is not there, with the command that fetches it; `wrong_split` with
    the splits that there are.
    """
    folder = Path(dataset) if Path(dataset).is_dir() else _cached(dataset, revision)
    if (folder / "dataset_dict.json").exists():
        splits = read_json(folder / "dataset_dict.json")["splits"]
        if split not in splits:
            raise _no_split(dataset, split, splits)
        folder = folder / split
    if (folder / "state.json").exists():
        state = read_json(folder / "state.json")
        return tuple(folder / row["filename"] for row in state["_data_files"])
    listed = _listed(folder, subset)
    if listed:
        if split not in listed:
            raise _no_split(dataset, split, listed)
        return tuple(sorted({path for pattern in listed[split] for path in folder.glob(pattern) if path.is_file()}))
    files = [path for path in sorted(files_below(folder)) if _is_data(path.relative_to(folder))]
    if subset:
        files = [path for path in files if subset in path.relative_to(folder).parts]
    return _of_split(dataset, folder, files, split)


def _of_split(dataset: str, folder: Path, files: list[Path], split: str) -> tuple[Path, ...]:
    by_split: dict[str, list[Path]] = {}
    for path in files:
        by_split.setdefault(_split_of(path.relative_to(folder).as_posix(), split), []).append(path)
    # Files that name no split are the training data, as on the hub.
    found = by_split.get(split) or (by_split.get("") if split == "train" else None)
    if not found:
        raise _no_split(dataset, split, [name or "train" for name in by_split])
    return tuple(found)


def _split_of(name: str, asked: str) -> str:
    for split, words in {**SPLIT_WORDS, asked: SPLIT_WORDS.get(asked, (asked,))}.items():
        if re.search(rf"(^|[/_.-])({'|'.join(map(re.escape, words))})([/_.-]|\d|$)", name):
            return split
    return ""


def _is_data(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    endings = tuple(suffix + compression for suffix in SUFFIXES for compression in COMPRESSIONS)
    return not hidden and path.name not in NOT_DATA and path.name.lower().endswith(endings)


def _listed(folder: Path, subset: str | None) -> dict[str, list[str]]:
    """Split → patterns, from the front matter of the dataset's README; empty where it lists none."""
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf8", errors="replace") if readme.exists() else ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    if not front:
        return {}
    try:
        facts = read_plain(front.group(1), tags=True)
    except BadYaml:
        return {}
    listed = facts.get("configs") if isinstance(facts, dict) else None
    configs = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    if subset:
        chosen = [row for row in configs if row.get("config_name") == subset]
    else:
        # As on the hub: the one that is marked, the one of that name, else the first.
        chosen = sorted(configs, key=lambda row: (row.get("default") is not True, row.get("config_name") != "default"))
    return _patterns(chosen[0].get("data_files")) if chosen else {}


def _patterns(data_files: Any) -> dict[str, list[str]]:
    if isinstance(data_files, str):
        return {"train": [data_files]}
    found: dict[str, list[str]] = {}
    for row in data_files or []:
        if isinstance(row, str):
            found.setdefault("train", []).append(row)
        elif isinstance(row, dict) and "path" in row:
            paths = row["path"]
            found.setdefault(row.get("split", "train"), []).extend([paths] if isinstance(paths, str) else paths)
    return found


def _cached(dataset: str, revision: str | None) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(dataset, repo_type="dataset", revision=revision, local_files_only=True))
    except HFValidationError:
        raise stage_error(
            "missing_source", dataset, "no such folder, and no name of a dataset on the hub", "correct it in the config"
        ) from None
    except (LocalEntryNotFoundError, FileNotFoundError):
        at = f" --revision {revision}" if revision else ""
        raise stage_error(
            "missing_source",
            dataset,
            f"no such folder, and no dataset of this name in the hub's cache ({constants.HF_HUB_CACHE}); runs fetch "
            "nothing themselves",
            f"hf download --repo-type dataset {dataset}{at}",
        ) from None


def _no_split(dataset: str, split: str, splits: Iterable[str]) -> Exception:
    there = ", ".join(sorted(splits)) or "no data files"
    return stage_error("wrong_split", dataset, f"expected the split {split}, there are: {there}", "set split or subset")
