"""Runs targets one after the other, each in a separate process, and prints one table.

python -m tests.fuzz [TARGET …] [--inputs 20000] [--seed 0] [--folder .fuzz] [--minutes M]
python -m tests.fuzz --again FILE.pickle TARGET      one input that failed

A target that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from tests.fuzz.harness import Examiner, keep, read_state, run_alone, write_state
from tests.fuzz.targets import TARGETS


def _table(folder: Path, names: list[str]) -> tuple[str, bool]:
    lines = ["| target | inputs | refused | failures | kinds | seconds |", "|---|---|---|---|---|---|"]
    has_failed = False
    for name in names:
        state = read_state(folder / name)
        failures = sum(state.failures.values())
        has_failed |= bool(failures)
        share = f"{100 * state.refused / state.inputs:.0f} %" if state.inputs else ""
        row = (name, f"{state.inputs:,}", share, f"{failures:,}", str(len(state.failures)), f"{state.seconds:,.0f}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines), has_failed


def _died(folder: Path, code: int, text: str) -> None:
    """Record the input that ended the process of a target."""
    state = read_state(folder)
    kind = f"died of signal {-code}" if code < 0 else f"died with exit code {code}"
    location = next((line.strip() for line in text.splitlines() if "/tests/" not in line and 'File "' in line), "")
    kind = f"{kind} {location[-60:]}".strip()
    state.failures[kind] = state.failures.get(kind, 0) + 1
    write_state(folder, state)
    try:
        value = pickle.loads((folder / "current.pickle").read_bytes())
    except (OSError, EOFError, pickle.UnpicklingError):
        value = None
    keep(folder, kind, value, text[-6_000:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for each target")
    parser.add_argument("--again", type=Path)
    parser.add_argument("--alone", action="store_true", help="in this process")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    if given.list:
        print("\n".join(TARGETS))
        return 0
    names = [name for name in TARGETS if not given.targets or any(fnmatch(name, part) for part in given.targets)]
    if not names:
        parser.error(f"expected some of {', '.join(TARGETS)}")
    if given.again:
        examiner = Examiner(TARGETS[names[0]], given.folder / "again")
        kind, text = examiner.failure(pickle.loads(given.again.read_bytes()))
        print(text or "fine", kind, sep="\n")
        return bool(kind)
    if given.alone:
        run_alone(
            TARGETS[names[0]],
            given.inputs,
            given.seed,
            given.folder / names[0],
            time.monotonic() + 60 * given.minutes,
        )
        return 0
    for name in names:
        folder, deaths, end = given.folder / name, 0, time.monotonic() + 60 * given.minutes
        while read_state(folder).inputs < given.inputs and deaths < 20 and time.monotonic() < end:
            minutes = (end - time.monotonic()) / 60
            words = [name, "--inputs", given.inputs, "--seed", given.seed, "--folder", given.folder]
            command = [sys.executable, "-m", "tests.fuzz", "--alone", *map(str, words), "--minutes", str(minutes)]
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / "stderr.txt", "w") as log, open(os.devnull, "w") as nothing:
                code = subprocess.run(command, stdout=nothing, stderr=log, check=False).returncode
            if code == 0:
                break
            text = (folder / "stderr.txt").read_text(errors="replace")
            deaths += 1
            _died(folder, code, text)
        print(_table(given.folder, [name])[0].splitlines()[-1], flush=True)
    table, has_failed = _table(given.folder, names)
    print(f"\n{table}")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
