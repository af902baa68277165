"""Tokenizers and models in the small that have the properties of well-known open ones: special tokens, what is put in
front of a text, and who ends what. Nothing is copied: vocabularies are trained on the sentences below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SENTENCES = [
    f"The {who} {did} the {what} in the {where}; why? It can't wait, they're late."
    for who in ("cat", "old man", "river", "child", "teacher")
    for did in ("saw", "took", "made", "lost")
    for what in ("house", "stone", "letter", "song")
    for where in ("city", "field", "night")
]

# Special tokens in the order of their ids, and the roles that tokenizer_config.json names.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama3": {
        "tokens": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "bos": "<|begin_of_text|>", "eos": "<|end_of_text|>", "in_front": True,
    },
    "llama3-instruct": {
        "tokens": ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "in_front": True,
    },
    "mistral": {"tokens": ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"], "bos": "<s>", "eos": "</s>", "in_front": True},
    "gemma": {
        "tokens": ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
        "bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "in_front": True, "settings": {"add_bos_token": True},
    },
    "qwen": {
        "tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "eos": "<|im_end|>", "pad": "<|endoftext|>", "settings": {"add_bos_token": False},
    },
    "quiet": {"tokens": ["<s>", "</s>"], "bos": "<s>", "eos": "</s>"},
}  # fmt: skip


# Chat template (tests.support.chat_templates), padding, model_type, and what config.json has besides sizes.
SHAPES: dict[str, tuple[str, str | None, str, dict[str, Any]]] = {
    "qwen3": ("qwen3", "<|endoftext|>", "qwen3", {"tie_word_embeddings": True, "head_dim": 16}),
    "llama3": (
        "llama3", None, "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma3": (
        "gemma", "<pad>", "gemma3_text",
        {
            "tie_word_embeddings": True, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mistral": ("mistral", None, "mistral", {"sliding_window": None}),
    "smollm3": ("smollm3", "<|im_end|>", "smollm3", {"tie_word_embeddings": True, "no_rope_layers": [1, 0]}),
    "olmo2": ("olmo", "<|endoftext|>", "olmo2", {}),
    "olmo3": (
        "olmo", "<|endoftext|>", "olmo3",
        {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt-oss": (
        "harmony", "<|endoftext|>", "gpt_oss",
        {
            "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip


def tokenizer_of(family: str, *, tokens: list[str] | None = None) -> Any:
    """A fast tokenizer of a family. tokens: special ones in place of the family's."""
    about = FAMILIES[family]
    roles = {role: about.get(role) for role in ("bos", "eos", "pad")}
    in_front = bool(about.get("in_front"))
    return tokenizer_with(tokens or about["tokens"], **roles, in_front=in_front, **about.get("settings", {}))


def tokenizer_with(
    special: list[str], *, bos: str | None = None, eos: str | None = None, pad: str | None = None,
    in_front: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """A fast tokenizer of transformers. in_front: whether its post-processor puts `bos` in front of every text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if in_front and bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    roles = {f"{role}_token": token for role, token in (("bos", bos), ("eos", eos), ("pad", pad)) if token}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **roles, **settings)


def save_model(folder: Path, tokenizer: Any, *, tied: bool = True, positions: int = 256) -> Path:
    """A Llama of two layers with random weights beside its tokenizer, as such a folder is downloaded."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=positions, tie_word_embeddings=tied, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
