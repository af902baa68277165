"""Runs and sweeps as they are kept on disk: journals, verdicts, lists, lineage, garbage collection.

Public: `journal.RunJournal`, `listing`, `lineage`, `garbage`.
"""
