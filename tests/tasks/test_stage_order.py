"""Lists of stages by kind, for readers of artifacts, against the declarations in tasks/stages.py."""

from collections.abc import Iterable

from evaluation.pages.corpus.corpus import WORDS
from evaluation.results import stage_order
from evaluation.results.pipeline import NAMES
from tasks.stages import OUR_STAGES, USUAL_STEPS


def makers(*kinds: str) -> set[str]:
    return {name for name, stage in OUR_STAGES.items() if stage.makes in kinds}


def in_the_usual_order(steps: Iterable[str]) -> bool:
    usual = [step for step in steps if step in USUAL_STEPS]
    return usual == sorted(usual, key=list(USUAL_STEPS).index)


def test_stages_are_listed_by_what_they_make_in_the_order_of_the_usual_pipeline() -> None:
    assert set(stage_order.DOCUMENTS) == makers("documents") == WORDS.keys()
    assert set(stage_order.PAIRS) == makers("instructions", "preferences")
    assert set(stage_order.MODELS) == makers("model") == NAMES.keys()
    assert set(stage_order.WEIGHTS) == makers("model", "reward_model")
    assert in_the_usual_order(stage_order.DOCUMENTS) and in_the_usual_order(stage_order.FAMILY_ORDER)
    evaluated = {"benchmarks", "needle", "safety", "mitigations", "register", "report"}
    unordered = OUR_STAGES.keys() - makers("measurement") - evaluated - {"remote_shards"}
    assert unordered <= set(stage_order.FAMILY_ORDER)
