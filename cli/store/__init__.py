"""Commands about artifacts: list, verify, trace, adopt, collect."""
