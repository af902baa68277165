"""The store: finished artifacts by address, manifests, lineage, measurements, promotions, kept states.

Public: `store.Store`, `manifest`, `reference.resolve` (what a person types), `layout` (where files are).
"""
