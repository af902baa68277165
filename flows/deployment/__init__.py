"""Deployments on a Prefect server, and the start of a run there or in this process.

Public: `deploy.deploy_pipeline` and `deploy_stages`, `start.start`, `pools`.
"""
