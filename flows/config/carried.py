"""Best values of a sweep, referenced by a config: `learning_rate: from sweep 73cc55af5137`.

The sweep writes them to `found.json` in its folder:

    {"sweep", "measure", "maximise", "runs": [{"settings", "value", "parameters", "tokens"}]}
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from infra.errors import ConfigError, Problem
from infra.io.json import read_own_json
from infra.io.sources import LocatedText
from infra.project import default_root

if TYPE_CHECKING:
    from flows.config.pipeline_config import PipelineConfig


class _SweepForm(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Run(_SweepForm):
    settings: dict[str, Any]
    value: float
    parameters: float | None
    tokens: float | None


class _Finished(_SweepForm):
    """Content of `found.json`."""

    sweep: str
    measure: str
    maximise: bool
    runs: list[_Run]


FILE = "found.json"
LEAST_SIZES = 3
"""Minimum number of compute budgets to fit a trend."""
LARGEST = 1e100
"""Values above it follow no trend."""
_WISH = re.compile(r"^from sweep (\S+)$")


def wishes(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every key of plain data that references a sweep, with the sweep."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from wishes(value, (*path, str(key)))
    elif isinstance(data, list):
        for number, value in enumerate(data):
            yield from wishes(value, (*path, str(number)))
    elif isinstance(data, str) and (matched := _WISH.match(data)):
        name = matched.group(1)
        yield path, LocatedText.of(name, data.folder) if isinstance(data, LocatedText) else name


def take_over(
    data: dict[str, Any],
    folder: Path | None,
    root: Callable[[], Path],
    parse: Callable[[Any, Path | None], PipelineConfig],
) -> dict[str, Any]:
    """Plain data with every `from sweep X` replaced by the best value of sweep X; see `carried`.

    Args:
        folder: the config's, to which paths of sweeps are relative.
        root: returns the store in which sweep ids are looked up.
        parse: validates plain data, here to count the compute of a step.

    Raises ConfigError with all problems.
    """
    requests = list(wishes(data))
    if not requests:
        return data
    problems: list[Problem] = []
    sweeps: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for path, name in requests:
        try:
            sweeps[path] = read(name, folder, root)
            _put(data, path, carried(sweeps[path], _key(path), None))
        except ConfigError as error:
            problems += [replace(problem, path=".".join(path)) for problem in error.problems]
    if problems:
        raise ConfigError(*problems)
    if any(len(_optima(sweep["runs"], _key(path), _sign(sweep))) >= LEAST_SIZES for path, sweep in sweeps.items()):
        config = parse(copy.deepcopy(data), folder)
        for path, sweep in sweeps.items():
            _put(data, path, carried(sweep, _key(path), _compute(config, _key(path))))
    return data


def _key(path: Sequence[str]) -> str:
    """Return the key in the syntax of `--key` and `--set`."""
    return ".".join(path[1:] if path[0] == "steps" else path)


def _put(data: Any, path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        data = data[int(part)] if isinstance(data, list) else data[part]
    data[int(path[-1]) if isinstance(data, list) else path[-1]] = value


def _sign(sweep: Mapping[str, Any]) -> float:
    return -1.0 if sweep["maximise"] else 1.0


def _compute(config: PipelineConfig, key: str) -> float | None:
    """6 · parameters · tokens of the pretraining that a key belongs to; None for other stages, and for models whose
    sizes the config does not give. Raises ConfigError for a length in epochs."""
    from flows.config.architecture import architecture_of
    from flows.config.graph import graph
    from training.config import PretrainConfig
    from training.config.duration import parse_duration

    nodes, name = graph(config), key.partition(".")[0]
    if name not in nodes or not isinstance(section := nodes[name].config, PretrainConfig):
        return None
    arch, length = architecture_of(nodes, name), parse_duration(section.duration)
    if length.unit not in ("tokens", "batches"):
        message = f"a value that follows compute needs a length in tokens or batches, not {section.duration!r}"
        raise ConfigError(Problem("unknown_compute", f"{name}.duration", message, "give duration in tokens"))
    tokens = length.value * (section.global_batch_tokens if length.unit == "batches" else 1)
    return None if arch is None else 6.0 * arch.parameters * tokens


def read(name: str, folder: Path | None, root: Callable[[], Path] = default_root) -> dict[str, Any]:
    """The record that a sweep left.

    Raises ConfigError `no_sweep`, `damaged_state`.

    Args:
        name: its id in the store at root(), or the path of its folder, relative to the config's.
    """
    if isinstance(name, LocatedText):
        folder = name.folder
    folders = [(folder or Path()) / name, root() / "sweeps" / name]
    for candidate in folders:
        if (candidate / FILE).is_file():
            return _read_finished(candidate / FILE)
    message = f"no finished sweep {name!r} in {folders[1].parent} or at {folders[0]}"
    raise ConfigError(Problem("no_sweep", name, message, "give the id that stemma sweep prints, or its folder"))


def _read_finished(path: Path) -> dict[str, Any]:
    """Content of a file that `leave` wrote. Raises ConfigError `damaged_state` for one that is not whole."""
    try:
        return _Finished.model_validate(read_own_json(path)).model_dump()
    except (OSError, ValueError, RecursionError):
        message = f"{path} is damaged: expected the results of stemma sweep"
        fix = "delete it and run stemma sweep again, which reuses every trial; or copy its folder again"
        raise ConfigError(Problem("damaged_state", str(path), message, fix)) from None


def carried(sweep: Mapping[str, Any], key: str, compute: float | None) -> Any:
    """The value of `key` that a sweep found best.

    If the sweep tried a number at several amounts of compute (6 · parameters · tokens), a power law is fitted to the
    best
    value of each amount: the lowest point of a parabola through the best value and its neighbours, in the logarithm.
        The
    law is followed to `compute`, the FLOPs of the training at hand (as Bi et al. 2024, DeepSeek LLM, section 3.1, fit
    learning rate and batch size). A best value at the edge of those tried shows no optimum and is left out; fewer than
    three sizes show no trend, and the best value of all is taken. A whole number stays one.

    Raises ConfigError `not_swept` for a key that the sweep did not vary.
    """
    runs = [run for run in sweep["runs"] if key in run["settings"]]
    if not runs:
        swept = sorted({setting for run in sweep["runs"] for setting in run["settings"]})
        message = f"the sweep {sweep['sweep']} did not vary it"
        raise ConfigError(Problem("not_swept", key, message, f"it varied {', '.join(swept) or 'nothing'}"))
    sign = _sign(sweep)
    if compute is not None and (points := _optima(runs, key, sign)) and len(points) >= LEAST_SIZES:
        import numpy as np

        flops, best = (np.log([point[column] for point in points]) for column in (0, 1))
        slope, offset = np.polyfit(flops, best, 1)
        if math.isfinite(value := float(np.exp(offset + slope * math.log(compute)))):
            return _as_tried(value, [run["settings"][key] for run in runs])
    return min(_means(runs, key), key=lambda entry: sign * entry[1])[0]


def _as_tried(value: float, tried: Sequence[Any]) -> int | float:
    """Round whole numbers, such as tokens of a batch, to the nearest multiple of the greatest common divisor of all
    that were tried, so that a batch holds whole sequences as they do."""
    if not all(isinstance(item, int) for item in tried):
        return value
    step = math.gcd(*tried)
    return max(1, round(value / step)) * step


def _means(runs: Sequence[Mapping[str, Any]], key: str) -> list[tuple[Any, float]]:
    """Return (value of the key, mean of its results) in the order of trials; a value may be a list."""
    values: dict[str, tuple[Any, list[float]]] = {}
    for run in runs:
        value = run["settings"][key]
        values.setdefault(json.dumps(value, sort_keys=True), (value, []))[1].append(run["value"])
    return [(value, fmean(some)) for value, some in values.values()]


def _optima(runs: Sequence[Mapping[str, Any]], key: str, sign: float) -> list[tuple[float, float]]:
    """Return (FLOPs, best value) of each size whose best value is between others."""
    import numpy as np

    groups: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        if key not in run["settings"]:
            continue
        others = {name: value for name, value in run["settings"].items() if name != key}
        groups.setdefault(json.dumps(others, sort_keys=True), []).append(run)
    points = []
    for group in groups.values():
        sized = [run for run in group if run["parameters"] and run["tokens"]]
        averages = _means(sized, key)
        if len(averages) < 3 or not all(
            isinstance(value, int | float) and 0 < value < LARGEST for value, _ in averages
        ):
            continue
        means = dict(averages)
        values = sorted(means)
        at = min(range(len(values)), key=lambda index: sign * means[values[index]])
        if 0 < at < len(values) - 1:
            x = np.log(values[at - 1 : at + 2])
            curve, tilt, _ = np.polyfit(x, [sign * means[value] for value in values[at - 1 : at + 2]], 2)
            flops = fmean(6 * run["parameters"] * run["tokens"] for run in sized)
            best = float(np.exp(-tilt / (2 * curve))) if curve else math.inf
            if flops > 0 and math.isfinite(best) and best > 0:
                points.append((flops, best))
    return sorted(points)
