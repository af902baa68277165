"""Stages by the kind of what they make, in the order in which the text flows, for readers of finished artifacts.

`tasks.stages` declares the stages and cannot be imported here; tests/tasks/test_stage_order.py compares the two.
"""

DOCUMENTS = ("ingest", "clean", "dedupe", "semantic_dedupe", "classify", "generate", "decontaminate", "mix")
"""Stages that make documents."""

PAIRS = ("instructions", "generate_instructions", "preferences")
"""Stages that make prompts with responses."""

MODELS = ("pretrain", "base_model", "average", "sft", "preference_tuning", "distill", "rlhf")
"""Stages that make models that write text."""

WEIGHTS = (*MODELS, "reward_model")
"""Stages that make models of any kind."""

FAMILY_ORDER = (
    "ingest", "validate", "clean", "dedupe", "semantic_dedupe", "classify", "generate", "benchmark_text",
    "decontaminate", "mix", "validate_clean", "tokenizer", "shard",
    "validate_shards", "corpus_report", "pretrain",
    "base_model", "average", "instructions",
    "generate_instructions", "validate_instructions", "sft",
    "preferences", "validate_preferences", "reward_model", "preference_tuning", "distill", "rlhf",
)  # fmt: skip
"""Order of steps where the graph leaves a choice."""
