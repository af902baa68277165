"""Processes: started, forked with their imports done, watched, interrupted; work spread over workers, in partitions.

Public: `lifetime`, `fork_server` and `forked`, `workers`, `partitions.map_partitions`, `interrupts`, `pace`.
"""
