"""Input and output: JSON and YAML within bounds, files whole or absent, hashes, S3, foreign folders, templates.

Public: `json`, `yaml`, `files`, `hashing`, `sources`, `s3`, `templates`.
"""
