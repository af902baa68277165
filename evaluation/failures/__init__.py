"""Failure rates by class, asked through templated tests (CheckList, Ribeiro et al. 2020)."""
