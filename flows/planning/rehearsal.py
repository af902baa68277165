"""Rehearsal of a plan: its layout is set up without the devices, in a separate process, and compared with the plan."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.config.graph import graph
from flows.config.read import load
from flows.planning.planned_config import launch_keys
from infra.errors import ConfigError, Problem
from infra.io.json import parse_own_json
from infra.launch.config import LaunchConfig
from training.config import ModelConfig, OptimizerConfig, PretrainConfig
from training.config.presets import known_presets
from training.core.devices import Device, find_device
from training.planner.architecture import Architecture
from training.planner.hardware.kernels import KERNELS
from training.planner.hardware.network import network_of
from training.planner.stages import layout_of, moments_of, needs, of_model
from training.planner.step_time import Training
from training.planner.ways_out import launch_that_fits
from training.rehearsal.compare import comparison, off, on_device
from training.rehearsal.job import MOST_RANKS, RankRecord, Rehearsal, folded

_LIMIT_S = 3600.0


def rehearse(document: Mapping[str, Any], config: Path | None, settings: Mapping[str, str]) -> dict[str, Any]:
    """Rehearse the layout of a config's `launch:` if it names hardware or several ranks, else the fastest layout of the
    plan that `launch:` can be set to. Return {"launch", "ranks", "positions", "microbatches", "microbatches_of_a_step",
    "rows", "off", "collectives"}.

    Raises ConfigError for a layout that cannot be set up, or that the device does not hold.

    Args:
        document: of `training.planner.plan.plan`.
    """
    section, own_launch = _config_of(config, settings) if config else (None, None)
    device = find_device(document["gpu"])
    if own_launch is not None:
        launch, model = own_launch, (section or PretrainConfig()).model
    else:
        launch, model = _planned_launch(document), _planned_model(document)
    if launch.ranks > MOST_RANKS:
        message = f"expected at most {MOST_RANKS} ranks to rehearse, not {launch.ranks:,}"
        fix = "rehearse fewer nodes with a proportionally smaller batch: each rank's layers and sequences stay the same"
        raise ConfigError(Problem("too_many_ranks", "launch.nodes", message, fix))
    if launch.precision == "fp8":
        message = "expected bf16, fp16 or fp32: rehearsals do not support fp8"
        raise ConfigError(Problem("no_rehearsal", "launch.precision", message, "rehearse with launch.precision: bf16"))
    multiple = 1 if own_launch is not None else document["runnable"]["vocabulary_multiple"]
    arch = of_model(model, -(-document["vocabulary"] // multiple) * multiple)
    if arch is None:
        message = "expected a model config with the usual keys: hidden_size, num_hidden_layers, …"
        raise ConfigError(Problem("unknown_sizes", "pretrain.model.transformers", message, "rehearse a preset"))
    return _rehearsed(document, launch, model, arch, device, section)


def _rehearsed(
    document: Mapping[str, Any],
    launch: LaunchConfig,
    model: ModelConfig,
    arch: Architecture,
    device: Device,
    section: PretrainConfig | None,
) -> dict[str, Any]:
    length = document["sequence_length"]
    settings = section or PretrainConfig()
    settings = settings.model_copy(update={"global_batch_tokens": document["batch_tokens"]})
    needed = needs(settings, arch, length, launch, device, None)
    shares = launch.shares_of_examples
    at = layout_of(launch, needed.microbatch, *shares, launch.expert_parallel)
    sequences = document["batch_tokens"] // length // at.dp
    if sequences * at.dp * length != document["batch_tokens"] or not sequences:
        message = (
            f"expected a batch that {at.dp} groups of ranks can share, not {document['batch_tokens'] // length:,} "
            f"sequences of {length:,} tokens"
        )
        raise ConfigError(Problem("not_divisible", "pretrain.global_batch_tokens", message, "change it, or the ranks"))
    of_step = -(-sequences // needed.microbatch)
    count = folded(of_step, launch)
    half = launch.precision != "fp32" and document["precision"] != "fp32"
    job = Rehearsal(
        model=model,
        vocabulary=arch.vocabulary,
        length=length,
        launch=launch,
        microbatch=needed.microbatch,
        microbatches=count,
        optimizer=section.optimizer if section else OptimizerConfig(),
        bf16=half,
    )
    records = [RankRecord.model_validate(record) for record in _run(job)["ranks"]]
    _check_memory(records, launch, device, needed.microbatch, arch, length, settings)
    planned = Training(
        arch, device, KERNELS["flash"], network_of(device), length, needed.microbatch * count * at.dp,
        "bf16" if half else "fp32", moments_of(settings, arch),
    )  # fmt: skip
    rows = comparison(planned, at, records)
    return {
        "launch": launch.model_dump(mode="json", exclude_unset=True),
        "ranks": launch.ranks,
        "rehearsed_ranks": [record.rank for record in records],
        "microbatches": count,
        "microbatches_of_a_step": of_step,
        "memory_gb": max(map(on_device, records)) / 1e9,
        "memory_gb_of_device": device.memory / 1e9,
        "rows": rows,
        "off": [row["what"] for row in off(rows)],
        "collectives": [
            {"rank": record.rank, **collective.model_dump()} for record in records for collective in record.collectives
        ],
    }


def _config_of(config: Path, settings: Mapping[str, str]) -> tuple[PretrainConfig, LaunchConfig | None]:
    """The first fresh pretraining of a config, and its `launch:` if that names machines."""
    pipeline = load(config, settings)
    nodes = graph(pipeline)
    section = next(
        node.config for node in nodes.values() if isinstance(node.config, PretrainConfig) and "model" not in node.inputs
    )
    launch = pipeline.launch
    return section, launch if launch.ranks > 1 or launch.hardware else None


def _planned_launch(document: Mapping[str, Any]) -> LaunchConfig:
    if document["runnable"] is None:
        message = "no layout that training supports fits the devices"
        raise ConfigError(Problem("no_such_layout", "--rehearse", message, "use more devices or a smaller model"))
    return LaunchConfig.model_validate(launch_keys(document))


def _planned_model(document: Mapping[str, Any]) -> ModelConfig:
    length, sizes = document["sequence_length"], document["sizes"]
    if document["model_config"] is not None:
        return ModelConfig.model_validate(document["model_config"])
    if document["model"] in known_presets():
        longer = {"positions": length} if length > document["positions"] else {}
        return ModelConfig(preset=document["model"], **longer)
    return ModelConfig(
        family="llama", positions=length, tie_embeddings=sizes["tied"],
        **{name: sizes[name] for name in ("layers", "width", "heads", "mlp_width")},
    )  # fmt: skip


def _run(job: Rehearsal) -> dict[str, Any]:
    """Run `python -m training.rehearsal`. Raises ConfigError with its problems."""
    done = subprocess.run(
        [sys.executable, "-m", "training.rehearsal"],
        input=job.model_dump_json(exclude_unset=True),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    try:
        document: dict[str, Any] = parse_own_json(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(Problem("rehearsal_failed", "--rehearse", f"the rehearsal ended with: {last}")) from None
    if problems := document.get("problems"):
        raise ConfigError(*(Problem(**problem) for problem in problems))
    return document


def _check_memory(
    records: list[RankRecord],
    launch: LaunchConfig,
    device: Device,
    microbatch: int,
    arch: Architecture,
    length: int,
    settings: PretrainConfig,
) -> None:
    """Raise ConfigError if a rank does not fit the device."""
    fullest = max(records, key=on_device)
    if on_device(fullest) <= device.memory:
        return
    message = (
        f"expected at most {device.memory / 1e9:,.1f} GB on each {device.name}: rank {fullest.rank} of {launch.ranks} "
        f"was rehearsed with {on_device(fullest) / 1e9:,.1f} GB, {microbatch} "
        f"sequence{'s' * (microbatch > 1)} at once"
    )
    ways = launch_that_fits(settings, arch, length, launch, device)
    fix = f"it would fit with {', or with '.join(ways)}" if ways else "use a smaller model or shorter sequences"
    raise ConfigError(Problem("does_not_fit", "launch", message, fix))
