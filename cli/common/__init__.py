"""Code shared by commands: options, completion, and one JSON document or lines for a person."""
