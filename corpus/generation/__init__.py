"""Documents and instructions written by a language model behind an endpoint of OpenAI's protocol.

`corpus.generation.stage` rewrites documents or makes further ones, `corpus.generation.instructions` makes prompts with
their responses; `corpus.generation.endpoint` asks, and keeps every answer (`corpus.generation.answers`).
"""
