"""Data for the demo and for tests, on every machine that has the environment: docstrings of installed packages."""
