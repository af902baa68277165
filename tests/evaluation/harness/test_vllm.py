"""lm-eval's questions to a real vLLM, which STEMMA_VLLM names: what our own engine answers, but for rounding."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evaluation.benchmarks import benchmarks
from evaluation.config import BenchmarksConfig
from evaluation.generation.language_model import load_model
from evaluation.harness.vllm_model import VllmLM, served
from infra.errors import StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from infra.servers.vllm import PROGRAM
from tests.evaluation.conftest import TEXT

if TYPE_CHECKING:  # seconds to import, for each test worker that reads this file
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not os.environ.get(PROGRAM), reason="STEMMA_VLLM names no program of vLLM"),
]
LAUNCH = LaunchConfig.model_validate({"device": "cpu", "vllm": {"arguments": ["--enforce-eager"]}})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, new_model: Callable[..., Path]) -> Path:
    """With heads as wide as vLLM's kernels for CPUs want them."""
    return new_model(tmp_path_factory.mktemp("wide"), seed=0, width=64)


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HFLM, VllmLM]]:
    from lm_eval.models.huggingface import HFLM

    run = Run(tmp_path_factory.mktemp("run"), LAUNCH)
    lm = load_model(model, run)
    with served(model, run) as vllm:
        yield HFLM(pretrained=lm.model, tokenizer=lm.tokenizer, batch_size=1), vllm


def _asked(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]  # type: ignore[arg-type]


def test_likelihoods_are_those_of_lm_eval_s_own_model(both: tuple[HFLM, VllmLM]) -> None:
    """Choices with and without a context, documents longer than the model's context. The risk: scores of the tokens
    beside those that were asked for."""
    own, vllm = both
    free = own.generate_until(_asked("generate_until", (TEXT[0], {"max_gen_toks": 2, "until": []})))[0]
    pairs = [(text, f" {word}") for text in TEXT[:3] for word in ("list", "string", "object")]
    requests = _asked("loglikelihood", *pairs, ("", TEXT[4]), (TEXT[0], free))
    theirs, ours = own.loglikelihood(requests, disable_tqdm=True), vllm.loglikelihood(requests)
    assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], abs=1e-3)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    documents = _asked("loglikelihood_rolling", (TEXT[1],), (TEXT[5],))
    found = vllm.loglikelihood_rolling(documents, disable_tqdm=True)
    assert found == pytest.approx(own.loglikelihood_rolling(documents, disable_tqdm=True), abs=1e-3)
    (whole,) = vllm.loglikelihood_rolling(_asked("loglikelihood_rolling", (" ".join(TEXT * 3),)), disable_tqdm=True)
    assert whole < found[0]


def test_answers_are_those_of_lm_eval_s_own_model(both: tuple[HFLM, VllmLM]) -> None:
    """The risk: a stop string, or a question that is too long, that is cut elsewhere."""
    own, vllm = both
    free = own.generate_until(_asked("generate_until", (TEXT[1], {"max_gen_toks": 10, "until": []})))[0]
    ways: list[dict[str, Any]] = [{"until": [free[4:7], "e "], "max_gen_toks": 16}, {"until": [], "max_gen_toks": 8}]
    asked = _asked("generate_until", *((text, {**way, "do_sample": False}) for text in TEXT for way in ways))
    theirs = own.generate_until(asked, disable_tqdm=True)
    assert vllm.generate_until(asked) == theirs and len({len(one) for one in theirs}) > 2
    with pytest.raises(StageError, match="repetition_penalty"):
        vllm.generate_until(_asked("generate_until", (TEXT[0], {"max_gen_toks": 2, "repetition_penalty": 2.0})))


def test_the_stage_tells_its_engine_and_the_figures_of_our_own(model: Path, tmp_path: Path) -> None:
    """The risk: results of two engines that nobody can tell apart."""
    results = {}
    for engine in ("own", "vllm"):
        config = BenchmarksConfig.model_validate({"engine": engine, "limit": 12, "failure_classes": {"cases": 2}})
        run = Run(tmp_path / f"{engine}.work", LAUNCH)
        (tmp_path / engine).mkdir()
        benchmarks(config, {"model": model}, tmp_path / engine, run)
        results[engine] = json.loads((tmp_path / engine / "results.json").read_text())
    assert results["vllm"].pop("engine") == "vllm" and "engine" not in results["own"]
    assert results["vllm"] == results["own"]
