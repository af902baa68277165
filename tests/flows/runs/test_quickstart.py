"""The long proof: the whole quickstart, and what must be seen in its result on held-out data.

make test-long TESTS=tests/flows/runs/test_quickstart.py     STEMMA_ROOT names a store to use instead of a new one
                                                                       STEMMA_SEED another seed than 17
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs.command import REPOSITORY, Answer


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_quickstart_keeps_its_promises(run: Callable[..., Answer], tmp_path: Path) -> None:
    root = os.environ.get("STEMMA_ROOT") or str(tmp_path / "store")
    seed = os.environ.get("STEMMA_SEED", "17")
    answer = run("run", REPOSITORY / "configs" / "quickstart.yaml", "--root", root, "--set", f"seed={seed}")
    assert answer.code == 0, answer.document["errors"]

    def figures(stage: str) -> dict[str, float]:
        found: dict[str, float] = json.loads((Path(answer.rows()[stage]["path"]) / "manifest.json").read_text())[
            "result"
        ]["figures"]
        return found

    stages = ("pretrain", "sft", "reward_model", "rlhf")
    base, sft, reward, rlhf = (figures(f"measure_{stage}") for stage in stages)
    assert base["validation_loss_high"] < base["bigram_loss"] < base["unigram_loss"]
    assert sft["improvement_low"] > 0
    assert sft["improvement_text_low"] > 0
    assert sft["ends_share_sft_low"] > sft["ends_share_base_high"]
    assert reward["heldout_accuracy"] >= 0.7
    assert reward["p_value"] < 0.001
    assert rlhf["reward_gain_low"] > 0
    assert rlhf["reward_gain_equal_length_low"] > 0
    assert rlhf["judge_gain_low"] > 0
    assert rlhf["verified_gain_low"] > 0
    assert sft["verified_sft_low"] > sft["verified_base_high"]
    assert rlhf["kl_to_sft_high"] < 20
    assert figures("report")["claims_that_hold"] == 7
