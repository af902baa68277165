"""Judgements by people: pages that ask for them, their import, agreement, win rates, review of documents."""
