"""Evaluation: what a model can do, what it does wrong, and whether it may be released.

Stages are in this folder: `benchmark_text`, `benchmarks`, `mitigations`, `register`, `report`, `corpus_report`, and
`safety`, which is a package. What they stand on: `config`, `generation`, `harness`, `mirror`, `failures`, `statistics`,
`results`, `release`, `people` and `pages`. `evaluate` is the work behind `stemma eval`.
"""
