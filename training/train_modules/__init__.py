"""Models with their losses behind one interface: language model, preference model, scorer.

Public: `language_model.LanguageModel`, `preference_model`, `scorer.Scorer`.
"""
