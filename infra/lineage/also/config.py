"""Keys of `lineage:`: the trackers besides MLflow."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Literal

from pydantic import field_validator

from infra.config import Config
from infra.errors import Problem

TrackerName = Literal["wandb", "trackio", "tensorboard"]


class LineageConfig(Config):
    """Trackers that get a copy of what MLflow gets. It changes no artifact, and a tracker that fails fails no stage."""

    also: tuple[TrackerName, ...] = ()
    """Trackers that get metrics, settings and links to artifacts too: `[wandb, trackio, tensorboard]`, each if its
    package is installed."""
    offline: bool = False
    """W&B writes to the store only, until `wandb sync` sends it. Without an API key it does so anyway."""

    @field_validator("also")
    @classmethod
    def _each_once(cls, value: tuple[TrackerName, ...]) -> tuple[TrackerName, ...]:
        return tuple(dict.fromkeys(value))

    def missing_packages(self) -> Iterator[Problem]:
        """Yield a problem for each tracker whose package is not installed."""
        for position, name in enumerate(self.also):
            if importlib.util.find_spec(name) is None:
                yield Problem(
                    "missing_package",
                    f"lineage.also.{position}",
                    f"{name} is not installed",
                    f"pip install {name}, or take it out of lineage.also",
                )
