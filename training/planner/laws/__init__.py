"""Scaling laws: loss as a function of parameters and tokens, fitted to a sweep or read from learning curves."""
