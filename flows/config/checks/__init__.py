"""Checks of a whole config: contradictions between its sections, and what ranks support."""
