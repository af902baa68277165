"""Answers of a model: sampling in batches, continuous batching for serving, vLLM.

Public: `sampling`, `completions.generate`, `batched_answers` (continuous batching), `session.answer` (one
conversation).
"""
