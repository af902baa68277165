"""Self-contained HTML pages. `report` and `corpus` hold the sections; this folder holds what the sections share.

Public: `parts` (sentences, tables, drawings), `verdicts` (claims of the report), `planning_page`, `sweep_page`.
"""
