"""The project's own evaluation data, written for it, and the scripts that write the files."""
