"""Bytes that each kind of parallelism sends in a step, against the formulas of the papers that name it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from training.core.devices import DEVICES
from training.planner.architecture import Architecture
from training.planner.hardware.kernels import KERNELS
from training.planner.hardware.network import Network
from training.planner.step_time import RankLayout, Training, step_time

# A second a byte, without start-up: times are volumes of a device. Nothing hides.
_BYTES = Network(link=1.0, network=1.0, node=1 << 20, start_s=0, far_start_s=0, reached=1.0, straggle=0)
_KERNELS = replace(KERNELS["flash"], overlap=0.0)
_DENSE = Architecture("dense", 4, 512, 8, 2, 64, 2048, 1000, gated=True)
_MIXTURE = replace(_DENSE, experts=8, active_experts=2)
_LENGTH, _DEVICES, _MICROBATCHES = 1024, 8, 4
_TOKENS = _MICROBATCHES * _LENGTH  # of a device
_WIDTH, _KEYS = 512, 2 * 64
_PART = (_DEVICES - 1) / _DEVICES
_N = _DENSE.parameters


def _sent(layout: RankLayout, arch: Architecture = _DENSE) -> dict[str, float]:
    batch = _MICROBATCHES * layout.dp
    return vars(step_time(Training(arch, DEVICES["a100-80"], _KERNELS, _BYTES, _LENGTH, batch), layout))


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        # Rajbhandari et al. 2020, section 7: 2 N numbers with data parallelism, by a ring (n - 1) / n of it. Here
        # gradients and updated weights are in fp32, gathered weights in bf16.
        ("ddp", 2 * 4 * _N),
        # Gradients summed as by DDP, and the updated weights gathered.
        ("zero1", 2 * 4 * _N + 4 * _N),
        # Per microbatch: weights gathered once, gradients scattered.
        ("zero2", _MICROBATCHES * (2 * _N + 4 * _N)),
        # Section 7.2.2: weights twice, gradients once.
        ("zero3", _MICROBATCHES * (2 * 2 * _N + 4 * _N)),
    ],
)
def test_data_parallel_kinds_send_what_zero_s_paper_counts(sharding: str, expected: float) -> None:
    found = _sent(RankLayout(dp=_DEVICES, sharding=sharding))["data"]  # type: ignore[arg-type]
    assert found == pytest.approx(_PART * expected)


def test_hsdp_gathers_within_groups_and_sums_parts_between_them() -> None:
    """Zhao et al. 2023 (FSDP), section 3.2.2."""
    found = _sent(RankLayout(dp=_DEVICES, sharding="hsdp", shard_ranks=4))["data"]
    within = _MICROBATCHES * (3 / 4) * (2 * 2 * _N + 4 * _N)
    assert found == pytest.approx(within + _MICROBATCHES * 2 * (1 / 2) * 4 * _N / 4)


def test_optimizer_state_of_experts_is_gathered_among_their_copies() -> None:
    experts = _MIXTURE.layers * _MIXTURE.experts * _MIXTURE.mlp_weights
    layout = RankLayout(dp=_DEVICES, ep=4, sharding="zero1")
    dense, apart = 4 * (_MIXTURE.parameters - experts), 4 * experts / 4
    assert _sent(layout, _MIXTURE)["data"] == pytest.approx(3 * _PART * dense + 3 * (1 / 2) * apart)


@pytest.mark.parametrize(("recompute", "sums"), [("none", 4), ("selective", 6), ("full", 6)])
def test_tensor_parallel_layers_sum_their_outputs(recompute: str, sums: int) -> None:
    """Shoeybi et al. 2019, section 3: two sums of (tokens, width) forward and two backward in each layer; Korthikanti
    et al. 2022, section 4.2.2: sequence parallelism sends as much. Here a sum is scattered in bf16 and gathered in the
    residual stream's fp32, or the other way round; the stream is split and joined, and embeddings and the output
    layer's gradient summed, once. A layer's last sum is not computed again."""
    found = _sent(RankLayout(tp=_DEVICES, recompute=recompute))["tensor"]  # type: ignore[arg-type]
    states = _PART * _TOKENS * _WIDTH
    again = 2 * _DENSE.layers * states if recompute != "none" else 0
    assert found == pytest.approx(sums * _DENSE.layers * (4 + 2) * states - again + (2 * 4 + 2 * 4 + 2 * 2) * states)


def test_context_parallel_ranks_gather_keys_and_values() -> None:
    """Llama 3 (2024), section 3.3.2: keys and values of the whole sequence, and their gradients back."""
    found = _sent(RankLayout(cp=_DEVICES))["context"]
    assert found == pytest.approx(2 * _DENSE.layers * _PART * _TOKENS * 2 * _KEYS * 2)


def test_experts_are_sent_their_tokens_and_send_them_back() -> None:
    """Fedus et al. 2021, section 3.1; GShard (Lepikhin et al. 2020), section 3.2: two exchanges each way."""
    found = _sent(RankLayout(dp=_DEVICES, ep=_DEVICES), _MIXTURE)["experts"]
    assert found == pytest.approx(4 * _DENSE.layers * _PART * _TOKENS * 2 * _WIDTH * 2)


def test_a_pipeline_sends_states_and_their_gradients() -> None:
    """Narayanan et al. 2021, section 3.2: tokens times width, forward and backward, for each piece of a stage; here in
    fp32, and by each rank of those that share a layer."""
    for interleave, tp in ((1, 1), (2, 1), (1, 2)):
        found = _sent(RankLayout(pp=2, tp=tp, interleave=interleave))
        assert found["pipeline"] == pytest.approx(2 * interleave * _TOKENS * _WIDTH * 4)


def test_ddp_is_ranked_before_zero1_where_both_fit() -> None:
    at = RankLayout(dp=64, microbatch=4)
    job = Training(_DENSE, DEVICES["a100-80"], KERNELS["flash"], _BYTES, _LENGTH, 512)
    assert step_time(job, at).data < step_time(job, replace(at, sharding="zero1")).data
