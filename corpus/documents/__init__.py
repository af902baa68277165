"""Documents on disk and what stages do to them: selections, cuts, sources, words to compare texts by.

Public: `parts` (Parquet parts and the split), `selection`, `sources`, `dropped`, `quarantine`, `words`.
"""
