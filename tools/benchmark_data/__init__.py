"""The sources of the project's own benchmark data; `generate` writes the files in `evaluation/data/` from them."""
