"""Self-contained HTML pages. `report` and `corpus` hold the sections; this folder holds their common parts.

Public: `parts` (sentences, tables, drawings), `verdicts` (claims of the report), `planning_page`, `sweep_page`.
"""
