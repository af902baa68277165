"""stemma plan: its contract, what two wishes make of the third, and what is said of wishes that cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest
from click.testing import CliRunner

from cli.commands import stemma as command_line
from infra.errors import ConfigError, Problem
from tests.command import stemma
from training.planner.architecture import of_parameters
from training.planner.plan import plan, request

KEYS = {
    "status", "parameters", "tokens", "flops", "hours", "hours_low", "hours_high", "cost_usd", "energy_kwh", "mfu",
    "memory_gb_per_gpu", "layout", "assumptions",
}  # fmt: skip


def refused(**wishes: Any) -> list[Problem]:
    with pytest.raises(ConfigError) as error:
        plan(request(**wishes))
    return list(error.value.problems)


def test_the_contract() -> None:
    words = ["plan", "--preset", "gpt-1.3b", "--tokens", "1e9", "--gpu", "a100-40", "--gpus", "8"]
    answer = stemma(*words)
    found = answer.document
    assert answer.code == 0 and found["status"] == "done"
    assert found.keys() >= KEYS
    assert found["layout"].keys() >= {"dp", "tp", "pp", "cp", "ep", "microbatch", "recompute"}
    assert found["hours"] == pytest.approx(7.1, rel=0.15)  # Mosaic LLMs (Part 1)
    assert found["hours_low"] < found["hours"] < found["hours_high"]
    assert found["cost_usd_low"] < found["cost_usd"] < found["cost_usd_high"]
    assert found["memory_gb_per_gpu"] < 42.95
    assert len(found["assumptions"]) >= 5
    assert sum(found["memory_parts_gb"].values()) == pytest.approx(found["memory_gb_per_gpu"])
    assert sum(found["step_parts"].values()) == pytest.approx(1)


@pytest.mark.parametrize("budget", ["compute", "money", "days"])
def test_a_budget_buys_what_costs_it(budget: str) -> None:
    """With size or with tokens, the third is such that the plan of those two spends the budget."""
    key = {"compute": "flops", "money": "cost_usd", "days": "hours"}[budget]
    whole = plan(request(preset="llama-2-7b", tokens=1.3e11, gpu="h100", gpus=64))
    spent = whole[key] / (24 if budget == "days" else 1)
    at = {"gpu": "h100", "gpus": 64, budget: spent}
    assert plan(request(preset="llama-2-7b", **at))["tokens"] == pytest.approx(1.3e11, rel=0.01)
    by_tokens = plan(request(tokens=1.3e11, **at))
    assert by_tokens[key] == pytest.approx(whole[key], rel=0.1)
    alone = plan(request(**at))
    assert alone[key] == pytest.approx(whole[key], rel=0.1)
    assert 15 < alone["tokens"] / alone["parameters"] < 30  # Chinchilla


def test_people_read_a_table_with_ranges() -> None:
    words = ["plan", "--preset", "gpt-1.3b", "--tokens", "20e9", "--gpu", "a100-40", "--gpus", "8"]
    found = CliRunner().invoke(command_line, words)
    assert found.exit_code == 0
    assert "5.9 days" in found.stdout and "MFU" in found.stdout and "what this rests on" in found.stdout
    assert max(map(len, found.stdout.splitlines())) < 300


def test_wishes_that_cannot_be_say_what_would_have_to_change() -> None:
    assert "did you mean a100-40?" in refused(preset="gpt-1.3b", gpu="a10040")[0].fix
    assert "devices.py" in refused(preset="gpt-1.3b", gpu="abacus")[0].fix
    assert refused(preset="gpt-1.2b")[0].fix == "did you mean gpt-1.3b?"
    (nowhere,) = refused(preset="gpt-175b", gpu="a100-40")
    assert nowhere.code == "does_not_fit" and "128 of them" in nowhere.fix
    (few,) = refused(preset="gpt-125m", tokens=1e5)
    assert few.code == "too_few_tokens" and "524,288" in few.message
    codes = {one.code for one in refused(preset="gpt2", parameters=1e9, money=1, days=-3)}
    assert codes == {"two_sizes", "two_budgets", "not_positive"}
    assert refused(gpus=8)[0].code == "nothing_to_plan"
    assert refused(money=0.0001)[0].code == "budget_too_small"
    wrong = refused(preset="gpt", gpu="abacus", kernels="magic", law="murphy")
    assert [one.code for one in wrong] == ["unknown_hardware", "unknown_law", "unknown_kernels", "unknown_preset"]


def test_a_law_of_ones_own(tmp_path: Any) -> None:
    (tmp_path / "law.json").write_text('{"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}')
    mine = plan(request(parameters=1e9, law=str(tmp_path / "law.json")))
    theirs = plan(request(parameters=1e9, law="besiroglu"))
    assert mine["tokens"] == theirs["tokens"] and math.isclose(mine["loss"], theirs["loss"])
    (tmp_path / "law.json").write_text('{"E": 1.8}')
    assert refused(parameters=1e9, law=str(tmp_path / "law.json"))[0].code == "bad_law"


def test_sizes_and_budgets_beyond_all_devices_are_said_to_be() -> None:
    with pytest.raises(ConfigError, match="at most 2e\\+13 parameters"):
        of_parameters(1e30)
    found = plan(request(gpu="h100", gpus=8, money=1e9))
    assert found["cost_usd"] < 5e8 and "the largest that these devices hold" in found["because"]
    assert of_parameters(2e13).parameters == pytest.approx(2e13, rel=0.1)
