"""Commands for long-running services: servers and worker, deployments, and pages."""
