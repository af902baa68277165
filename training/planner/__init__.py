"""What a training needs and costs, worked out before it is paid for. Nothing heavy is imported: no torch."""
