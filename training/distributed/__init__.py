"""Models distributed over ranks: ZeRO, FSDP2, tensor, context, pipeline and expert parallelism. Losses stay the same.

Public: `parallel.parallelize` (applies every kind in one function, in order), `gradients` (sums and norms over parts).
"""
