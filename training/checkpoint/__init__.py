"""Checkpoints: when they are written, what is in them, where they go, and how a training continues from one.

Public: `checkpointer.Checkpointer` and `Resumption`, `upload.Uploader`, `states` (kept states of another training).
"""
