"""Evaluation: a model's abilities, its failures, and the decision on its release.

Stages are in this folder: `benchmark_text`, `benchmarks`, `mitigations`, `register`, `report`, `corpus_report`, and
`safety`, which is a package. They are built on: `config`, `generation`, `harness`, `mirror`, `failures`, `statistics`,
`results`, `release`, `people` and `pages`. `evaluate` is the work behind `stemma eval`.
"""
