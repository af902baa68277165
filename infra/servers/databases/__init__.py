"""The databases of Prefect and MLflow: SQLite in the store, or PostgreSQL."""
