"""Rounds of feedback: answers are drawn, people judge them, and the pipeline learns from what they chose.

`feedback_round` is named here since deployments on a server have kept this path.
"""

from flows.feedback.round import feedback_round

__all__ = ["feedback_round"]
