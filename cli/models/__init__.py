"""Commands for models: chat, serving, evaluation, export, human judgement."""
