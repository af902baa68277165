"""lm-eval inside a pipeline: tasks from a user's files or by name, requests to a model, counts next to each score.

Public: `tasks.evaluate_model`, `named_tasks`, `model` (lm-eval's model class), `integrity`.
"""
