"""Recipes as they were published: sizes, batch, rates and schedule of a pretraining together, by name.

`pretrain: {recipe: gpt3-350m}` has them as if they were written out; each key that is written replaces the recipe's. A
recipe holds keys of `pretrain` alone: sequence length (2,048 tokens in all of these) and tokenizer belong to other
stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CHOICES_OF_A_MODEL = ("preset", "family", "transformers")

# Brown et al. 2020, table 2.1: preset, tokens per batch (0.5M, 1M, 2M and 3.2M in the table), peak learning rate.
_GPT3 = {
    "gpt3-125m": ("gpt-125m", 524_288, 6.0e-4),
    "gpt3-350m": ("gpt-350m", 524_288, 3.0e-4),
    "gpt3-760m": ("gpt-760m", 524_288, 2.5e-4),
    "gpt3-1.3b": ("gpt-1.3b", 1_048_576, 2.0e-4),
    "gpt3-2.7b": ("gpt-2.7b", 1_048_576, 1.6e-4),
    "gpt3-6.7b": ("gpt-6.7b", 2_097_152, 1.2e-4),
    "gpt3-13b": ("gpt-13b", 2_097_152, 1.0e-4),
    "gpt3-175b": ("gpt-175b", 3_145_728, 0.6e-4),
}


def _gpt3(preset: str, batch_tokens: int, learning_rate: float) -> dict[str, Any]:
    """Section 2.3 and appendix B. The paper's cosine ends at 260B of 300B tokens and stays; ours ends with the
    training."""
    return {
        "model": {"preset": preset},
        "duration": "300_000_000_000 tokens",
        "global_batch_tokens": batch_tokens,
        "batch_warmup": {"first_tokens": 32_768, "over_tokens": 4_000_000_000},
        "optimizer": {
            "learning_rate": learning_rate,
            "betas": [0.9, 0.95],
            "eps": 1.0e-8,
            "weight_decay": 0.1,
            "gradient_clip": 1.0,
        },
        "schedule": {"decay": "cosine", "warmup": "375_000_000 tokens", "final_share": 0.1},
    }


RECIPES: dict[str, dict[str, Any]] = {
    **{name: _gpt3(*row) for name, row in _GPT3.items()},
    # MosaicML, "Mosaic LLMs (Part 1)" 2022, figure 2, with the defaults of Composer's DecoupledAdamW. That one takes
    # 1e-5 of every weight at the peak rate; torch's AdamW multiplies its decay by the rate, hence 1e-5 / 3e-4. Nothing
    # is clipped.
    "mosaic-350m": {
        "model": {"preset": "gpt-350m"},
        "duration": "20_000 batches",
        "global_batch_tokens": 524_288,
        "optimizer": {
            "learning_rate": 3.0e-4,
            "betas": [0.9, 0.95],
            "eps": 1.0e-8,
            "weight_decay": 1.0e-5 / 3.0e-4,
            "decayed": ["matrices", "embeddings", "norms", "biases"],
            "gradient_clip": 1.0e9,
        },
        "schedule": {"decay": "cosine", "warmup": "1 %", "final_share": 0.0},
    },
    # Black et al. 2022, "GPT-NeoX-20B", sections 2 and 3. What differs from GPT-3: rotary positions on a quarter of
    # each head, attention and MLP side by side, no sparse layers, initial weights by depth and width, little weight
    # decay. The paper states 1,538 sequences per batch; the settings that it was trained with make 1,536 (4 at once, 32
    # times, on 12 copies of the model), and 1,538 go on no such machines.
    "gpt-neox-20b": {
        "model": {
            "transformers": {
                "model_type": "gpt_neox",
                "hidden_size": 6144,
                "num_hidden_layers": 44,
                "num_attention_heads": 64,
                "intermediate_size": 24_576,
                "max_position_embeddings": 2048,
                "rotary_pct": 0.25,
                "use_parallel_residual": True,
                "tie_word_embeddings": False,
            },
            "init": "small",
            "vocab_multiple": 128,
        },
        "duration": "150_000 batches",
        "global_batch_tokens": 3_145_728,
        "optimizer": {
            "learning_rate": 0.97e-4,
            "betas": [0.9, 0.95],
            "eps": 1.0e-8,
            "weight_decay": 0.01,
            "gradient_clip": 1.0,
        },
        "schedule": {"decay": "cosine", "warmup": "1 %", "final_share": 0.1},
    },
    # Zhang et al. 2022, "OPT", section 2. What differs from GPT-3: ReLU, dropout, initial weights of N(0, 0.006),
    # batches of one size, twice the learning rate and its linear decay. By hand it was lowered again and again, and
    # the clipping to 0.3 (section 2.5): `continues` makes such changes, the guard many of them by itself.
    "opt-175b": {
        "model": {
            "transformers": {
                "model_type": "opt",
                "hidden_size": 12_288,
                "word_embed_proj_dim": 12_288,
                "num_hidden_layers": 96,
                "num_attention_heads": 96,
                "ffn_dim": 49_152,
                "max_position_embeddings": 2048,
                "activation_function": "relu",
                "dropout": 0.1,
            },
            "init_std": 0.006,
        },
        "duration": "300_000_000_000 tokens",
        "global_batch_tokens": 2_097_152,
        "optimizer": {
            "learning_rate": 1.2e-4,
            "betas": [0.9, 0.95],
            "weight_decay": 0.1,
            "gradient_clip": 1.0,
        },
        "schedule": {"decay": "linear", "warmup": "2_000 batches", "final_share": 0.1},
    },
}  # fmt: skip


def with_recipe(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `given`, the keys of `pretrain` in a config, with those of its `recipe` that it does not set.

    Sections are joined key by key; who names another model has none of the recipe's.
    """
    recipe = RECIPES.get(given.get("recipe") or "", {})
    filled = {**recipe, **given}
    for key in recipe.keys() & given.keys():
        before, after = recipe[key], given[key]
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            other_model = key == "model" and any(after.get(choice) for choice in _CHOICES_OF_A_MODEL)
            filled[key] = dict(after) if other_model else {**before, **after}
    return filled
