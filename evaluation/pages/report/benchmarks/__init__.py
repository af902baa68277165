"""Sections about scores, classes of failures, long contexts, and sample answers."""
