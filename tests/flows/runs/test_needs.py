"""`stemma check` tells what each training step takes; what the named device does not hold is refused, by a run too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from corpus.config import InstructionsConfig
from flows.config.architecture import architecture_of
from flows.config.graph import graph
from flows.config.read import load
from flows.planning.needs import check_hardware, refuse, refuse_run, stage_needs
from flows.planning.plan import plan
from infra.errors import ConfigError
from infra.launch.config import LaunchConfig
from infra.launch.devices.gpus import DriverAnswer, Gpu, TorchAnswer
from infra.store.store import Store
from tests.evaluation.conftest import make_model
from tests.support.programs.command import Answer, stemma, write_config
from training.config import LoraConfig, PreferenceTuningConfig, RewardModelConfig, RlhfConfig, SftConfig
from training.core.devices import DEVICES
from training.planner.architecture import of_preset
from training.planner.plan import plan as planned
from training.planner.plan import request
from training.planner.stages import StageNeeds
from training.planner.stages import needs as stage_needs_of
from training.planner.ways_out import launch_that_fits
from training.sandbox.runner import weakness

CONFIG = Path(__file__).parents[3] / "configs" / "gpt-1.3b.yaml"
QUICKSTART = CONFIG.with_name("quickstart.yaml")
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 79 * 2**30, 78 * 2**30)
TORCH = TorchAnswer("2.7.0+cu126", "12.6", ("sm_80", "sm_90"), True, gpus=(H100,))
"""What torch answers on a machine with one H100."""


def needs(tmp_path: Path, of: Path = CONFIG, **settings: str) -> Any:
    config = load(of, {key.replace("__", "."): value for key, value in settings.items()})
    assert not check_hardware(config)
    nodes = graph(config)
    found = stage_needs(config, nodes, plan(nodes, Store(tmp_path / "store", reading=True)))
    return config, nodes, found


def test_pretraining_takes_what_the_plan_of_its_layout_says(tmp_path: Path) -> None:
    _, _, found = needs(tmp_path, launch__hardware="a100-80")
    assert list(found) == ["pretrain", "sft", "reward_model", "rlhf"]
    wanted = planned(request(preset="gpt-1.3b", tokens=26e9, gpu="a100-80", gpus=8))
    assert found["pretrain"].hours == pytest.approx(wanted["hours"], rel=0.05)
    assert found["pretrain"].cost_usd == pytest.approx(wanted["cost_usd"], rel=0.05)
    assert found["sft"].hours is None, "its pairs are not known yet"
    assert found["pretrain"].disk_gb == pytest.approx((3 * 12 + 4) * 1.3157, rel=0.01)


def test_the_config_for_one_gpu_takes_an_hour_on_a_recent_one_and_fits_24_gb(tmp_path: Path) -> None:
    """As its comments and the README say."""
    small = CONFIG.with_name("small.yaml")
    _, _, recent = needs(tmp_path, small, launch__hardware="h100")
    assert recent["pretrain"].hours < 1 and recent["rlhf"].hours < 1
    _, _, least = needs(tmp_path, small, launch__hardware="a10g")
    assert all(found.fits for found in least.values()) and {"sft", "reward_model", "judge", "rlhf"} <= set(least)


def test_what_cannot_fit_is_refused_with_what_would(tmp_path: Path) -> None:
    config, nodes, found = needs(tmp_path, launch__hardware="a10g", launch__processes="1")
    with pytest.raises(ConfigError) as error:
        refuse(config, nodes, found)
    places = [one.path for one in error.value.problems]
    assert "pretrain" in places and "rlhf" in places
    fix = dict(zip(places, error.value.problems, strict=True))["pretrain"].fix
    ways = fix.removeprefix("it would fit with ").removesuffix("; stemma plan finds the fastest that fits")
    least, other = ways.split(", or with ")
    assert least == "launch.recompute: full" and other.startswith("launch.hardware: ")
    for way in (least, other):
        changes = dict(change.removeprefix("launch.").split(": ") for change in way.split(", "))
        settings = {"hardware": "a10g", "processes": "1"} | changes
        _, _, found = needs(tmp_path, **{f"launch__{key}": value for key, value in settings.items()})
        assert found["pretrain"].fits, way


def test_the_least_change_with_which_a_stage_fits_is_told() -> None:
    """One key where that is enough, sharding before recomputing, and none where no machine holds it."""
    arch, device = of_preset("gpt-1.3b"), DEVICES["a100-40"]
    config = load(CONFIG, {}).pretrain
    assert config is not None

    def ways(**launch: Any) -> tuple[str, ...]:
        wanted = LaunchConfig(hardware="a100-40", **launch)
        assert not stage_needs_of(config, arch, 2048, wanted, device, None).fits
        return launch_that_fits(config, arch, 2048, wanted, device)

    assert ways(microbatch=64)[0] == "launch.microbatch: auto"
    assert ways(processes=8, microbatch=64, recompute="full")[0] == "launch.microbatch: auto"
    larger = replace(arch, layers=4 * arch.layers)
    assert launch_that_fits(config, larger, 2048, LaunchConfig(processes=8), device)[0] == "launch.sharding: fsdp"
    nodes = launch_that_fits(config, larger, 2048, LaunchConfig(recompute="full"), device)[0]
    assert nodes == "launch.nodes: 4, launch.sharding: fsdp"
    vast = replace(arch, layers=4000 * arch.layers)
    assert launch_that_fits(config, vast, 2048, LaunchConfig(), device) == ()


def test_adapters_are_planned_without_gradients_and_moments_of_frozen_weights() -> None:
    """A model of 7B whose whole tuning no A100 holds."""
    arch, launch, device = of_preset("llama-2-7b"), LaunchConfig(microbatch=1), DEVICES["a100-80"]
    whole, adapters = (
        stage_needs_of(SftConfig(lora=lora), arch, 1024, launch, device, None) for lora in (None, LoraConfig())
    )
    assert not whole.fits and adapters.fits
    assert adapters.disk_gb < 0.6 * whole.disk_gb
    # Weights in fp32, their copies in bf16, and little beside.
    assert 6 * arch.parameters / 1e9 < adapters.memory_gb < 8 * arch.parameters / 1e9


def test_what_waits_in_the_hosts_memory_is_not_on_the_device() -> None:
    arch, device = of_preset("llama-2-7b"), DEVICES["a100-80"]

    def of(**launch: Any) -> StageNeeds:
        at = LaunchConfig.model_validate({"sharding": "fsdp", "microbatch": 1, **launch})
        return stage_needs_of(SftConfig(), arch, 1024, at, device, None)

    assert not of().fits and of(offload=True).fits
    # What is outside of the layers is gathered with its gradients, however many ranks there are.
    outside = 2 * arch.embedding * (4 + 4) / 1e9
    for launch in ({}, {"processes": 2}, {"processes": 2, "sharding": "hsdp"}):
        assert outside < of(offload=True, **launch).memory_gb < of(**launch).memory_gb / 3
    # Layers stay whole in bf16 from their forward to the end of their backward pass.
    assert of(offload=True, sharding="zero2").memory_gb > outside + 2 * 6.4


def test_a_value_function_is_planned_as_a_second_network_that_learns() -> None:
    """Weights, gradients and two moments: 16 bytes a parameter, and 4 each of the reference and the reward model."""
    arch, device = of_preset("gpt-1.3b"), DEVICES["a100-80"]

    def of(answers: int, **launch: Any) -> StageNeeds:
        config = RlhfConfig(answers_per_prompt=answers, minibatch_answers=8, max_prompt_tokens=8, answer_max_tokens=8)
        return stage_needs_of(config, arch, 16, LaunchConfig(microbatch=1, **launch), device, None)

    def bytes_of(answers: int, **launch: Any) -> float:
        return of(answers, **launch).memory_gb * 1e9 / arch.parameters

    assert of(1).disk_gb - of(4).disk_gb == pytest.approx(3 * 12 * arch.parameters / 1e9)
    # And copies of weights in bf16, and what the allocator cannot use.
    assert 40 < bytes_of(1) < 48 and 24 < bytes_of(4) < 29
    # Whole copies of what learns write the answers.
    sharded = {"processes": 8, "sharding": "fsdp"}
    assert bytes_of(1, **sharded) > 2 * 16 / 8 + 4 * 4 and bytes_of(4, **sharded) > 16 / 8 + 3 * 4


@pytest.mark.parametrize("config", [RewardModelConfig(), PreferenceTuningConfig()], ids=["reward model", "preferences"])
def test_a_microbatch_of_pairs_has_two_sequences_each(config: RewardModelConfig | PreferenceTuningConfig) -> None:
    arch, device = of_preset("gpt-1.3b"), DEVICES["a100-80"]
    found = stage_needs_of(config, arch, 1024, LaunchConfig(microbatch=4), device, None)
    assert found.microbatch == 8
    least = stage_needs_of(config, arch, 1024, LaunchConfig(), replace(device, memory_gib=2), None)
    assert least.microbatch == 2 and least.memory_gb < found.memory_gb


def test_a_machine_that_is_only_at_hand_refuses_nothing(tmp_path: Path) -> None:
    config, nodes, found = needs(tmp_path)
    refuse(config, nodes, found)
    assert found["pretrain"].device in ("cpu", "h100", "a100-80", "a100-40", "h200")


def test_a_model_whose_layers_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    def problems(**settings: str) -> list[tuple[str, str]]:
        given = {"launch.trainer": "native", "launch.processes": "8", **settings}
        return [(one.code, one.message) for one in check_hardware(load(CONFIG, given))]

    (wrong,) = problems(**{"launch.tensor_parallel": "8"})
    assert wrong[0] == "no_tensor_parallel" and "not gpt2" in wrong[1]
    llama = {"pretrain.model.preset": "llama-3.2-1b", "launch.tensor_parallel": "8"}
    assert not problems(**llama)
    with pytest.raises(ConfigError, match="trainer: native"):
        problems(**llama, **{"launch.trainer": "composer"})


def test_batches_that_ranks_cannot_share_are_refused_before_anything_runs() -> None:
    """Else a tuning ends at its beginning, after the pretraining."""

    def problems(**settings: str) -> list[tuple[str, str, str]]:
        return [(one.code, one.path, one.message) for one in check_hardware(load(QUICKSTART, settings))]

    assert not problems() and not problems(**{"launch.processes": "2"})
    odd = {"sft.global_batch_examples": "30", "pretrain.global_batch_tokens": "2560", "launch.processes": "4"}
    found = problems(**odd)
    said = "expected a batch divisible among 4 ranks, not 30 examples"
    assert ("not_divisible", "sft.global_batch_examples", said) in found
    assert {path for _, path, _ in found} == {"pretrain.global_batch_tokens", "sft.global_batch_examples"}
    shared = {"launch.trainer": "native", "launch.tensor_parallel": "4"}
    assert "pretrain.global_batch_tokens" not in {path for _, path, _ in problems(**odd, **shared)}


def test_sequences_that_ranks_cannot_share_are_refused() -> None:
    def problems(**settings: str) -> list[tuple[str, str, str]]:
        given = {"launch.trainer": "native", "launch.processes": "8", "launch.context_parallel": "8", **settings}
        return [(one.code, one.path, one.message) for one in check_hardware(load(CONFIG, given))]

    assert not problems()
    ((code, path, message),) = problems(**{"shard.sequence_length": "1032", "pretrain.global_batch_tokens": "1032000"})
    assert (
        (code, path) == ("not_divisible", "launch.context_parallel") and "16 tokens" in message and "1,032" in message
    )
    both = {"pretrain.model.preset": "llama-3.2-1b", "launch.tensor_parallel": "8"}
    both |= {"launch.processes": "32", "launch.context_parallel": "4", "launch.sharding": "fsdp"}
    odd = {"shard.sequence_length": "1032", "pretrain.global_batch_tokens": "1032000"}
    (found,) = [one for one in problems(**both, **odd) if one[0] == "not_divisible"]
    assert "32 tokens, two chunks a rank, each split over 8 ranks" in found[2]
    mixture = "{model_type: olmoe, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4}"
    ((code, _, message),) = problems(**{"pretrain.model": f"{{transformers: {mixture}}}", "pretrain.recipe": "null"})
    assert code == "no_context_parallel" and "not olmoe" in message
    ((code, _, message),) = problems(**{"pretrain.objective": "prefix"})
    assert code == "no_context_parallel" and "objective: causal, not prefix" in message
    with pytest.raises(ConfigError, match="trainer: native"):
        problems(**{"launch.trainer": "composer"})


def test_models_whose_experts_ranks_cannot_share_are_refused() -> None:
    def problems(model: str, **settings: str) -> list[tuple[str, str, str, str]]:
        given = {"launch.trainer": "native", "launch.processes": "8", "launch.expert_parallel": "4", **settings}
        given |= {"pretrain.model": model, "pretrain.recipe": "null"}
        return [(one.code, one.path, one.message, one.fix) for one in check_hardware(load(CONFIG, given))]

    sizes = "hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4"
    assert not problems(f"{{transformers: {{model_type: mixtral, {sizes}}}}}")
    assert not problems(f"{{transformers: {{model_type: olmoe, {sizes}, num_experts: 8}}}}")
    ((code, path, message, fix),) = problems("{preset: gpt-125m}")
    assert (code, path) == ("no_expert_parallel", "launch.expert_parallel") and "not gpt2" in message
    assert "leave launch.expert_parallel out" in fix
    ((code, _, message, _),) = problems(f"{{transformers: {{model_type: qwen3_moe, {sizes}, num_experts: 6}}}}")
    assert code == "not_divisible" and "a multiple of 4, not 6" in message
    mixtral = f"{{transformers: {{model_type: mixtral, {sizes}, num_key_value_heads: 2}}}}"
    layers = {"launch.tensor_parallel": "2"}
    assert not problems(mixtral, **layers)
    ((code, _, message, fix),) = problems(
        mixtral, **layers, **{"launch.expert_parallel": "1", "launch.sharding": "fsdp"}
    )
    assert code == "no_expert_parallel" and "beside tensor_parallel" in message and "2 or more" in fix
    for key in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
        found = problems(f"{{transformers: {{model_type: olmoe, {sizes}, num_experts: 8}}}}", **{f"launch.{key}": "2"})
        assert [one[:2] for one in found] == [(f"no_{key}", f"launch.{key}")]
    with pytest.raises(ConfigError, match="trainer: native"):
        problems("{preset: gpt-125m}", **{"launch.trainer": "composer"})


def test_a_model_without_linear_layers_is_refused_in_8_bits_before_anything_is_spent() -> None:
    def problems(preset: str) -> list[tuple[str, str, str, str]]:
        given = {"launch.precision": "fp8", "pretrain.model": f"{{preset: {preset}}}", "pretrain.recipe": "null"}
        return [(one.code, one.path, one.message, one.fix) for one in check_hardware(load(CONFIG, given))]

    assert not problems("llama-3.2-1b")
    ((code, path, message, fix),) = problems("gpt-125m")
    assert (code, path) == ("no_fp8", "launch.precision") and "not gpt2" in message and "bf16" in fix


def test_models_and_batches_that_are_no_pipeline_are_refused() -> None:
    def problems(**settings: str) -> list[tuple[str, str, str, str]]:
        llama = {"pretrain.model.preset": "llama-3.2-1b", "shard.sequence_length": "2048", "pretrain.recipe": "null"}
        given = {
            "launch.trainer": "native",
            "launch.processes": "8",
            "launch.pipeline_parallel": "4",
            **llama,
            **settings,
        }
        return [(one.code, one.path, one.message, one.fix) for one in check_hardware(load(CONFIG, given))]

    assert not problems()
    ((code, path, message, _),) = problems(**{"pretrain.model.preset": "gpt-1.3b"})
    assert (code, path) == ("no_pipeline_parallel", "launch.pipeline_parallel") and "not gpt2" in message
    ((code, _, message, fix),) = problems(**{"launch.pipeline_pieces": "8"})
    assert code == "too_few_layers" and "32 parts" in message and "launch.pipeline_pieces" in fix
    batch = {"pretrain.global_batch_tokens": str(24 * 2048), "pretrain.batch_warmup": "null"}
    ((code, path, message, fix),) = problems(**batch, **{"launch.microbatch": "4"})
    assert (code, path) == ("not_divisible", "launch.microbatch") and "at least 4, of the 12 sequences" in message
    assert "launch.microbatch: 1" in fix
    assert not problems(**batch, **{"launch.microbatch": "3"})
    ((code, _, message, _),) = problems(**batch | {"pretrain.global_batch_tokens": str(6 * 2048)})
    assert code == "not_divisible" and "at least 4 sequences" in message
    with pytest.raises(ConfigError, match="trainer: native"):
        problems(**{"launch.trainer": "composer"})


def test_the_command_tells_it_and_the_nearest_of_unknown_hardware(tmp_path: Path) -> None:
    settings = yaml.safe_load(CONFIG.read_text(encoding="utf8"))
    settings["launch"] = {"hardware": "h100", "processes": 8}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf8")
    answer = stemma("check", tmp_path / "config.yaml", "--root", tmp_path / "store")
    assert answer.rows()["pretrain"]["plan"]["device"] == "h100"
    assert answer.rows()["clean"]["plan"] is None
    wrong = stemma("check", tmp_path / "config.yaml", "--root", tmp_path / "store", "--set", "launch.hardware=h10")
    assert wrong.code == 2 and wrong.document["errors"][0]["code"] == "unknown_hardware"


def test_a_run_is_refused_before_anything_is_spent(run: Callable[..., Answer], tmp_path: Path) -> None:
    small = {"launch.hardware": "a10g", "launch.processes": 1}
    settings = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    answer = run("run", CONFIG, "--root", tmp_path / "store", *settings)
    assert (answer.code, answer.document["status"]) == (2, "invalid")
    assert {error["code"] for error in answer.document["errors"]} == {"does_not_fit"}
    assert not answer.document["stages"] and not list((tmp_path / "store").glob("ingest/*"))


def test_a_run_says_at_its_beginning_that_training_could_not_begin(
    run: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `launch.hardware` too; it was said after everything before the training."""
    settings = ("--set", "launch.processes=3", "--until", "pretrain")
    answer = run("run", QUICKSTART, "--root", tmp_path / "store", *settings)
    assert (answer.code, answer.document["status"]) == (2, "invalid")
    assert [error["path"] for error in answer.document["errors"]] == ["pretrain.global_batch_tokens"]
    assert not list((tmp_path / "store").glob("ingest/*"))

    def problems(chosen: tuple[str, ...] = ("ingest", "pretrain"), **launch: str) -> list[tuple[str, str]]:
        config = load(QUICKSTART, {f"launch.{key}": value for key, value in launch.items()})
        try:
            refuse_run(config, graph(config), chosen, Store(tmp_path / "store", reading=True), ())
        except ConfigError as error:
            return [(one.code, one.path) for one in error.problems]
        return []

    monkeypatch.setattr("flows.planning.needs.has_gpu", lambda: False)
    monkeypatch.delenv("NODE_RANK", raising=False)
    assert problems(device="gpu") == [("no_gpu", "launch.device")]
    assert problems(nodes="2") == [("no_node_rank", "launch.nodes")]
    assert not problems(nodes="2", device="gpu", cluster="slurm"), "which has its own machines"
    assert not problems(("ingest",), nodes="2", device="gpu"), "nothing trains"
    monkeypatch.setattr("flows.planning.needs.has_gpu", lambda: True)
    monkeypatch.setattr("flows.planning.needs.ask_torch", lambda: TORCH)
    monkeypatch.setenv("NODE_RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert not problems(nodes="2", device="gpu")


def test_a_run_is_refused_for_a_gpu_that_its_trainings_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.planning.needs.has_gpu", lambda: True)
    monkeypatch.setattr("flows.planning.needs.device_at_hand", lambda _: DEVICES["h100"])
    monkeypatch.setattr(
        "flows.planning.needs.ask_driver", lambda: DriverAnswer("570.86.15", "", ("pid 4711 (python)",), True)
    )

    def problems(gpu: Gpu, chosen: str = "pretrain", **launch: str) -> list[tuple[str, str]]:
        monkeypatch.setattr("flows.planning.needs.ask_torch", lambda: replace(TORCH, gpus=(gpu,)))
        config = load(CONFIG, {f"launch.{key}": value for key, value in {"processes": "1", **launch}.items()})
        try:
            refuse_run(config, graph(config), (chosen,), Store(tmp_path / "store", reading=True), ())
        except ConfigError as error:
            return [(one.code, one.path) for one in error.problems]
        return []

    assert not problems(H100)
    blackwell = replace(H100, name="NVIDIA B200", capability=(10, 0))
    assert problems(blackwell) == [("gpu_not_supported", "launch.device")]
    assert not problems(blackwell, device="cpu") and not problems(blackwell, "clean"), "which use no GPU"
    full = replace(H100, free=9 * 2**30)
    assert problems(full) == [("gpu_in_use", "pretrain")]
    assert not problems(full, device="cpu")


def test_a_run_whose_answers_are_executed_needs_a_sandbox_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Double.", "response": "assert f(1) == 2"}\n')

    def problems(verify: str, sandbox: str) -> list[tuple[str, str]]:
        config = load(QUICKSTART, {"launch.sandbox": sandbox})
        source = {"kind": "files", "paths": [str(rows)], "verify": verify}
        config = config.model_copy(update={"instructions": InstructionsConfig.model_validate({"read": [source]})})
        try:
            refuse_run(config, graph(config), ("sft",), Store(tmp_path / "store", reading=True), ())
        except ConfigError as error:
            return [(one.code, one.path) for one in error.problems]
        return []

    monkeypatch.setenv("PATH", str(tmp_path))
    weakness.cache_clear()
    try:
        assert problems("tests", "bubblewrap") == [("no_sandbox", "launch.sandbox")]
        assert not problems("tests", "none") and not problems("exact", "bubblewrap")
    finally:
        weakness.cache_clear()


def test_ranks_matter_to_steps_that_train_now() -> None:
    """A model that is reused may have been trained on other machines."""
    config = load(QUICKSTART, {"launch.processes": "3"})
    assert {one.path for one in check_hardware(config, ["pretrain"])} == {"pretrain.global_batch_tokens"}
    assert not check_hardware(config, ["benchmarks_base"])


def test_what_does_not_train_needs_no_gpu_of_the_cluster(run: Callable[..., Answer], tmp_path: Path) -> None:
    """`device: gpu` is what nodes have. Benchmarks run beside the command, and ended after the training."""
    config = {
        "name": "t",
        "base_model": {"path": str(make_model(tmp_path / "model", seed=0))},
        "benchmarks": {"tasks": ["cloze"], "limit": 2},
        "launch": {"cluster": "slurm", "device": "gpu", "retries": 0},
    }
    answer = run("run", write_config(tmp_path / "config.yaml", config), "--root", tmp_path / "store")
    assert answer.code == 0, answer.document["errors"]


@pytest.mark.long
def test_a_base_model_that_does_not_fit_is_refused_by_check_and_by_its_stage(
    run: Callable[..., Answer], tmp_path: Path
) -> None:
    """A run of other stages does not import transformers to compare weights; that of the model does."""
    model = make_model(tmp_path / "model", seed=0)
    config = write_config(tmp_path / "config.yaml", {"name": "t", "base_model": {"path": str(model)}})

    def problem(command: str, code: int) -> dict[str, str]:
        answer = run(command, config, "--root", tmp_path / "store")
        assert answer.code == code, answer.document
        [found] = answer.document["errors"]
        return found

    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    expected = problem("check", 2)
    assert (expected["code"], expected["path"]) == ("weights_do_not_fit", "base_model.path")
    assert expected["message"].endswith("missing: model.layers.1.mlp.up_proj.weight")
    assert problem("run", 1) == expected
    assert not list((tmp_path / "store" / "base_model").glob("*/manifest.json"))

    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"quantization_config": {"quant_method": "gptq"}}))
    quantized = problem("run", 2)
    assert (quantized["code"], quantized["path"]) == ("quantized_model", "base_model.path")


def test_an_alignment_is_planned_with_what_it_loads_and_computes() -> None:
    """A reward model and a judge more are 4 bytes a parameter each, and a forward pass; what has no value function
    takes no passes of one, and text beside the answers another pass of the policy."""
    arch, device = of_preset("gpt-1.3b"), DEVICES["h200"]

    def of(count: int, **config: Any) -> StageNeeds:
        settings = RlhfConfig(
            minibatch_answers=8, rollout_prompts=64, max_prompt_tokens=1000, answer_max_tokens=1000, **config
        )
        launch, scorers = LaunchConfig(microbatch=8), [arch.parameters] * count
        return stage_needs_of(settings, arch, 2000, launch, device, None, scorers)

    def hours(count: int, **config: Any) -> float:
        found = of(count, **config).hours
        assert found is not None
        return found

    rloo = {"algorithm": "rloo", "answers_per_prompt": 4}
    for more, fewer in ((1, 0), (3, 1)):
        added = of(more, **rloo).memory_gb - of(fewer, **rloo).memory_gb
        assert added == pytest.approx((more - fewer) * 4 * arch.parameters / 1e9)
    # In thirds of a step: sampled, read by policy and reference, learnt from; and by one that scores.
    one = hours(0, **rloo) / 6
    assert hours(1, **rloo) == pytest.approx(7 * one)
    assert hours(1) == pytest.approx((7 + 1 + 3) * one), "PPO's value function reads and learns"
    assert hours(1, algorithm="raft", answers_per_prompt=4) == pytest.approx((7 - 3 + 3 / 4) * one)
    assert hours(1, text_coef=1.0, **rloo) == pytest.approx((7 + 3) * one)
    assert of(1, text_coef=1.0, **rloo).memory_gb > of(1, **rloo).memory_gb + 10


def test_the_judge_of_a_config_is_planned(tmp_path: Path) -> None:
    def memory(**settings: str) -> float:
        config = load(QUICKSTART, {"launch.hardware": "h100", "launch.microbatch": "1", **settings})
        nodes = graph(config)
        found = stage_needs(config, nodes, plan(nodes, Store(tmp_path / "store", reading=True)))
        return found["rlhf"].memory_gb

    arch = architecture_of(graph(load(QUICKSTART, {})), "rlhf")
    assert arch is not None
    assert memory() - memory(steps="{}") == pytest.approx(4 * arch.parameters / 1e9)
