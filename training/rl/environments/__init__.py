"""Environments: tasks that a policy works on in several turns, with tools, for a reward.

Public: `protocol` (the interface that an environment implements), `episodes.Episodes` (plays them with a policy),
`heldout` (measures a policy before and after). Shipped: `calculator`, `code`, `search`, `maze`; `adapters` for
environments of the packages verifiers and OpenEnv. `pool` runs each in processes with limits, `inside` is what runs
there: neither `protocol` nor the shipped environments import more than the standard library.
"""
