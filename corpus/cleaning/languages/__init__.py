"""Measures by language and script: characters, sentence marks, stop words, identification."""
