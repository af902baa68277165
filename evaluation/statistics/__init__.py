"""Intervals, tests and calibration for figures that are read off samples.

Public: `intervals.Interval`, `paired` (two models on the same items), `clustered` (items that come in groups).
"""
