"""The DAG of a pipeline: the stages in a config, the artifacts that each reads, and the selection of a command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from corpus.config import DataKind, ValidateConfig
from evaluation.config import CorpusReportConfig, Gate, RegisterConfig, ReportConfig
from flows.config.pipeline_config import Graph, PipelineConfig
from flows.config.problems import nearest
from flows.config.usual import TEST_ITEMS, cleared_of, usual_nodes
from flows.config.wiring import REPORT, Joint, wiring_problems
from infra.config import Config, StageConfig
from infra.errors import ConfigError, Problem
from infra.store.measurements import TRAINED, measurement_of
from tasks.stage import STATE, Node
from tasks.stages import STAGES, USUAL_STEPS
from training.config import BaseModelConfig, PretrainConfig

MODEL = "model"
"""The input through which a step reads the model that it evaluates or publishes."""


def graph(config: PipelineConfig, command: str = "") -> Graph:
    """The nodes of a pipeline, in an order in which they can run one after the other. They are built once per config.

    Args:
        command: the command line that runs it, for the report.

    Raises ConfigError if its steps do not form a graph.
    """
    nodes = config.nodes(_build)
    return {name: _with_command(node, command) for name, node in nodes.items()}


def _build(config: PipelineConfig) -> Graph:
    nodes = usual_nodes(config)
    if problems := step_problems(config, nodes):
        raise ConfigError(*problems)
    nodes = _adopting(_with_steps(_reading_steps(nodes, config), config), config.adopted)
    precision = config.launch.precision
    nodes = {name: replace(node, precision=precision) if node.stage.trains else node for name, node in nodes.items()}
    nodes = _measured(nodes)
    if report := config.of(ReportConfig):
        nodes[REPORT] = Node(REPORT, STAGES[REPORT], report, {name: name for name in nodes})
    return {name: _named(node, config) for name, node in nodes.items()}


def step_problems(config: PipelineConfig, usual: Graph) -> list[Problem]:
    """Problems that prevent the named steps from forming a graph with the usual nodes."""
    joints = {
        name: Joint(step.stage, step.inputs, step.requires, step.continued()) for name, step in config.steps.items()
    }
    wired = {
        name: Joint(node.stage, node.inputs, node.requires) for name, node in _reading_steps(usual, config).items()
    }
    return wiring_problems(joints, wired)


def _reading_steps(usual: Graph, config: PipelineConfig) -> Graph:
    """Return the graph in which usual steps read named ones, as `UsualStep.from_step` declares: a reward model named
    judge judges the usual RLHF."""
    nodes = dict(usual)
    for usual_step in USUAL_STEPS.values():
        for key, stage in usual_step.from_step.items():
            step, node = config.steps.get(key), nodes.get(usual_step.id)
            if step is not None and step.uses == stage and node is not None:
                nodes[node.id] = replace(node, inputs={**node.inputs, key: key})
    return nodes


def _with_steps(usual: Graph, config: PipelineConfig) -> Graph:
    """Return the graph with the named steps after those that they need; their artifacts have the stage's name, see
    `Node.stored_as`.
    """
    nodes: Graph = {}

    def add(name: str) -> None:
        """Add what it needs, then itself."""
        if name in nodes:
            return
        if name in usual:
            for up in usual[name].upstream:
                add(up)
            nodes[name] = usual[name]
            return
        step = config.steps[name]
        cleared = cleared_of(step.config, TEST_ITEMS) if TEST_ITEMS in usual else {}
        for up in (*step.upstream(), *cleared.values()):
            add(up)
        section = _checking(step.config, nodes[step.inputs["data"]]) if step.uses == "validate" else step.config
        inputs, requires = {**cleared, **step.inputs}, step.requires
        if first := step.continued():
            inputs = {**nodes[first].inputs, **inputs, STATE: first}
            requires = tuple(dict.fromkeys((*nodes[first].requires, *requires)))
        nodes[name] = Node(name, step.stage, section, inputs, requires, path=f"steps.{name}")

    for name in (*usual, *config.steps):
        add(name)
    return nodes


def _checking(section: StageConfig, data: Node) -> ValidateConfig:
    """The part of a validation's config that applies to the kind of its data, as in the usual nodes."""
    assert isinstance(section, ValidateConfig)
    kinds: dict[str, DataKind] = {"shards": "shards", "instructions": "instructions", "preferences": "preferences"}
    of_documents: DataKind = "documents" if data.stage.name == "ingest" else "clean"
    return section.of(section.kind or kinds.get(data.stage.makes, of_documents))


def _adopting(nodes: Graph, adopted: Mapping[str, str]) -> Graph:
    """The graph with adopted nodes cut off from their inputs, without nodes that only they needed."""
    cut = {
        name: replace(node, inputs={}, requires=(), adopted=adopted[name]) if name in adopted else node
        for name, node in nodes.items()
    }
    for name, node in cut.items():
        # A validation is dropped if the node no longer descends from the data that it checks.
        reads = ancestors(cut, node.inputs.values())
        requires = tuple(
            required for required in node.requires if node.path or reads.intersection(nodes[required].inputs.values())
        )
        cut[name] = replace(node, requires=requires)
    replaced = ancestors(nodes, [name for name in adopted if name in nodes]) - set(adopted)
    needed = ancestors(cut, [name for name in cut if name not in replaced])
    return {name: node for name, node in cut.items() if name in needed}


def _measured(nodes: Graph) -> Graph:
    """Return the graph with a measurement after each step that trains a model, which registrations of that model read
    too.
    """
    graph: Graph = {}
    measured = {name for name, node in nodes.items() if node.stage.measured_by and not node.adopted}
    for name, node in nodes.items():
        if name in measured:
            measurement = _measurement(node)
            graph |= {name: replace(node, measurement=measurement), measurement.id: measurement}
        elif node.stage.registers:
            read = {measurement_of(key): measurement_of(up) for key, up in node.inputs.items() if up in measured}
            graph[name] = replace(node, inputs={**node.inputs, **read})
        else:
            graph[name] = node
    return graph


def _measurement(node: Node) -> Node:
    """Return the step that measures the model of another, with the same config and inputs."""
    stage = STAGES[node.stage.measured_by]
    named = {item.name for item in stage.inputs}
    of_training = {item.name for item in node.stage.inputs}  # those that `more` lets in have other names
    inputs = {key: up for key, up in node.inputs.items() if key in named or (stage.more and key not in of_training)}
    return Node(
        measurement_of(node.id),
        stage,
        node.config,
        {TRAINED: node.id, **inputs},
        path=node.key,
        precision=node.precision,
    )


def _named(node: Node, config: PipelineConfig) -> Node:
    """The final stages carry the pipeline's name where the config gives them none; named steps add their own."""
    filled: StageConfig = node.config
    name = f"{config.name}-{node.id}" if node.path else config.name
    if isinstance(filled, RegisterConfig) and filled.name is None:
        filled = filled.model_copy(update={"name": name})
    if isinstance(filled, RegisterConfig):
        filled = filled.model_copy(update={"gates": tuple(_of_the_model(gate, node) for gate in filled.gates)})
    if isinstance(filled, ReportConfig | CorpusReportConfig) and filled.title is None:
        filled = filled.model_copy(update={"title": name})
    return replace(node, config=filled)


def _with_command(node: Node, command: str) -> Node:
    if not command or not isinstance(node.config, ReportConfig) or node.config.command:
        return node
    return replace(node, config=node.config.model_copy(update={"command": command}))


def _of_the_model(gate: Gate, node: Node) -> Gate:
    """A gate on the step whose model is registered names its input: the artifact may have been built by a step of
    another name, which shares it."""
    step, _, figure = gate.figure.partition(".")
    is_the_model = step == node.inputs.get(MODEL) and step not in STAGES
    return gate.model_copy(update={"figure": f"{MODEL}.{figure}"}) if is_the_model else gate


def first_model(nodes: Graph, name: str) -> Node | None:
    """Return the first ancestor of the model that a step reads."""
    node = [nodes[name], *models_before(nodes, name)][-1]
    return node if isinstance(node.config, PretrainConfig | BaseModelConfig) else None


def models_before(nodes: Graph, name: str) -> Iterator[Node]:
    """Return the model that a step reads and its ancestors, from the latest to the first."""
    while (up := nodes[name].inputs.get("model")) is not None:
        yield nodes[up]
        name = up


def ancestors(nodes: Graph, ids: Iterable[str]) -> set[str]:
    """Return these nodes and all that they depend on."""
    names: set[str] = set()
    left = list(ids)
    while left:
        name = left.pop()
        if name not in names:
            names.add(name)
            left += nodes[name].upstream
    return names


def descendants(nodes: Graph, ids: Iterable[str]) -> set[str]:
    """Return these nodes and all that depend on them."""
    names = set(ids)
    for name, node in nodes.items():
        if names.intersection(node.upstream):
            names.add(name)
    return names


def known(nodes: Graph, ids: Iterable[str], option: str) -> list[str]:
    """The given step names. Raises ConfigError for each that the pipeline lacks, with the most similar name."""
    names = list(ids)
    if problems := unknown_stages(nodes, names, option):
        raise ConfigError(*problems)
    return names


def unknown_stages(nodes: Graph, ids: Iterable[str], option: str) -> list[Problem]:
    """Problems of step names that the pipeline does not have."""
    return [
        Problem(
            "unknown_stage",
            f"{option} {name}",
            "the pipeline has no such stage",
            nearest(name, nodes, "its stages:", 0.4),
        )
        for name in ids
        if name not in nodes
    ]


def with_measurements(nodes: Graph, ids: Iterable[str]) -> set[str]:
    """Return these nodes and the measurements of those that train a model."""
    names = set(ids)
    return names | {measurement.id for name in names if (measurement := nodes[name].measurement) is not None}


class Selection(Config):
    """Stage ids; the stages that run are those that every given option allows. Empty means no restriction."""

    only: tuple[str, ...] = ()
    """Run only these stages."""
    from_: tuple[str, ...] = ()
    """Run only these stages and everything downstream of them."""
    until: tuple[str, ...] = ()
    """Run only these stages and everything upstream of them."""
    force: tuple[str, ...] = ()
    """Rebuild these stages even if their artifacts exist."""
    strict_versions: bool = False
    """Rebuild artifacts built with other versions of torch, transformers and similar packages."""

    def choose(self, nodes: Graph) -> list[str]:
        """The selected nodes, in the DAG's order, each training with its measurement. Raises ConfigError for every
        stage id that is unknown, and where the options together leave no stage."""
        given = {"--only": self.only, "--from": self.from_, "--until": self.until, "--force": self.force}
        if problems := [problem for option, ids in given.items() for problem in unknown_stages(nodes, ids, option)]:
            raise ConfigError(*problems)
        allowed = set(nodes)
        if self.only:
            allowed &= with_measurements(nodes, self.only)
        if self.from_:
            allowed &= descendants(nodes, self.from_)
        if self.until:
            allowed &= ancestors(nodes, with_measurements(nodes, self.until))
        if not allowed:
            narrowing = [option for option in ("--only", "--from", "--until") if given[option]]
            options = " ".join(f"{option} {','.join(given[option])}" for option in narrowing)
            raise ConfigError(
                Problem("nothing_selected", options, "the options together select no stage", "leave one out")
            )
        return [name for name in nodes if name in allowed]
