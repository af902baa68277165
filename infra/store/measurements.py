"""A trained model and its measurement: two artifacts, since figures that are requested later must not require another
training of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from infra.store.manifest import InputArtifact, Manifest

MEASURE = "measure_"
"""Before the name of a step, or of an input, that of its measurement: `measure_sft`."""

TRAINED = "trained"
"""Input of a measurement: the measured model."""

T = TypeVar("T")


Address = tuple[str, str, str]


def address(manifest: Manifest | InputArtifact) -> Address:
    """Return the address that names an artifact and its bytes."""
    return manifest.stage, manifest.fingerprint, manifest.digest


def measurements(manifests: Iterable[Manifest]) -> dict[Address, Manifest]:
    """Return the newest measurement of each measured model, by the model's address."""
    ordered = sorted(
        (manifest for manifest in manifests if TRAINED in manifest.inputs), key=lambda manifest: manifest.age_key
    )
    return {address(manifest.inputs[TRAINED]): manifest for manifest in ordered}


def newest_measurement(root: Path, model: Manifest) -> tuple[Path, Manifest] | None:
    """The newest measurement of a model in the store at `root`, as far as this machine knows it: of one on an object
    store, the measurements in the cache."""
    by_build = {}
    for folder in (root / measurement_of(model.stage)).glob("*/"):
        with suppress(OSError, ValueError):
            manifest = Manifest.read(folder)
            by_build[manifest.build_id] = folder, manifest
    newest = measurements(manifest for _, manifest in by_build.values()).get(address(model))
    return by_build[newest.build_id] if newest else None


def measurement_of(name: str) -> str:
    """Return the name of the measurement of a step's model."""
    return f"{MEASURE}{name}"


def is_measurement(name: str, names: Iterable[str]) -> bool:
    """Return True if a name among `names` is that of the measurement of another of them."""
    return name.startswith(MEASURE) and name.removeprefix(MEASURE) in names


def figures_by_step(figures: Mapping[str, Mapping[str, T]]) -> dict[str, dict[str, T]]:
    """Return the figures of each step, including those of the measurement of its model."""
    together: dict[str, dict[str, T]] = {}
    for name, step_figures in figures.items():
        step = name.removeprefix(MEASURE) if is_measurement(name, figures) else name
        together[step] = {**together.get(step, {}), **step_figures}
    return together
