"""Batches: packed shards and their mixtures for pretraining, conversations, preference pairs and rankings for tuning.

Public: `packed_text` (pretraining data), `conversations`, `preference_pairs`, `rankings`, `loaders`.
"""
