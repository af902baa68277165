"""Models spread over ranks: ZeRO, FSDP2, tensor, context, pipeline and expert parallelism. None changes the losses.

Public: `parallel` (applies each way in order), `gradients` (sums and norms over parts).
"""
