"""Finished artifacts from the reader's side, and comparisons of models over the same items.

Public: `artifacts`, `pipeline` (all artifacts of a run by name), `comparison`, `against` (the promoted model).
"""
