"""Sections about what was trained: losses, alignment, episodes, notable events, plan and cost."""
