"""The same small pipeline in two environments: equal bits or not, losses, speed, memory, scores, and tests that differ.

python -m benchmarks.compare_environments OLD_PYTHON NEW_PYTHON [--tests PATH ... [--workers N]] [--out upgrade.md]

`make upgrade` calls it with this environment and one of a candidate lock. Each Python runs `stemma run
configs/small.yaml` at toy size with one thread, 20 batches a training and preference tuning beside the other stages, in
a store of its own; then the artifacts are compared stage by stage, file by file and figure by figure. Its text is the
docstrings of a package that both have in the same version, so that what differs is by the environment. Weights and
shards that differ by a bit are said to differ: how far, losses and figures say. With --tests, pytest runs in both, and
tests whose outcome differs are listed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu_proof import TOY
from infra.project import PROJECT, code_state

SETTINGS = TOY | {
    "pretrain.duration": "20 batches",
    "sft.duration": "20 batches",
    "reward_model.duration": "20 batches",
    "judge.duration": "20 batches",
    "steps.dpo": "{uses: preference_tuning, inputs: {model: sft, preferences: preferences}, duration: 20 batches, "
    "global_batch_pairs: 8, heldout_limit: 8, heldout_prompts: 8}",
    "rlhf.rollouts": "10",  # of two updates each
    "rlhf.epochs": "2",
    "benchmarks.limit": "20",
    "safety.toxicity.samples_per_prompt": "1",
    "launch.device": "cpu",
    "launch.threads": "1",
}
TEXTS = ("scipy", "pandas", "sympy", "networkx", "matplotlib", "numpy")
"""Packages with enough docstrings; the first that both environments have in the same version is the text."""
PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "mosaicml", "mosaicml-streaming", "lm-eval")
_CLOCKS = ("seconds", "tokens_per_s", "tflops", "mfu", "_s", "generating_share")
"""Ends of names of figures that measure the machine."""


@dataclass(frozen=True)
class Artifact:
    """What a stage made in one environment. folder: of the artifact."""

    folder: Path

    @cached_property
    def manifest(self) -> dict[str, Any]:
        manifest: dict[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        return manifest

    @property
    def files(self) -> dict[str, str]:
        """Hash of each file, but for records of how it was made."""
        files = {one["path"]: one["sha256"] for one in self.manifest["files"]}
        return {name: digest for name, digest in files.items() if not name.startswith("aux/")}

    @property
    def figures(self) -> dict[str, float]:
        figures = self.manifest["result"]["figures"]
        return {name: value for name, value in figures.items() if not name.endswith(_CLOCKS)}

    def series(self, name: str) -> list[float]:
        """A metric, batch by batch."""
        path = self.folder / "aux" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [values[name] for line in lines if name in (values := json.loads(line)["values"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs=2, metavar=("OLD_PYTHON", "NEW_PYTHON"), help="of two environments")
    parser.add_argument("--tests", nargs="*", help="run pytest on these in both")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest (0: its own alone)")
    parser.add_argument("--out", type=Path, help="write the tables there too")
    options = parser.parse_args()
    lines = [f"`make upgrade` at {str(code_state()['commit'])[:10]}, one thread.", ""]
    with tempfile.TemporaryDirectory() as name:
        text = common_text(options.pythons)
        runs = [run(python, Path(name) / str(number), text) for number, python in enumerate(options.pythons)]
        lines += [*_table([_made_with(runs)]), "", *_table(list(compare(*(made for made, _ in runs))))]
        lines += ["", f"The whole run: {runs[0][1]:.0f} s, then {runs[1][1]:.0f} s."]
        if options.tests is not None:
            results = [outcomes(python, options.tests, options.workers, Path(name)) for python in options.pythons]
            lines += ["", *_differing(*results)]
    text = "\n".join(lines)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


def common_text(pythons: list[str]) -> str:
    """Return the first of `TEXTS` whose version is the same in all environments. Exits where there is none."""
    program = (
        "import importlib.metadata as m, json, sys; here = {d.name.lower(): d.version for d in m.distributions()}; "
        "print(json.dumps([here.get(name) for name in sys.argv[1:]]))"
    )
    versions = [json.loads(subprocess.check_output([python, "-c", program, *TEXTS])) for python in pythons]
    for name, *found in zip(TEXTS, *versions, strict=True):
        if found[0] is not None and len(set(found)) == 1:
            return name
    sys.exit(f"expected one of {', '.join(TEXTS)} in the same version in both environments, to train on its docstrings")


def run(python: str, root: Path, text: str) -> tuple[dict[str, Artifact], float]:
    """Return the artifacts of the pipeline by stage, run by one environment, and its seconds. The first run of an
    environment also compiles and caches, so that what it takes is told stage by stage."""
    settings = {key: value.replace("[numpy]", f"[{text}]") for key, value in SETTINGS.items()}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [python, "-m", "cli.main", "run", str(PROJECT / "configs" / "small.yaml"), "--root", str(root), *words]
    began = time.monotonic()
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=_environment(), cwd=PROJECT)
    if done.returncode:
        sys.exit(f"{python} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    rows = json.loads(done.stdout)["stages"]
    return {row["stage"]: Artifact(Path(row["path"])) for row in rows if row["path"]}, time.monotonic() - began


def compare(old: dict[str, Artifact], new: dict[str, Artifact]) -> Iterator[dict[str, Any]]:
    """Yield a row a stage."""
    for stage in old:
        if stage not in new:
            yield {"stage": stage, "files": "only in the first"}
            continue
        before, after = old[stage], new[stage]
        names = sorted(before.files.keys() | after.files.keys())
        differing = [name for name in names if before.files.get(name) != after.files.get(name)]
        losses = [one.series("train/loss") for one in (before, after)]
        seconds = [one.manifest["seconds"] for one in (before, after)]
        memory = [max(one.series("train/memory_gb"), default=None) for one in (before, after)]
        speed = [one.manifest["result"]["figures"].get("tokens_per_s") for one in (before, after)]
        yield {
            "stage": stage,
            "files that differ": f"{len(differing)} of {len(names)}: {', '.join(differing[:3])}"
            if differing
            else "none",
            "losses apart": _apart(*losses),
            "last loss": _pair([one[-1] if one else None for one in losses]),
            "figures apart": _figures_apart(before.figures, after.figures),
            "seconds": _pair(seconds),
            "tokens/s": _pair(speed),
            "GB": _pair(memory),
        }


def outcomes(python: str, tests: list[str], workers: int, folder: Path) -> dict[str, str]:
    """Return what became of each test in an environment: passed, skipped, failed."""
    report = folder / "tests.xml"
    command = [python, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile", "-m", "not long"]
    subprocess.run([*command, f"--junitxml={report}", *tests], capture_output=True, cwd=PROJECT, check=False)
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def _differing(old: dict[str, str], new: dict[str, str]) -> list[str]:
    rows = [
        {"test": name, "old": old.get(name, "absent"), "new": new.get(name, "absent")}
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    head = f"{len(old):,} tests in the first, {len(new):,} in the second; {len(rows):,} with another outcome."
    return [head, *(["", *_table(rows)] if rows else [])]


def _made_with(runs: list[tuple[dict[str, Artifact], float]]) -> dict[str, str]:
    versions = [made["pretrain"].manifest["versions"] for made, _ in runs]
    names = [name for name in PACKAGES if any(name in one for one in versions)]
    return {name: _pair([one.get(name) for one in versions]) for name in names}


def _apart(one: list[float], other: list[float]) -> str:
    if not one and not other:
        return ""
    if len(one) != len(other):
        return f"{len(one)} and {len(other)} batches"
    if one == other:
        return "0"
    return f"{max(_relative(left, right) for left, right in zip(one, other, strict=True)):.1e}"


def _figures_apart(old: dict[str, float], new: dict[str, float]) -> str:
    """The figure that differs most."""
    if only := sorted(old.keys() ^ new.keys()):
        return f"{only[0]} is in one alone"
    apart = {name: _relative(value, new[name]) for name, value in old.items()}
    worst = max(apart, key=lambda name: apart[name], default="")
    return f"{worst} {old[worst]:.4g} → {new[worst]:.4g}" if worst and apart[worst] else "0"


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other))


def _pair(values: list[Any]) -> str:
    old, new = (f"{one:.4g}" if isinstance(one, float) else "" if one is None else str(one) for one in values)
    return old if old == new else f"{old} → {new}"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    return lines + [f"| {' | '.join(str(row.get(name, '')) for name in names)} |" for row in rows]


def _environment() -> dict[str, str]:
    keys = {"STEMMA_RELAY": "off", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    return os.environ | keys


if __name__ == "__main__":
    sys.exit(main())
