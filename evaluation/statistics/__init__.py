"""Intervals, tests and calibration for figures computed from samples.

Public: `intervals.Interval`, `paired` (two models on the same items), `clustered` (items that come in groups).
"""
