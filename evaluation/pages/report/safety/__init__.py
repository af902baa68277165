"""Sections about toxicity, bias, memorisation, and what mitigations change."""
