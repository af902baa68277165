"""The sections of the report, each from what the pipeline has; a section without anything to say is left out."""

from __future__ import annotations

from evaluation.page.benchmark_sections import answers, benchmarks
from evaluation.page.family import Family
from evaluation.page.origin_sections import data, lineage, reproduce, stages
from evaluation.page.parts import Section
from evaluation.page.safety_sections import bias, memorisation, toxicity
from evaluation.page.training_sections import alignment, pretraining, tuning


def sections(family: Family, samples: int, command: str) -> list[Section]:
    """Every section that has something to say, in reading order."""
    made = [
        pretraining(family),
        tuning(family),
        alignment(family),
        benchmarks(family),
        answers(family, samples),
        toxicity(family),
        bias(family),
        memorisation(family),
        data(family),
        stages(family),
        lineage(family),
        reproduce(family, command),
    ]
    return [section for section in made if section]
