"""Release of a model: gates, model card, registrations, export to a folder for the Hugging Face hub."""
