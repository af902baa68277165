"""stemma plan: its contract, what two wishes make of the third, and what is said of wishes that cannot be."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cli.commands import stemma as command_line
from infra.errors import ConfigError, Problem
from tests.support.pipelines import data_config
from tests.support.programs.command import stemma, write_config
from training.core.devices import DEVICES
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


def test_a_mixture_of_experts_is_planned_with_layouts_that_spread_them() -> None:
    words = ["plan", "--preset", "mixtral-8x7b", "--tokens", "1e12", "--gpu", "h100", "--gpus", "64"]
    found = stemma(*words).document
    assert found["parameters"] == 46_702_792_704 and found["layout"]["ep"] == 8
    assert found["flops"] == pytest.approx(6 * 12.9e9 * 1e12, rel=0.1), "by the parameters that a token passes"
    assert found["step_parts"]["experts"] > 0
    assert found["memory_gb_per_gpu"] < found["memory_gb_per_gpu_high"] * 0.99 < DEVICES["h100"].memory / 1e9
    (said,) = (said for said in found["assumptions"] if said.startswith("experts: "))
    assert "1.25 times as many" in said
    assert any("ep" not in other["layout"] for other in found["others"]), (
        "the best that sends no tokens, and why it lost"
    )
    dense = plan(request(preset="llama-2-7b", tokens=1e12, gpu="h100", gpus=64))
    assert dense["memory_gb_per_gpu_high"] == dense["memory_gb_per_gpu"] and dense["step_parts"]["experts"] == 0
    assert found["loss"] < dense["loss"], "more parameters a token"
    assert 1.15 < found["hours_high"] / found["hours"] / (dense["hours_high"] / dense["hours"]) < 1.3


def test_the_model_of_a_config_is_planned(tmp_path: Path) -> None:
    """Its batch, length, tokens and devices too, but for what options say; and it is written back as it was named."""
    changed = {"transformers": {"num_hidden_layers": 16}, "preset": "mixtral-8x7b"}
    pretrain = {"model": changed, "duration": "1e11 tokens", "global_batch_tokens": 262_144}
    sections = {**data_config(tmp_path), "shard": {"sequence_length": 4096}, "tokenizer": {"vocab_size": 32_000}}
    launch = {"hardware": "h100", "processes": 8, "nodes": 4}
    config = write_config(tmp_path / "mixture.yaml", {**sections, "pretrain": pretrain, "launch": launch})
    written = tmp_path / "planned.yaml"
    found = stemma("plan", config, "--write", written).document
    assert (found["gpu"], found["gpus"], found["batch_tokens"]) == ("h100", 32, 262_144)
    assert (found["sequence_length"], found["tokens"]) == (4096, 1e11)
    whole = plan(request(preset="mixtral-8x7b", tokens=1e11, gpu="h100", gpus=64))
    assert 0.5 < found["parameters"] / whole["parameters"] < 0.52
    again = stemma("plan", written, "--gpus", "16", "--days", "2").document
    assert (again["parameters"], again["gpus"]) == (found["parameters"], 16)
    assert again["hours"] == pytest.approx(48, rel=0.01) and again["tokens"] != 1e11
    refused = stemma("plan", config, "--preset", "gpt2").document["errors"]
    assert [one["code"] for one in refused] == ["two_sizes"]
    assert [one["code"] for one in stemma("plan", "--set", "a.b=1").document["errors"]] == ["no_config"]


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
    assert "5.9 days" in found.stdout and "MFU" in found.stdout and "assumptions" in found.stdout
    assert max(map(len, found.stdout.splitlines())) < 300


def test_people_read_what_each_law_finds_and_what_buying_costs() -> None:
    """Kaplan et al. 2020, appendix A: N = 1.3e9 · C^0.73 with C in PF-days."""
    words = ["plan", "--preset", "gpt-1.3b", "--tokens", "20e9", "--gpus", "16", "--capital", "20000", "--price", "2"]
    found = CliRunner().invoke(command_line, words).stdout
    plain = plan(request(preset="gpt-1.3b", tokens=20e9, gpus=16))
    assert "320,000 USD" in found and "20,000 USD per device, as given" in found
    assert "as much as 416.7 days of rent" in found, "10,000 hours of 2 USD"
    assert plain["optimal"]["kaplan"]["parameters"] == pytest.approx(1.3e9 * (plain["flops"] / 8.64e19) ** 0.73)
    assert plain["optimal"]["kaplan"]["parameters"] > 1.5 * plain["optimal"]["besiroglu"]["parameters"]
    for law in plain["optimal"]:
        assert f"best for this compute, by {law} " in found


@pytest.mark.parametrize(
    ("own", "used", "choice"),
    [
        (None, None, "unknown"),
        (6e9, None, "scratch"),  # four readings are more than the 20 billion
        (2e9, None, "continue"),
        (3e8, None, "tune"),
        (1e5, None, "api"),
        (3e8, 1e7, "api"),  # 120 USD a year
        (3e8, 1e12, "tune"),
    ],
)
def test_whether_to_train_at_all_follows_from_text_and_use(own: float | None, used: float | None, choice: str) -> None:
    found = plan(request(preset="gpt-1.3b", tokens=20e9, gpus=16, own_tokens=own, used_tokens=used))["verdict"]
    assert found["choice"] == choice
    assert (found["figures"]["api_usd_a_year"] is None) == (used is None)


def test_every_device_has_its_sources_and_newer_ones_are_faster() -> None:
    found = {name: plan(request(preset="gpt-1.3b", tokens=2e10, gpu=name, kernels="megatron")) for name in DEVICES}
    for name, one in found.items():
        for figure in ("hours", "cost_usd", "energy_kwh", "carbon_kg"):
            assert 0 < one[f"{figure}_low"] <= one[figure] <= one[f"{figure}_high"], (name, figure)
        assert 0.1 < one["mfu"] < 0.75 and one["memory_gb_per_gpu"] * 1e9 < DEVICES[name].memory
        (source,) = (said for said in one["assumptions"] if said.startswith("device: "))
        assert "20" in source, "no year"
    hours = [found[name]["hours"] for name in ("v100", "a100-40", "a100-80", "h100", "h200", "b200")]
    assert hours == sorted(hours, reverse=True) and found["tpu-v3"]["hours"] > found["tpu-v4"]["hours"]


def test_a_slow_network_between_pods_costs_time() -> None:
    def at(**pods: float) -> float:
        return plan(request(preset="llama-2-7b", tokens=1e11, gpu="h100", gpus=64, **pods))["hours"]

    assert at() == at(pod=64, pod_gbit=10) < at(pod=32, pod_gbit=800) < at(pod=32, pod_gbit=10)
    assert [one.code for one in refused(preset="gpt-1.3b", pod=32, gpus=0)] == ["not_positive", "half_a_network"]


def test_numbers_that_nothing_could_be_are_refused() -> None:
    """A negative sequence length came to a negative time and cost, an infinite budget to a traceback."""
    for name in ("length", "batch_tokens", "vocabulary", "price", "capital", "gbit", "own_tokens", "used_tokens"):
        for value in (-1, math.nan, math.inf):
            assert [one.code for one in refused(preset="gpt-125m", tokens=1e9, **{name: value})] == ["not_positive"]
    assert refused(preset="gpt-125m", tokens=1e9, length=0)[0].path == "--sequence-length"
    for name in ("tokens", "compute", "money", "days"):
        for value in (math.inf, math.nan, 1e300, 1e-300):
            (problem,) = refused(preset="gpt-125m", **{name: value})
            assert (problem.code, problem.path) == ("not_positive", f"--{name}")


def test_wishes_that_cannot_be_say_what_would_have_to_change() -> None:
    assert "did you mean a100-40?" in refused(preset="gpt-1.3b", gpu="a10040")[0].fix
    assert "devices.py" in refused(preset="gpt-1.3b", gpu="abacus")[0].fix
    assert refused(preset="gpt-1.2b")[0].fix == "did you mean gpt-1.3b?"
    (nowhere,) = refused(preset="gpt-175b", gpu="a100-40")
    assert nowhere.code == "does_not_fit" and "128 of them" in nowhere.fix
    most = float(nowhere.fix.split("--parameters ")[1].split()[0])
    assert plan(request(parameters=most, gpu="a100-40"))["memory_gb_per_gpu"] < 42
    assert refused(parameters=1.3 * most, tokens=1e9, gpu="a100-40")[0].code == "does_not_fit"
    assert refused(preset="gpt-175b", days=1, gpu="a100-40") == [nowhere], "and not that a day is too short for it"
    (few,) = refused(preset="gpt-125m", tokens=1e5)
    assert few.code == "too_few_tokens" and "524,288" in few.message
    codes = {one.code for one in refused(preset="gpt2", parameters=1e9, money=1, days=-3)}
    assert codes == {"two_sizes", "two_budgets", "not_positive"}
    endless = ({"compute": math.inf}, {"tokens": math.inf}, {"price": math.nan}, {"own_tokens": math.nan})
    for wish in (*endless, {"length": 0}, {"vocabulary": -1}, {"batch_tokens": 0}):
        assert [one.code for one in refused(**{"preset": "gpt-125m", **wish})] == ["not_positive"], wish
    assert refused(gpus=8)[0].code == "nothing_to_plan"
    assert refused(money=0.0001)[0].code == "budget_too_small"
    wrong = refused(preset="gpt", gpu="abacus", kernels="magic", law="murphy")
    assert [one.code for one in wrong] == ["unknown_hardware", "unknown_law", "unknown_kernels", "unknown_preset"]


def test_a_batch_that_devices_cannot_share_is_named_with_one_that_they_can() -> None:
    """It was taken for a model that is too large, of which 1e5 parameters fit."""
    uneven = {"parameters": 20e9, "tokens": 1e12, "gpu": "a100-80", "gpus": 96}
    (wrong,) = refused(batch_tokens=1538 * 2048, **uneven)
    assert (wrong.code, wrong.path) == ("does_not_fit", "--batch-tokens") and "1,538 sequences" in wrong.message
    batch = int(wrong.fix.split("--batch-tokens ")[1].split()[0])
    assert abs(batch / (1538 * 2048) - 1) < 0.05
    assert plan(request(batch_tokens=batch, **uneven))["memory_gb_per_gpu"] < 80 * 2**30 / 1e9


def test_a_law_of_ones_own(tmp_path: Any) -> None:
    (tmp_path / "law.json").write_text('{"E": 1.8172, "A": 482.01, "B": 2085.43, "alpha": 0.3478, "beta": 0.3658}')
    mine = plan(request(parameters=1e9, law=str(tmp_path / "law.json")))
    assert mine["optimal"]["own"] == mine["optimal"]["besiroglu"]
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
