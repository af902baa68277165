"""Runs and sweeps on disk: journals, verdicts, lists, lineage, garbage collection.

Public: `journal.RunJournal`, `listing`, `lineage`, `garbage`.
"""
