"""Embeddings of texts by a Hugging Face encoder: the normalised mean of its last hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from corpus.model_folders.inputs import CHARACTERS_PER_TOKEN, prepare_batches
from corpus.model_folders.pretrained import load_pretrained_model, load_pretrained_tokenizer
from corpus.semantic.config import SemanticDedupeConfig
from infra.errors import StageError, shortened, stage_error
from infra.io.json import read_json

WHERE = "semantic_dedupe.model"
Embeddings = NDArray[np.float32]
_HEADS = ("MaskedLM", "CausalLM", "SequenceClassification", "TokenClassification")
"""Models with an output layer whose encoder is used, by the end of the name of their class."""


class TextEncoder:
    """An encoder in memory, on a GPU where there is one that may be used.

    Raises StageError: `no_encoder` for a folder that transformers cannot read as one; what
    `corpus.model_folders.pretrained.load_pretrained_model` raises.
    """

    def __init__(self, config: SemanticDedupeConfig, device: str = "auto") -> None:
        import torch

        folder = Path(config.model)
        try:
            self._tokenizer: Any = load_pretrained_tokenizer(folder, WHERE)
            model: Any = load_pretrained_model(_auto_class(folder), folder, WHERE).base_model
        except StageError:
            raise
        except (OSError, ValueError, KeyError, ImportError) as error:
            message = f"{folder} cannot be read as an encoder: {shortened(str(error))}"
            raise stage_error("no_encoder", WHERE, message, "name the folder of an encoder") from error
        if model.config.is_encoder_decoder:
            message = f"expected an encoder, {folder} has an encoder and a decoder"
            raise stage_error("no_encoder", WHERE, message, "use an encoder such as all-MiniLM-L6-v2")
        self.device = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        self._model = model.eval().to(self.device)
        self.width: int = model.config.hidden_size
        self.window, self._batch = prepare_batches(self._tokenizer, model, config.max_tokens, config.batch_windows)
        self._windows = -(-config.max_tokens // self.window)

    def __call__(self, texts: Sequence[str]) -> tuple[Embeddings, NDArray[np.bool_]]:
        """Return embeddings (N, width) of length 1, zeros for a text without tokens; and a mask (N,) of the texts that
        are longer than what is read of them.

        Raises StageError `bad_embeddings` where the model gives no finite number.
        """
        import torch

        windows, texts_of, is_cut = self._cut(texts)
        sums, counts = np.zeros((len(texts), self.width)), np.zeros(len(texts))
        # Windows of like length together, for the least padding; the order among equals is that of the texts.
        order = sorted(range(len(windows)), key=lambda window: len(windows[window]))
        with torch.inference_mode():
            for start in range(0, len(order), self._batch):
                chosen = order[start : start + self._batch]
                padded = self._tokenizer.pad(
                    {"input_ids": [windows[number] for number in chosen]},
                    padding=self._batch > 1,
                    return_tensors="pt",
                ).to(self.device)
                hidden = self._model(**padded).last_hidden_state.double()  # (B, T, width)
                mask = padded["attention_mask"].unsqueeze(-1)  # (B, T, 1)
                summed = (hidden * mask).sum(1).cpu().numpy()
                rows = [texts_of[number] for number in chosen]
                np.add.at(sums, rows, summed)
                np.add.at(counts, rows, mask.sum((1, 2)).cpu().numpy())
        if not np.isfinite(sums).all():
            message = "expected finite embeddings, found NaN or infinity"
            raise stage_error("bad_embeddings", WHERE, message, "check the model's weights; some models need float32")
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        return (sums / np.where(lengths > 0, lengths, 1)).astype(np.float32), is_cut

    def _cut(self, texts: Sequence[str]) -> tuple[list[list[int]], list[int], NDArray[np.bool_]]:
        """Windows of token ids, the number of the text of each, and the texts of which not all is read."""
        most = CHARACTERS_PER_TOKEN * self.window * self._windows
        is_cut = np.array([len(text) > most for text in texts], np.bool_)
        windows: list[list[int]] = []
        texts_of: list[int] = []
        for number, text in enumerate(texts):
            options = {"return_overflowing_tokens": True} if self._tokenizer.is_fast else {}
            encoded = self._tokenizer(text[:most], truncation=True, max_length=self.window, **options)["input_ids"]
            every = encoded if self._tokenizer.is_fast else [encoded]
            is_cut[number] |= len(every) > self._windows
            read = [ids for ids in every[: self._windows] if ids]
            windows += read
            texts_of += [number] * len(read)
        return windows, texts_of, is_cut


def _auto_class(folder: Path) -> Any:
    """The class of transformers that reads exactly the weights of a folder."""
    import transformers

    config = read_json(folder / "config.json", nan=True) if (folder / "config.json").is_file() else {}
    [name, *_] = [*(config.get("architectures") or []), ""] if isinstance(config, dict) else [""]
    head = next((head for head in _HEADS if str(name).endswith(head)), "")
    return getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
