"""Configs: one YAML file, read with all of its errors at once, as a graph of stages.

Public: `read.load` and `read.parse`, `graph.graph`, `schema` (JSON schema of config files), `forms`.
"""
