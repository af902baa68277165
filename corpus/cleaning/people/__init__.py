"""Processing of text about people: personal data, toxicity, words of gender and their counterparts."""
