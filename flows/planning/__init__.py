"""Plans: which stages would be reused or built and why, what trainings need, first configs for files at hand.

Public: `plan.plan`, `needs`, `first_config`, `planned_config`.
"""
