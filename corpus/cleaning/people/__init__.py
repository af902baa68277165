"""What concerns people in a text: personal data, toxicity, words of gender and their counterparts."""
