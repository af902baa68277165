"""One file per format: its records or texts, as a stream within bounds."""
