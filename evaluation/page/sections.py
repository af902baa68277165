"""The sections of the report, each from what the pipeline has; a section without anything to say is left out."""

from __future__ import annotations

from evaluation.page.benchmark_sections import answers, benchmarks
from evaluation.page.family import Family
from evaluation.page.origin_sections import data, lineage, reproduce, stages
from evaluation.page.parts import Section
from evaluation.page.safety_sections import bias, memorisation, toxicity
from evaluation.page.training_sections import alignment, pretraining, reward_model, tuning


def sections(family: Family, samples: int, command: str) -> list[Section]:
    """Every section that has something to say, in reading order."""
    made = [
        *(pretraining(family, id) for id in family.steps("pretrain")),
        *_tunings(family),
        *(alignment(family, id) for id in family.steps("rlhf")),
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


def _tunings(family: Family) -> list[Section]:
    """The usual tuning with the usual reward model on one section, named steps each on its own."""
    tunings, rewards = family.steps("sft"), family.steps("reward_model")
    made = [tuning(family, "sft", "reward_model")]
    made += [tuning(family, id) for id in tunings if id != "sft"]
    return [*made, *(reward_model(family, id) for id in rewards if id != "reward_model")]
