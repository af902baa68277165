"""Commands about models: talk, serve, score, export, judge."""
