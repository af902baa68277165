"""Documents that say the same in other words, found by their embeddings: the stage semantic_dedupe."""
