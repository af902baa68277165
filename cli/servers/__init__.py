"""Commands about what stays up: the servers and the worker, deployments, and the pages."""
