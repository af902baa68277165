"""First weights of a model: published schemes, counts of bigrams, and attention that copies what followed before.

Public: `schemes.initialise`, `bigrams` and `induction`, each on a model that `models.build` has made.
"""
