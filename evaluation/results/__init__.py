"""Finished artifacts as their readers see them, and comparisons of models over the same items.

Public: `artifacts`, `pipeline` (all artifacts of a run by name), `comparison`, `against` (the promoted model).
"""
