"""Sandboxes for Python code that models write, and unit tests that run in them.

Public: `runner.find` and `runner.run`, `unit_tests`.
"""
