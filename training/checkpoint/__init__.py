"""Checkpoints: their schedule, contents and storage, and resuming a training from one.

Public: `checkpointer.Checkpointer` and `Resumption`, `upload.Uploader`, `states` (kept states of another training).
"""
