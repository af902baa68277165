"""The usual pipeline: the nodes that the sections of a config add, wired as `tasks.stages.USUAL_STEPS` declares."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from corpus.config import DATA_KINDS, InstructionsConfig, PreferencesConfig, ValidateConfig
from corpus.generation.config import GenerateInstructionsConfig
from corpus.mix.config import MixConfig
from evaluation.config import BenchmarksConfig, BenchmarkTextConfig, SafetyConfig
from flows.config.pipeline_config import Graph, PipelineConfig
from infra.config import StageConfig
from infra.errors import Problem
from tasks.stage import Node, Stage, UsualStep
from tasks.stages import SECTIONS, STAGES, USUAL_STEPS

TEST_ITEMS = "benchmark_text"
"""The step with the test items of all benchmarks, and the input by which data are cleared of them."""
_MAKE_PAIRS = (InstructionsConfig, PreferencesConfig, GenerateInstructionsConfig)
"""The configs of stages whose pairs are cleared of test items."""
_REPEATED = {step.section for step in USUAL_STEPS.values() if step.id != step.section}
"""Sections that add one step per artifact to which they apply."""


def usual_nodes(config: PipelineConfig) -> Graph:
    """The nodes of the sections, all but the report, which reads all others."""
    nodes: Graph = {}
    for step in USUAL_STEPS.values():
        section = config.section(step.section)
        if step.id == TEST_ITEMS:
            section = items_to_clear(config)
        inputs = _inputs(step, section, nodes)
        has_main_input = next(iter(step.inputs), None) in inputs
        if isinstance(section, ValidateConfig):
            section = _suite_of(step, section, config)
        if step.id in config.adopted:
            section = StageConfig()
        is_left_out = step.reads_all or step.instead_of in nodes or (step.section in _REPEATED and not has_main_input)
        if section is None or is_left_out:
            continue
        required = next(((name,) for name in step.requires if name in nodes), ())
        stored_as = step.id if step.section in _REPEATED else ""
        nodes[step.id] = Node(step.id, STAGES[step.section], section, inputs, required, stored_as=stored_as)
    return nodes


def _inputs(step: UsualStep, section: StageConfig | None, nodes: Collection[str]) -> dict[str, str]:
    """Input name → step, for each input of which the pipeline has a step."""
    inputs = {}
    for name, candidates in step.inputs.items():
        is_read = name not in step.only_if or getattr(section, step.only_if[name], None)
        made_by = next((candidate for candidate in candidates if candidate in nodes), None)
        if is_read and made_by:
            inputs[name] = made_by
    return inputs | {name: name for name in step.further if name in nodes and name not in inputs.values()}


def _suite_of(step: UsualStep, section: ValidateConfig, config: PipelineConfig) -> ValidateConfig | None:
    """The part of a validation's config for the data of one step; None if they are not validated."""
    kind = next(kind for kind in DATA_KINDS if kind == step.checks)
    if getattr(section, kind) is None:
        return None
    # A mixture repeats documents on purpose, up to its cap.
    mix = config.of(MixConfig)
    copies = {"max_copies": math.ceil(mix.max_epochs)} if mix and kind in ("clean", "shards") else {}
    return section.of(kind, **copies)


def items_to_clear(config: PipelineConfig) -> BenchmarkTextConfig | None:
    """The section benchmark_text with the benchmarks and probes that the pipeline will run, of named steps too; without
    the section where instructions or preferences are cleared of them. None where there is nothing to clear."""
    section = config.of(BenchmarkTextConfig)
    filled = (section or BenchmarkTextConfig()).filled(config.all_of(BenchmarksConfig), config.all_of(SafetyConfig))
    if section:
        return filled
    pairs: list[InstructionsConfig | PreferencesConfig | GenerateInstructionsConfig] = [
        *config.all_of(InstructionsConfig),
        *config.all_of(PreferencesConfig),
        *config.all_of(GenerateInstructionsConfig),
    ]
    has_items = filled.tasks or filled.prompts or filled.pairs
    return filled if has_items and any(pair.decontaminate for pair in pairs) else None


def cleared_of(section: StageConfig | None, items: str) -> dict[str, str]:
    """The input with the test items that a stage's pairs are cleared of."""
    return {TEST_ITEMS: items} if isinstance(section, _MAKE_PAIRS) and section.decontaminate else {}


def likely_stages(data: Mapping[str, Any]) -> dict[str, Stage]:
    """Steps that correct sections of plain data would give, and more, with their stages: no name that may exist is
    reported as unknown."""
    present = [step for step in USUAL_STEPS.values() if step.section in data]
    if any(TEST_ITEMS in candidates for step in present for candidates in step.inputs.values()):
        present.append(USUAL_STEPS[TEST_ITEMS])
    return {step.id: STAGES[step.section] for step in present if not step.reads_all}


def missing_sections(config: PipelineConfig) -> Iterator[Problem]:
    """Return problems of sections whose inputs no other section makes."""
    present = {name for name in SECTIONS if config.section(name) is not None} | set(config.adopted)
    has_documents = any(name in STAGES and STAGES[name].makes == "documents" for name in config.adopted)
    seen: Counter[str] = Counter()
    for step in USUAL_STEPS.values():
        seen[step.section] += 1
        is_checked = seen[step.section] == 1 and config.section(step.section) is not None
        if not is_checked or step.id in config.adopted:
            continue
        for name in _needed(step):
            makers = _first_makers(step.inputs[name])
            if present & set(makers) or (has_documents and STAGES[makers[0]].makes == "documents"):
                continue
            if len(makers) == 1:
                message, fix = f"needs the section {makers[0]}, which is missing", f"add {makers[0]}:"
            else:
                kind = STAGES[makers[0]].makes.replace("_", " ")
                message, fix = f"needs a {kind}: expected a {' or a '.join(makers)} section", ""
            yield Problem("missing_section", step.section, message, fix)
    for step in USUAL_STEPS.values():
        if {step.id, step.instead_of} <= present:
            message = f"expected either {step.instead_of} or {step.id}, not both"
            yield Problem("contradiction", step.id, message)
    if not config.steps and not any(config.section(name) for name in SECTIONS):
        yield Problem("empty_config", "", "no stages: expected at least one section such as ingest")


def _needed(step: UsualStep) -> list[str]:
    """The inputs without which a section is an error."""
    required = {item.name for item in STAGES[step.section].inputs if not item.optional}
    return [name for name in step.inputs if name in required or name in step.needs]


def _first_makers(candidates: Collection[str]) -> list[str]:
    """Return the steps that depend on none of the others: of all that make documents, ingest."""
    return [
        name
        for name in candidates
        if not any(set(USUAL_STEPS[name].inputs[read]).intersection(candidates) for read in _needed(USUAL_STEPS[name]))
    ]
