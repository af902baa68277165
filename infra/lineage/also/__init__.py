"""Copies of metrics, settings and links to artifacts in other trackers, besides MLflow: W&B, Trackio, TensorBoard.

MLflow remains the record. Public: `config.LineageConfig`, `copies.Copies`, `copies.copy_problems`.
"""
