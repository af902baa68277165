"""What commands share: options, completion, and one JSON document or lines for a person."""
