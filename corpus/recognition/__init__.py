"""Recognition of the contents of files, from a sample of their records.

Public: `forms.groups_of`, `first_records` (a config's sources, tried before a run), `fitting_rules` (cleaning rules
that do not drop much of a sample).
"""
