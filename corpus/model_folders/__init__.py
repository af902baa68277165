"""Model folders from outside, judged and loaded: no code is run, and every tensor is accounted for.

Public: `pretrained` (the one way to transformers), `folder`, `float8`, `inputs`.
"""
