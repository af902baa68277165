"""Documents scored by a classifier from outside, and filtered by their scores: the stage classify."""
