"""The one decoder: answers and scores of any causal language model of transformers.

Public: `language_model.LoadedModel` (a model folder that scores and generates), `decoding` (`Decoder`, `generate`: many
answers in one batch), `token_choice` (options, draws), `choice_scoring`. Training, chat, serving, safety and benchmarks
all generate with it.
"""
