"""Estimate the needs and costs of a training before it runs. This package imports nothing heavy: no torch."""
