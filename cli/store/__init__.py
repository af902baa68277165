"""Commands for artifacts: list, verify, trace, import, collect garbage."""
