"""The network: architectures and families, attention within packed documents, loss, adapters, FP8, initial weights.

Public: `models.build` and `models.load`, `families.FAMILIES`, `loss`, `lora`, `export.export`.
"""
