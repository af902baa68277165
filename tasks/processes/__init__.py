"""The process of a stage: started warm or cold, supervised, and its failures in words.

Public: `supervisor`, `child` (the program), `warm_start`, `ray_mapper` (partitions on a Ray cluster).
"""
