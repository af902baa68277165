"""The one decoder: continuations and scores of any causal language model of transformers.

Public: `language_model.LanguageModel`, `continuations.generate`, `decoding` (many sequences in one batch),
`choice_scoring`.
"""
