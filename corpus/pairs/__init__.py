"""Prompts with answers: conversations, pairs, rankings, templates, and the split of both into train and held out.

Public: `files` (lines that pairs are written as), `dialogues`, `rankings`, `split`.
"""
