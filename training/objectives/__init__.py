"""What a model learns from packed text: one file an objective."""
