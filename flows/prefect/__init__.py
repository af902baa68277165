"""Execution of a pipeline inside a Prefect flow: admission, stages side by side, the page, notices, schedules.

Public: `execution`, `schedules`, `automations`, `promotion`.
"""
