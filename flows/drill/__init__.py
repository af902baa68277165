"""Drills: a pipeline runs in a scratch store while faults hit it, and every promise about faults is checked.

Public: `drill.Drill` runs a campaign, `kinds.KINDS` lists the faults, `invariants` the promises; docs/reliability.md.
"""
