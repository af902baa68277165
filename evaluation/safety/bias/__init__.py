"""Bias: stereotype scores over sentence pairs, published sets (BBQ, WinoBias, BEC-Pro, HONEST) and their metrics."""
