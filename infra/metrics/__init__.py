"""Figures of a store and its queue for Prometheus, beside Prefect's and MLflow's own."""
