"""The DAG of a pipeline: which stages a config asks for, and whose artifact each of them reads."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from corpus.config import DataKind
from evaluation.config import CorpusReportConfig, RegisterConfig, ReportConfig
from flows.config import PipelineConfig
from infra.config import StageConfig
from infra.errors import ConfigError, Problem
from tasks.stage import Node
from tasks.stages import CORPUS_STEPS, STAGES

Graph = dict[str, Node]
"""Nodes by id, each after everything that it needs."""


def graph(config: PipelineConfig, command: str = "") -> Graph:
    """The nodes of a pipeline, in an order in which they can run one after the other.

    command: the command line that runs it, for the report.
    """
    nodes = _adopting(_wired(_asking(config)), config.adopted)
    if config.report is not None:
        nodes["report"] = Node("report", STAGES["report"], config.report, {name: name for name in nodes})
    return {name: _named(node, config, command) for name, node in nodes.items()}


def _asking(config: PipelineConfig) -> PipelineConfig:
    """With the benchmarks and probes that the pipeline will run named in the section benchmark_text."""
    if config.benchmark_text is None:
        return config
    filled = config.benchmark_text.filled(config.benchmarks, config.safety)
    return config.model_copy(update={"benchmark_text": filled})


def _wired(config: PipelineConfig) -> Graph:
    """Every node but the report, which reads all others."""
    nodes: Graph = {}

    def add(stage: str, *, id: str = "", after: Iterable[str] = (), **inputs: str) -> str:
        """Adds a node if the config has its section or adopts it; inputs and gates that are not there are left out."""
        name = id or stage
        section = StageConfig() if name in config.adopted else config.section(stage)
        if section is None:
            return ""
        wired = {key: node for key, node in inputs.items() if node in nodes}
        nodes[name] = Node(name, STAGES[stage], section, wired, tuple(node for node in after if node in nodes))
        return name

    def check(data: str, kind: DataKind, **limits: float) -> str:
        """The validation of one node's data, with the part of its config that speaks of this kind."""
        if data not in nodes or config.validate_ is None or getattr(config.validate_, kind) is None:
            return ""
        name = "validate" if kind == "documents" else f"validate_{kind}"
        nodes[name] = Node(name, STAGES["validate"], config.validate_.of(kind, **limits), {"data": data})
        return name

    add("ingest")
    gate = check("ingest", "documents")
    documents = add("clean", documents="ingest", after=[gate]) or "ingest"
    documents = add("dedupe", documents=documents, after=[gate]) or documents
    test_items = add("benchmark_text")
    documents = add("decontaminate", documents=documents, benchmark_text=test_items, after=[gate]) or documents
    documents = add("mix", documents=documents, after=[gate]) or documents
    # A mixture repeats documents on purpose, up to its cap.
    copies = {"max_copies": math.ceil(config.mix.max_epochs)} if config.mix else {}
    if documents != "ingest":
        gate = check(documents, "clean", **copies) or gate
    add("tokenizer", documents=documents, after=[gate])
    shards = add("shard", documents=documents, tokenizer="tokenizer", after=[gate])
    shards_gate = check(shards, "shards", **copies)
    add("corpus_report", **{name: name for name in CORPUS_STEPS})
    base = add("pretrain", shards="shard", tokenizer="tokenizer", after=[shards_gate]) or add("base_model")
    add("instructions")
    instructions_gate = check("instructions", "instructions")
    tuned = add("sft", model=base, instructions="instructions", after=[instructions_gate])
    add("preferences")
    preferences_gate = check("preferences", "preferences")
    add("reward_model", model=tuned, preferences="preferences", after=[preferences_gate])
    aligned = add("rlhf", model=tuned, reward_model="reward_model", prompts="instructions")
    judged = []
    for label, model in (("base", base), ("sft", tuned), ("rlhf", aligned)):
        if model:
            judged.append(add("benchmarks", id=f"benchmarks_{label}", model=model))
            judged.append(add("safety", id=f"safety_{label}", model=model, shards="shard"))
    final = aligned or tuned or base
    made = [name for name in dict.fromkeys([base, tuned, "reward_model"]) if name in nodes and name != final]
    add("register", model=final, **{name: name for name in [*made, *judged] if name})
    return nodes


def _adopting(nodes: Graph, adopted: Mapping[str, str]) -> Graph:
    """The graph with adopted nodes cut off from their inputs, without what only they needed."""
    cut = {
        name: replace(node, inputs={}, after=(), adopted=adopted[name]) if name in adopted else node
        for name, node in nodes.items()
    }
    for name, node in cut.items():
        # A gate speaks of data: it falls away where they are no longer what the node descends from.
        reads = ancestors(cut, node.inputs.values())
        after = tuple(gate for gate in node.after if reads.intersection(nodes[gate].inputs.values()))
        cut[name] = replace(node, after=after)
    replaced = ancestors(nodes, [name for name in adopted if name in nodes]) - set(adopted)
    needed = ancestors(cut, [name for name in cut if name not in replaced])
    return {name: node for name, node in cut.items() if name in needed}


def _named(node: Node, config: PipelineConfig, command: str) -> Node:
    """The final stages carry the pipeline's name where the config gives them none."""
    filled: StageConfig = node.config
    if isinstance(filled, RegisterConfig) and filled.name is None:
        filled = filled.model_copy(update={"name": config.name})
    if isinstance(filled, ReportConfig | CorpusReportConfig) and filled.title is None:
        filled = filled.model_copy(update={"title": config.name})
    if isinstance(filled, ReportConfig) and not filled.command:
        filled = filled.model_copy(update={"command": command})
    return replace(node, config=filled)


def ancestors(nodes: Graph, ids: Iterable[str]) -> set[str]:
    """The nodes that these need, themselves included."""
    found: set[str] = set()
    left = list(ids)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += nodes[name].upstream
    return found


def descendants(nodes: Graph, ids: Iterable[str]) -> set[str]:
    """The nodes that hang on these, themselves included."""
    found = set(ids)
    for name, node in nodes.items():
        if found.intersection(node.upstream):
            found.add(name)
    return found


def known(nodes: Graph, ids: Iterable[str], option: str) -> list[str]:
    """The given stage ids. Raises ConfigError for each that the pipeline does not have, with the nearest right one."""
    problems = []
    for name in ids:
        if name not in nodes:
            nearest = difflib.get_close_matches(name, nodes, n=1, cutoff=0.4)
            fix = f"did you mean {nearest[0]}?" if nearest else f"its stages: {', '.join(nodes)}"
            problems.append(Problem("unknown_stage", f"{option} {name}", "the pipeline has no such stage", fix))
    if problems:
        raise ConfigError(*problems)
    return list(ids)
