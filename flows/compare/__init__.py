"""Comparison of runs, configs and models: settings, data, code, versions, and paired figures."""
