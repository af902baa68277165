"""Conversations as token ids, by the model's own chat template or by ours.

Public: `base.Chat` and `base.chat_of`, `template.TemplateChat`, `shown` (tokens with what tuning learns).
"""
