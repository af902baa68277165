"""Commands about pipelines and their runs."""
