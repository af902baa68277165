"""Model sizes by name, as they were published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["gpt2", "llama", "qwen3", "bert", "t5"]


@dataclass(frozen=True)
class Preset:
    """The shape of a model.

    parameters: the published count, with `vocabulary` ids and input and output embedding `tied` or not.
    """

    family: Family
    layers: int
    width: int
    heads: int
    positions: int
    parameters: int
    mlp_width: int | None = None
    kv_heads: int | None = None
    vocabulary: int = 50_257
    tied: bool = True


# GPT-3 (Brown et al. 2020), table 2.1, in the GPT-2 architecture with 2,048 positions as in MosaicML's "Mosaic LLMs
# (Part 1)". The paper's 24 heads of 128 do not fit the 1.3B model's width of 2,048: like MosaicML we take 16.
PRESETS: dict[str, Preset] = {
    "gpt-125m": Preset("gpt2", 12, 768, 12, 2048, 125_000_000),
    "gpt-350m": Preset("gpt2", 24, 1024, 16, 2048, 350_000_000),
    "gpt-760m": Preset("gpt2", 24, 1536, 16, 2048, 760_000_000),
    "gpt-1.3b": Preset("gpt2", 24, 2048, 16, 2048, 1_300_000_000),
    # Table 2.1 has a width of 5,140 for 13B, which its 40 heads of 128 do not make.
    "gpt-2.7b": Preset("gpt2", 32, 2560, 32, 2048, 2_700_000_000),
    "gpt-6.7b": Preset("gpt2", 32, 4096, 32, 2048, 6_700_000_000),
    "gpt-13b": Preset("gpt2", 40, 5120, 40, 2048, 13_000_000_000),
    "gpt-175b": Preset("gpt2", 96, 12288, 96, 2048, 175_000_000_000),
    # GPT-2 (Radford et al. 2019), table 2; counts of the released weights.
    "gpt2": Preset("gpt2", 12, 768, 12, 1024, 124_439_808),
    "gpt2-medium": Preset("gpt2", 24, 1024, 16, 1024, 354_823_168),
    "gpt2-large": Preset("gpt2", 36, 1280, 20, 1024, 774_030_080),
    "gpt2-xl": Preset("gpt2", 48, 1600, 25, 1024, 1_557_611_200),
    # Llama-style: SmolLM (Allal et al. 2024), TinyLlama (Zhang et al. 2024, table 2), Llama 2 (Touvron et al. 2023),
    # Llama 3.2 (Meta 2024, at Llama 3's 8,192 positions of pretraining); counts of the released weights.
    "smollm-135m": Preset("llama", 30, 576, 9, 2048, 134_515_008, mlp_width=1536, kv_heads=3, vocabulary=49_152),
    "smollm-360m": Preset("llama", 32, 960, 15, 2048, 361_821_120, mlp_width=2560, kv_heads=5, vocabulary=49_152),
    "tinyllama-1.1b": Preset(
        "llama", 22, 2048, 32, 2048, 1_100_048_384, mlp_width=5632, kv_heads=4, vocabulary=32_000, tied=False
    ),
    "llama-3.2-1b": Preset("llama", 16, 2048, 32, 8192, 1_235_814_400, mlp_width=8192, kv_heads=8, vocabulary=128_256),
    "llama-2-7b": Preset("llama", 32, 4096, 32, 4096, 6_738_415_616, mlp_width=11_008, vocabulary=32_000, tied=False),
    # Encoders for the objective masked: BERT (Devlin et al. 2018, section 3); counts of the released weights without
    # the pooler, which masked language modelling leaves out.
    "bert-base": Preset("bert", 12, 768, 12, 512, 109_514_298, vocabulary=30_522),
    "bert-large": Preset("bert", 24, 1024, 16, 512, 335_174_458, vocabulary=30_522),
    # Encoder-decoders for span_corruption: T5 (Raffel et al. 2020, section 3.7), `layers` on each side.
    "t5-small": Preset("t5", 6, 512, 8, 512, 60_506_624, vocabulary=32_128),
    "t5-base": Preset("t5", 12, 768, 12, 512, 222_903_552, vocabulary=32_128),
    # Ours, for a laptop and for tests.
    "bert-nano": Preset("bert", 2, 64, 2, 512, 400_000, vocabulary=4096),
    "t5-nano": Preset("t5", 2, 64, 2, 512, 500_000, vocabulary=4096),
    "llama-4m": Preset("llama", 4, 256, 4, 512, 4_200_000, mlp_width=688, vocabulary=4096),
    "qwen3-4m": Preset("qwen3", 4, 256, 4, 512, 4_200_000, mlp_width=688, vocabulary=4096),
    "llama-nano": Preset("llama", 2, 64, 2, 512, 370_000, mlp_width=176, vocabulary=4096),
}


@dataclass(frozen=True)
class ReleasedExperts:
    """A mixture of experts as it was released.

    config: keys of its transformers config. parameters: of the released weights; active: what its report counts of them
    for each token, in billions.
    """

    config: Mapping[str, Any]
    vocabulary: int
    parameters: int
    active: float


# Mixtral (Jiang et al. 2024, table 1), OLMoE (Muennighoff et al. 2024, table 1), Qwen3 (Yang et al. 2025, table 2), and
# the config.json of each.
MIXTURES: dict[str, ReleasedExperts] = {
    "mixtral-8x7b": ReleasedExperts(
        {
            "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
            "max_position_embeddings": 32768, "rope_theta": 1e6, "router_aux_loss_coef": 0.02,
            "tie_word_embeddings": False,
        },
        32_000, 46_702_792_704, 12.9,
    ),
    "olmoe-1b-7b": ReleasedExperts(
        {
            "model_type": "olmoe", "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16,
            "num_key_value_heads": 16, "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "max_position_embeddings": 4096, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
        },
        50_304, 6_919_161_856, 1.3,
    ),
    "qwen3-30b-a3b": ReleasedExperts(
        {
            "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 32768,
            "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
        },
        151_936, 30_532_122_624, 3.3,
    ),
}  # fmt: skip


def known_presets() -> list[str]:
    return [*PRESETS, *MIXTURES]
