"""Kubernetes: manifests, pods and Jobs of trainings and of Prefect's runs."""
