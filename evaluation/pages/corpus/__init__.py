"""Sections of the corpus report."""
