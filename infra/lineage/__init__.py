"""Lineage in MLflow: what builds did is written to an outbox, and a relay delivers it, once and in order.

Public: `ledger`, `outbox`, `relay`, `registry`, `rebuild`.
"""
