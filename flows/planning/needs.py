"""Needs of the training steps of a pipeline, by the model, data and machine of each.

`stemma check` prints them, and a run that cannot fit is refused before anything is spent.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from corpus.cleaning.config import CleanConfig
from corpus.config import InstructionsConfig, ShardConfig
from corpus.model_folders.folder import folder_problems
from corpus.readers.config import InstructionOptions
from evaluation.config import SafetyConfig
from flows.config.architecture import architecture_of
from flows.config.checks.ranks import rank_problems
from flows.config.graph import graph
from flows.config.pipeline_config import Graph, PipelineConfig
from flows.config.problems import nearest
from flows.planning.past_runs import from_past_runs
from flows.planning.plan import PlannedStage, plan
from infra.errors import ConfigError, Problem, StageError
from infra.launch.config import LaunchConfig
from infra.launch.devices.gpus import (
    DriverAnswer,
    TorchAnswer,
    ask_driver,
    ask_torch,
    gpu_problems,
    has_gpu,
    memory_problems,
)
from infra.launch.ranks import ClusterNode
from infra.store.store import Store
from training.config import BaseModelConfig, PretrainConfig, RlhfConfig, TrainerConfig
from training.core.devices import DEVICES, Device
from training.planner.architecture import Architecture
from training.planner.hardware.here import device_at_hand
from training.planner.stages import StageNeeds, device_of, needs, problem
from training.planner.ways_out import launch_that_fits
from training.sandbox.runner import find as find_sandbox


def stage_needs(
    config: PipelineConfig, nodes: Graph, rows: Mapping[str, PlannedStage], store: Store | None = None
) -> dict[str, StageNeeds]:
    """Needs of each training step that is to be built and whose model's sizes the config gives.

    Args:
        config: of the pipeline.
        nodes: its graph.
        rows: what a run would do with each step.
        store: builds in it give the time of a step on this machine, unless the config names another.
    """
    device = device_of(config.launch) or device_at_hand(config.launch)
    needed = {}
    for name, row in rows.items():
        node = nodes[name]
        if row.status != "build" or node.adopted or node.measures or not isinstance(node.config, TrainerConfig):
            continue
        arch = architecture_of(nodes, name)
        if arch is None:
            continue
        length = sequence_length(nodes, name, arch)
        shards = rows.get(node.inputs.get("shards", ""))
        figures = shards.manifest.result.get("figures", {}) if shards and shards.manifest else {}
        tokens, scorers = figures.get("train_tokens"), _scorers(nodes, name, arch)
        of_settings = partial(
            _needs_of, arch=arch, length=length, launch=config.launch, device=device, tokens=tokens, scorers=scorers
        )
        needed[name] = of_settings(node.config)
        if store is not None and config.launch.hardware is None and config.launch.cluster == "local":
            needed[name] = from_past_runs(needed[name], node, store, of_settings)
    return needed


def _needs_of(
    settings: TrainerConfig,
    arch: Architecture,
    length: int,
    launch: LaunchConfig,
    device: Device,
    tokens: float | None,
    scorers: list[int],
) -> StageNeeds:
    return needs(settings, arch, length, launch, device, tokens, scorers)


def refuse(config: PipelineConfig, nodes: Graph, needed: Mapping[str, StageNeeds]) -> None:
    """Raise ConfigError for steps that the named device does not hold. A machine that is only at hand refuses nothing:
    the run may be meant for another."""
    if (device := device_of(config.launch)) is None:
        return
    problems = []
    for name, need in needed.items():
        arch, settings = architecture_of(nodes, name), nodes[name].config
        if not need.fits and arch is not None and isinstance(settings, TrainerConfig):
            length, scorers = sequence_length(nodes, name, arch), _scorers(nodes, name, arch)
            ways = launch_that_fits(settings, arch, length, config.launch, device, scorers)
            problems.append(problem(nodes[name].key, need, ways))
    if problems:
        raise ConfigError(*problems)


def refuse_run(
    config: PipelineConfig, nodes: Graph, chosen: Sequence[str], store: Store, force: tuple[str, ...]
) -> None:
    """Raise ConfigError for unknown hardware, for chosen steps that the ranks cannot share, that the named device does
    not hold or this machine cannot begin, and where their checkpoints cannot be uploaded to."""
    rows, missing = _rows(nodes, chosen, store, force)
    built = [name for name in chosen if name not in rows or rows[name].status == "build"]
    gpus = GpusHere.of(config.launch, nodes, built)
    if problems := [
        *check_hardware(config, built),
        *_cannot_begin(config.launch, nodes, built, gpus),
        *model_folder_problems(nodes, built, weights=False),
    ]:
        raise ConfigError(*problems)
    remote = config.launch.checkpoint_remote
    if config.launch.hardware is None and remote is None and gpus is None:
        return  # a missing source is reported by its own stage, and branches without it go on
    if missing is not None:
        raise missing
    needed = stage_needs(config, nodes, rows)
    refuse(config, nodes, needed)
    if gpus and (problems := gpus.memory_problems(nodes, needed)):
        raise ConfigError(*problems)
    if remote and any(nodes[name].stage.makes_weights for name in built):
        _refuse_place(remote)


def model_folder_problems(nodes: Graph, steps: Collection[str], *, weights: bool = True) -> list[Problem]:
    """Return what keeps the model folders that a config names from being loaded, before anything runs.

    Args:
        steps: those that are to be built.
        weights: whether to hold names and shapes of the weights against config.json too, for which transformers is
            imported. A folder that transformers does not know is left to its own stage.
    """
    problems: list[Problem] = []
    for name in steps:
        node = nodes[name]
        if node.adopted:
            continue
        for kind, key, folder in _model_folders(node.key, node.config):
            if not folder.is_dir():
                continue  # its own stage reports it
            faults = folder_problems(folder, key, tokenizer=True)
            if weights and not faults:
                faults = _weights_problems(kind, key, folder)
            problems += faults
    return problems


def _model_folders(key: str, config: object) -> Iterator[tuple[str, str, Path]]:
    """Class of transformers' auto model, dotted key and folder of each model from outside that a step loads."""
    if isinstance(config, BaseModelConfig):
        yield "AutoModelForCausalLM", f"{key}.path", Path(config.path)
    if isinstance(config, CleanConfig) and config.toxicity and config.toxicity.model:
        yield "AutoModelForSequenceClassification", f"{key}.toxicity.model", Path(config.toxicity.model)
    if isinstance(config, SafetyConfig) and config.toxicity:
        for number, scorer in enumerate(config.toxicity.scorers):
            if scorer.kind == "classifier" and scorer.path:
                where = f"{key}.toxicity.scorers.{number}.path"
                yield "AutoModelForSequenceClassification", where, Path(scorer.path)


def _weights_problems(kind: str, key: str, folder: Path) -> list[Problem]:
    import transformers

    from corpus.model_folders.pretrained import weights_problems

    try:
        return weights_problems(getattr(transformers, kind), folder, key)
    except StageError as error:
        return list(error.problems)
    except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return [Problem("bad_model", key, f"transformers cannot load {folder}: {reason[0]}")]


def steps_to_build(nodes: Graph, chosen: Sequence[str], store: Store, force: tuple[str, ...]) -> list[str]:
    """Return the chosen steps that are not reused; all of them if sources are missing."""
    rows, _ = _rows(nodes, chosen, store, force)
    return [name for name in chosen if name not in rows or rows[name].status == "build"]


def _rows(
    nodes: Graph, chosen: Sequence[str], store: Store, force: tuple[str, ...]
) -> tuple[dict[str, PlannedStage], StageError | None]:
    try:
        planned = plan(nodes, store, force)
    except StageError as error:
        return {}, error
    return {name: planned[name] for name in chosen}, None


@dataclass(frozen=True)
class GpusHere:
    """The GPUs that trainings of a run would use on this machine.

    answer: what the installed torch sees; driver: what nvidia-smi reports. processes: ranks on this machine, a GPU
        each. requested: True if `launch.device` asks for a GPU.
    """

    answer: TorchAnswer
    driver: DriverAnswer
    processes: int
    requested: bool

    @classmethod
    def of(cls, launch: LaunchConfig, nodes: Graph, built: Sequence[str]) -> GpusHere | None:
        """The GPUs, or None if no GPU of this machine would be used, or no torch is installed to use it."""
        trains = launch.cluster == "local" and any(nodes[name].stage.trains for name in built)
        if launch.device == "cpu" or not trains or not has_gpu() or (answer := ask_torch()) is None:
            return None
        return cls(answer, ask_driver(), launch.processes, launch.device == "gpu")

    def problems(self) -> list[Problem]:
        """Return why torch cannot use them."""
        return gpu_problems(self.answer, self.driver, requested=self.requested)

    def memory_problems(self, nodes: Graph, needed: Mapping[str, StageNeeds]) -> list[Problem]:
        """Return which of them another process has filled.

        Args:
            needed: by step, as planned for them.
        """
        used = self.answer.gpus[: self.processes]
        problems = []
        for name, need in needed.items():
            # A GPU that the planner does not know was planned as a CPU, whose kernels take other memory.
            if need.device in DEVICES:
                problems += memory_problems(used, self.driver, need.memory_gb * 1e9, nodes[name].key)
        return problems


def _cannot_begin(launch: LaunchConfig, nodes: Graph, built: Sequence[str], gpus: GpusHere | None) -> list[Problem]:
    """Problems that would end training at its beginning, after all earlier steps, if it starts its ranks on this
    machine."""
    if launch.cluster != "local" or not any(nodes[name].stage.trains for name in built):
        return []
    problems: list[Problem] = []
    if launch.nodes > 1:
        try:
            ClusterNode.of(launch, os.environ)
        except StageError as error:
            problems += error.problems
    if launch.device == "gpu" and not has_gpu():
        message = "expected a CUDA GPU, found none"
        problems.append(Problem("no_gpu", "launch.device", message, "set launch.device to auto or cpu"))
    if gpus:
        problems += gpus.problems()
    if any(_runs_answers(nodes, name) for name in built):
        try:
            find_sandbox(launch.sandbox)
        except StageError as error:
            problems += error.problems
    return problems


def _runs_answers(nodes: Graph, name: str) -> bool:
    """Return True if the step reads prompts whose answers are code that is run."""
    read = [nodes[up].config for up in nodes[name].inputs.values() if up in nodes]
    sources = [source for config in read if isinstance(config, InstructionsConfig) for source in config.read]
    return any(isinstance(source, InstructionOptions) and source.verify == "tests" for source in sources)


def _refuse_place(url: str) -> None:
    from infra.io.s3_write import check_writable

    try:
        check_writable(url)
    except StageError as error:
        # A server that does not answer now may do so when the training begins.
        if wrong := [problem for problem in error.problems if problem.code != "source_unreachable"]:
            raise ConfigError(*(replace(problem, path="launch.checkpoint_remote") for problem in wrong)) from None


def check_hardware(config: PipelineConfig, steps: Collection[str] | None = None) -> list[Problem]:
    """Problems of `launch.hardware`, and of work that the ranks cannot share.

    Args:
        steps: those that train; by default all. One that is reused may have been trained on other machines.
    """
    nodes = graph(config)
    training = [name for name, node in nodes.items() if not node.measures and (steps is None or name in steps)]
    problems = rank_problems(config.launch, nodes, training)
    if config.launch.hardware is None or config.launch.hardware in DEVICES:
        return problems
    fix = nearest(config.launch.hardware, DEVICES, "known:", 0.4)
    unknown = Problem("unknown_hardware", "launch.hardware", f"there is no device {config.launch.hardware!r}", fix)
    return [*problems, unknown]


def _scorers(nodes: Graph, name: str, arch: Architecture) -> list[int]:
    """Parameters of each reward model and judge that a step reads.

    Args:
        arch: the step's own model; scorers whose size the config does not give are assumed to be as large.
    """
    read = [model for model in nodes[name].inputs.values() if nodes[model].stage.makes == "reward_model"]
    return [(architecture_of(nodes, model) or arch).parameters for model in read]


def sequence_length(nodes: Graph, name: str, arch: Architecture) -> int:
    """Tokens of a sequence of a training step."""
    section = nodes[name].config
    if isinstance(section, PretrainConfig):
        shards = nodes.get(nodes[name].inputs.get("shards", ""))
        return shards.config.sequence_length if shards and isinstance(shards.config, ShardConfig) else arch.positions
    if isinstance(section, RlhfConfig):
        return section.max_prompt_tokens + section.answer_max_tokens
    return int(getattr(section, "max_length", arch.positions))
