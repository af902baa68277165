"""Leases: one of several builders builds an artifact, and the lease of a dead one is taken over.

Public: `lease`. The table is in SQLite or PostgreSQL (`place` decides which).
"""
