"""Additions of training and serving to the decoder of `evaluation.generation`: precision and ranks, text, vLLM.

Public: `sampling.sample`, `completions.generate` (answers to learn from), `answer_text` (text of answers in progress),
`session` (models of chat and serving), `candidates` (pairs to judge), `vllm_sampler`.
"""
