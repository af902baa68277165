"""Checkpoints: their schedule, contents and storage, and resuming a training from one.

Public: `manager.CheckpointManager`, which a training holds; `states` (kept states of another training, as a beginning);
`export` (the finished model). Behind the manager: `snapshot` (the files of a checkpoint), `folder` (whole or absent),
`upload` and `remote` (the same on S3).
"""
