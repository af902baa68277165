"""Scores of texts by a Hugging Face sequence classifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.classification.config import ClassifyConfig
from corpus.model_folders.inputs import CHARACTERS_PER_TOKEN, prepare_batches
from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer
from infra.errors import StageError, shortened, stage_error

WHERE = "classify.model"


class SequenceScorer:
    """A classifier in memory, on a GPU where there is one that may be used.

    Raises StageError: `unknown_label`; `no_classifier` for a folder that transformers cannot read; what
    `corpus.model_folders.pretrained.load_pretrained_model` raises.
    """

    def __init__(self, config: ClassifyConfig, device: str = "auto") -> None:
        folder = Path(config.model)
        import torch
        from transformers import AutoModelForSequenceClassification

        try:
            self._tokenizer: Any = load_pretrained_tokenizer(folder, WHERE)
            model: Any = load_pretrained_model(AutoModelForSequenceClassification, folder, WHERE)
        except StageError:
            raise
        except (OSError, ValueError, KeyError, ImportError) as error:
            message = f"{folder} cannot be read as a sequence classifier: {shortened(str(error))}"
            raise stage_error("no_classifier", WHERE, message, "name the folder of a sequence classifier") from error
        self.device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        self._model = model.eval().to(self.device)
        self._label = _label_of(config, model.config)
        is_single = model.config.num_labels == 1
        self.is_raw = config.output == "raw" or (config.output == "auto" and is_single)
        self._sigmoid = is_single or model.config.problem_type == "multi_label_classification"
        self.max_tokens, self._batch = prepare_batches(
            self._tokenizer, model, config.max_tokens, config.batch_documents
        )

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float64]:
        """texts: N strings. Returns scores (N,), NaN for a text without a token.

        Raises StageError `bad_scores` where the model gives no finite number.
        """
        import torch

        scores = np.full(len(texts), np.nan)
        # Texts of like length together, for the least padding; the order among equals is that of the documents.
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        with torch.inference_mode():
            for start in range(0, len(order), self._batch):
                places = order[start : start + self._batch]
                batch = [texts[place][: CHARACTERS_PER_TOKEN * self.max_tokens] for place in places]
                ids = self._tokenizer(batch, truncation=True, max_length=self.max_tokens)["input_ids"]
                filled = [number for number, some in enumerate(ids) if some]
                if not filled:
                    continue
                padded = self._tokenizer.pad(
                    {"input_ids": [ids[number] for number in filled]},
                    padding=self._batch > 1,
                    return_tensors="pt",
                )
                logits = self._model(**padded.to(self.device)).logits.double()  # (B, labels)
                if not self.is_raw:
                    logits = torch.sigmoid(logits) if self._sigmoid else torch.softmax(logits, dim=-1)
                if not bool(logits.isfinite().all()):
                    message = "expected finite scores, found NaN or infinity"
                    raise stage_error(
                        "bad_scores", WHERE, message, "check the model's weights; some models need float32"
                    )
                scores[[places[number] for number in filled]] = logits[:, self._label].cpu().numpy()
        return scores


def _label_of(config: ClassifyConfig, model: Any) -> int:
    labels = {str(name): int(number) for number, name in model.id2label.items()}
    if config.label is None and model.num_labels == 1:
        return 0
    if config.label in labels:
        return labels[config.label]
    listed = ", ".join(labels)
    message = f"expected one of the labels {listed}" + (f", not {config.label}" if config.label else "")
    raise stage_error("unknown_label", "classify.label", message, "set label to the one whose score counts")
