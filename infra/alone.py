"""Run of one stage function by hand, without flows, store or servers.

python -m corpus.clean --config clean.yaml --input documents=DIR --out DIR

A training stage takes `--launch processes=2 sharding=fsdp` and the like, or is started by torchrun, TorchX or srun.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from infra.config import StageConfig
from infra.errors import StemmaError, stage_error
from infra.fingerprint import canonical_json
from infra.io.json import read_own_json
from infra.io.yaml import BadYaml, read_plain, read_text
from infra.launch.config import LaunchConfig
from infra.launch.ranks import own_process_group
from infra.launch.training import run_ranks
from infra.process.lifetime import die_with_parent
from infra.run import Result, Run

C = TypeVar("C", bound=StageConfig)


def main(function: Callable[[C, Mapping[str, Path], Path, Run], Result], config_class: type[C]) -> None:
    """Parse the command line, run the function in the foreground, print its figures, and exit as the command would."""
    parser = argparse.ArgumentParser(description=(function.__doc__ or "").strip().split("\n")[0])
    parser.add_argument(
        "--config", type=Path, help="YAML file with this stage's section; by default all keys have their defaults"
    )
    # Several values after one word: TorchX refuses an option that is repeated.
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    parser.add_argument("--input", **several, metavar="NAME=DIR", help="input artifacts")
    parser.add_argument("--launch", **several, metavar="KEY=VALUE", help="set keys of `launch:`")
    parser.add_argument("--out", type=Path, required=True, help="an empty or new folder for the result")
    options = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0 and options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out {options.out} is not empty")
    inputs, settings = (_pairs(parser, texts) for texts in (options.input, options.launch))
    is_cancelled, listen = _on_sigterm()
    try:
        work = _work(options.out)
        launch = LaunchConfig(**{key: read_plain(value) for key, value in settings.items()})
        if launch.cluster != "local":
            parser.error(
                "launch.cluster works only in pipelines: start this command on each node instead, as srun does"
            )
        if launch.checkpoint_remote is not None:
            parser.error("launch.checkpoint_remote works only in pipelines, whose fingerprints identify checkpoints")
        section = read_plain(read_text(options.config)) if options.config else {}
        config = config_class.model_validate(section or {})
        if rank == 0:
            _claim(work, config, {name: Path(folder) for name, folder in inputs.items()})
        if launch.ranks > 1 and "RANK" not in os.environ:
            sys.exit(_all_ranks(launch, work, is_cancelled))
        die_with_parent()
        out = options.out if rank == 0 else work / f"rank{rank}.out"
        out.mkdir(parents=True, exist_ok=True)
        journal = sys.stderr if rank == 0 else None
        run = Run(work, launch, journal=journal, is_cancelled=is_cancelled, listen=listen)
        try:
            result = function(config, _Inputs({name: Path(folder) for name, folder in inputs.items()}), out, run)
        except SystemExit as error:  # by code that it calls; 0 would count as success
            message = f"{function.__name__} called sys.exit({error.code!r}) and left no result"
            raise stage_error("exited", function.__module__, message, "raise an error in its code instead") from error
    except (ValidationError, BadYaml) as error:
        sys.exit(str(error))
    except StemmaError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    if rank:
        shutil.rmtree(out)
        return
    print(result.headline)
    for name, value in result.figures.items():
        print(f"{name}: {value:.6g}")


class _Inputs(dict[str, Path]):
    def __missing__(self, name: str) -> Path:
        available = ", ".join(self) or "none"
        raise stage_error(
            "no_input", "--input", f"expected an input named {name}, got {available}", f"add --input {name}=DIR"
        )


def _pairs(parser: argparse.ArgumentParser, texts: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if any(not value for _, _, value in pairs):
        parser.error("expected NAME=VALUE after --input and --launch")
    return {name: value for name, _, value in pairs}


def _on_sigterm() -> tuple[Callable[[], bool], Callable[[], None]]:
    """Install a handler of SIGTERM, with which schedulers announce that they take the machine back.

    Return a function that is true once SIGTERM has arrived, and one that installs the handler again.
    """
    is_announced = False

    def on_signal(*_: Any) -> None:
        nonlocal is_announced
        is_announced = True
        if "RANK" not in os.environ:  # a rank may get it from the scheduler and from its launcher
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends a stage that does not check

    def listen() -> None:
        signal.signal(signal.SIGTERM, on_signal)

    listen()
    return lambda: is_announced, listen


def _work(out: Path) -> Path:
    return out.parent / f"{out.name}.work"


def _claim(work: Path, config: StageConfig, inputs: Mapping[str, Path]) -> None:
    """Record the config and inputs of a work folder, in which an interrupted stage continues.

    Raises StageError `other_work` for a folder of another config or other inputs: its content would be used for theirs.
    """
    sources = config.sources() if hasattr(config, "sources") else []
    identity: dict[str, Any] = {
        "config": canonical_json(config),
        **{f"input {name}": _listing([folder]) for name, folder in inputs.items()},
        **{source.key: [*_listing(source.paths), *(item.content_tag for item in source.objects)] for source in sources},
    }
    identity = {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in identity.items()}
    note = work / "asked.json"
    before = read_own_json(note) if note.exists() else {}
    if differing := [name for name in identity if before and before.get(name) != identity[name]]:
        raise stage_error(
            "other_work",
            str(work),
            f"it contains the work of a run with another {', '.join(differing)}",
            "remove it, or choose another --out",
        )
    work.mkdir(parents=True, exist_ok=True)
    temporary = note.with_suffix(".fresh")
    temporary.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf8")
    temporary.replace(note)


def _listing(paths: Iterable[Path]) -> list[str]:
    """Return names, sizes and times of files, also of those in folders: they change when a file is rewritten."""
    files = ((path, file) for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path]))
    stats = [(file.relative_to(path), file.stat()) for path, file in files if file.is_file()]
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats]


def _all_ranks(launch: LaunchConfig, work: Path, is_cancelled: Callable[[], bool]) -> int:
    """Run this command once per rank; return the exit code of the first that failed, else 0."""
    own_process_group()
    ended = run_ranks(
        [sys.executable, *sys.orig_argv[1:]], launch, work, is_cancelled, Run(work, journal=sys.stderr).event
    )
    codes = [outcome.code for outcome in ended if outcome.code]
    return codes[0] if codes else 0
