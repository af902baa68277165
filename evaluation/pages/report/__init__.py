"""Sections of a pipeline's report, one file per subject."""
