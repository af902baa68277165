"""Prefect's server and worker as this project runs them: bounds, lost runs, ends of runs, dates of schedules."""
