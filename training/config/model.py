"""Config of a model's architecture; every default names its source."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from infra.config import Config, as_json
from infra.io.json import parse_json
from infra.io.sources import absolute
from infra.io.yaml import read_text
from training.config.presets import MIXTURES, PRESETS, Family, Preset, known_presets

_SIZES = ("layers", "width", "heads")
_ROTARY = ("llama", "qwen3")
# Keys of a config.json that describe its tokenizer, its weights and its writer, not the architecture.
_NOT_OF_THE_ARCHITECTURE = {
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "architectures", "torch_dtype", "dtype",
    "transformers_version", "_name_or_path", "auto_map",
}  # fmt: skip


def _read_config(value: Any, info: ValidationInfo) -> Any:
    """The mapping itself, or the content of the config.json at a path."""
    if not isinstance(value, str):
        return as_json(value)
    path = Path(absolute(value, info))
    path = path / "config.json" if path.is_dir() else path
    try:
        content = parse_json(read_text(path), nan=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a mapping, or a folder with config.json; {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected a mapping in {path}")
    return {key: item for key, item in content.items() if key not in _NOT_OF_THE_ARCHITECTURE}


TransformersConfig = Annotated[
    dict[str, Any] | None, BeforeValidator(_read_config, json_schema_input_type=dict[str, Any] | str | None)
]


class ModelConfig(Config):
    """A model: a preset by name, a family with sizes, or any transformers config.

    Sizes next to a preset replace the preset's.
    """

    preset: str | None = None
    """A size by name: gpt-125m, gpt-350m, gpt-760m, gpt-1.3b, gpt-2.7b, gpt-6.7b, gpt-13b, gpt-175b (GPT-3, table 2.1),
    gpt2, gpt2-medium, gpt2-large, gpt2-xl (GPT-2, table 2), smollm-135m, smollm-360m, tinyllama-1.1b, llama-3.2-1b,
    llama-2-7b (as released), or llama-4m, qwen3-4m, llama-nano (ours); for the objective masked bert-base,
    bert-large (BERT, section 3) or bert-nano, for span_corruption t5-small, t5-base (T5, section 3.7) or t5-nano.
    mixtral-8x7b, olmoe-1b-7b and qwen3-30b-a3b (mixtures of experts, as released) stand for their transformers config,
    whose keys `transformers` may replace."""
    family: Family | None = None
    """Architecture: gpt2 (learned positions, LayerNorm, GELU), llama (rotary positions, RMSNorm, SwiGLU), qwen3 (llama
    with an RMSNorm on each head's queries and keys; Henry et al. 2020, Qwen3's report, section 2), bert (an encoder,
    norms after the residuals) or t5 (encoder and decoder, relative positions)."""
    layers: int | None = Field(None, ge=1)
    """Number of transformer blocks; for t5, on each side."""
    width: int | None = Field(None, ge=1)
    """Width of the residual stream."""
    heads: int | None = Field(None, ge=1)
    """Attention heads; must divide the width."""
    kv_heads: int | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention, llama and qwen3); by default the preset's, or as many as heads."""
    mlp_width: int | None = Field(None, ge=1)
    """Inner width of the MLP; by default 4 times the width, for llama and qwen3 8/3 times (Shazeer 2020)."""
    positions: int | None = Field(None, ge=1)
    """Maximum sequence length of the model; 2,048 in GPT-3 (section 2.1)."""
    tie_embeddings: bool | None = None
    """Share the input embedding with the output layer (Press & Wolf 2017; GPT-2); by default as in the preset, and true
    without one."""
    activation: Literal["relu", "gelu", "gelu_new", "silu", "relu2"] | None = None
    """Activation of the MLP; in llama and qwen3 of one of two products, which gates the other (silu is SwiGLU, gelu_new
    GEGLU, relu ReGLU; Shazeer 2020). gelu_new is GPT-2's approximation, relu2 the square of relu (So et al. 2021). By
    default the family's: gelu_new for gpt2, gelu for bert, relu for t5, silu for llama and qwen3."""
    init: Literal["gpt2", "plain", "small", "fan_in"] = "gpt2"
    """Fresh weights. gpt2: N(0, init_std²), residual projections divided by sqrt(2 × layers) (GPT-2, section 2.3).
    plain: N(0, init_std²) throughout (BERT). small: N(0, 2/(5 × width)) (Nguyen & Salazar 2019, section 2.2), residual
    projections N(0, (2/(layers × sqrt(width)))²) (Wang & Komatsuzaki 2021), as in GPT-NeoX-20B. fan_in: N(0, 1/fan-in),
    residual projections divided by sqrt(2 × layers), an untied output layer zero (Yang et al. 2022, appendix D.2). A t5
    has T5's own and takes no other."""
    residual_init: Literal["scaled", "zero"] = "scaled"
    """Initial residual projections: according to `init`, or zero, so that every block begins as the identity (Goyal et
    al. 2017, section 5.1; Zhang et al. 2019, "Fixup")."""
    embedding_init: Literal["random", "bigram"] = "random"
    """Initial embedding and output layer: according to `init`, or fitted to the bigrams of the first 2^24 training
    tokens, so that before its first batch the model knows which token follows which
    (training/model/initial/bigrams.py). For llama and qwen3 with untied embeddings; best with `residual_init: zero` and
    learning rates of the embeddings near those of the rest."""
    attention_init: Literal["random", "induction"] = "random"
    """Initial attention: according to `init`, or with heads that attend to the preceding tokens, and one that attends
    to what followed the current token earlier (induction heads; Olsson et al. 2022), which a small model otherwise
    spends its first million tokens on learning (training/model/initial/induction.py). For qwen3 with embedding_init:
    bigram and two layers or more."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of gpt2 and plain; 0.02 in GPT-2 and BERT, 0.006 in OPT (section 2.1)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on attention, residuals and embeddings (gpt2, bert, t5), on attention (llama, qwen3); 0 for one pass over
    the data."""
    vocab_multiple: int = Field(1, ge=1)
    """Multiple to which the rows of embedding and output layer are rounded up from the tokenizer's number of ids, which
    makes a GPU's matrix products faster: 128 in Megatron-LM, 64 in nanoGPT (50,257 to 50,304 by both). The tokenizer is
    unchanged, and ids beyond it are never sampled. Not for a transformers config with a vocab_size."""
    transformers: TransformersConfig = None
    """Any transformers config: a mapping with `model_type`, e.g. {model_type: mistral, hidden_size: 512, …}, or a
    folder with config.json, whose content and not its path affects identity; token ids come from the tokenizer."""

    @model_validator(mode="before")
    @classmethod
    def _mixture_by_name(cls, given: Any) -> Any:
        """A mixture's name stands for its transformers config, some of whose keys `transformers` may replace."""
        mixture = MIXTURES.get(str(given.get("preset"))) if isinstance(given, Mapping) else None
        changed = (given.get("transformers") or {}) if mixture else None
        if mixture is None or not isinstance(changed, Mapping):
            return given
        others = {key: value for key, value in given.items() if key not in ("preset", "transformers")}
        return {**others, "transformers": {**mixture.config, **changed}}

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            near, known = get_close_matches(name, known_presets(), n=1), ", ".join(known_presets())
            raise ValueError(f"{f'did you mean {near[0]}? ' if near else ''}expected one of {known}")
        return name

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if self.transformers is not None:
            if (
                self.preset
                or self.family
                or any(getattr(self, size) for size in (*_SIZES, "kv_heads", "mlp_width", "positions"))
                or self.activation
                or self.embedding_init != "random"
                or self.attention_init != "random"
            ):
                raise ValueError(
                    "expected `transformers` alone, or a preset or family with sizes (and their activation and inits), "
                    "not both"
                )
            if not isinstance(self.transformers.get("model_type"), str):
                raise ValueError("expected `model_type` in `transformers`, such as llama or gpt2")
            return self
        if self.preset is None:
            missing = [name for name in ("family", *_SIZES) if getattr(self, name) is None]
            if missing:
                raise ValueError(
                    f"expected a preset, or family with layers, width and heads ({', '.join(missing)} missing)"
                )
        shape = self.shape()
        if shape.width % shape.heads:
            raise ValueError(f"expected heads to divide width: {shape.heads} heads do not divide {shape.width}")
        if self.kv_heads and shape.family not in _ROTARY:
            raise ValueError("expected kv_heads only with the families llama and qwen3")
        if self.kv_heads and shape.heads % self.kv_heads:
            raise ValueError(f"expected kv_heads to divide heads: {self.kv_heads} do not divide {shape.heads}")
        if shape.family == "t5" and (self.init != "gpt2" or self.residual_init != "scaled"):
            raise ValueError("expected init and residual_init left out: a t5 has its own")
        if self.embedding_init == "bigram" and (shape.family not in _ROTARY or shape.tied):
            raise ValueError("expected embedding_init: bigram only with llama or qwen3 and tie_embeddings: false")
        if self.attention_init == "induction" and (
            shape.family != "qwen3" or self.embedding_init != "bigram" or shape.layers < 2
        ):
            raise ValueError(
                "expected attention_init: induction only with qwen3, embedding_init: bigram and two layers or more"
            )
        if shape.family in _ROTARY and shape.width // shape.heads % 2:
            raise ValueError(f"expected an even width a head for rotary positions, not {shape.width // shape.heads}")
        return self

    def shape(self) -> Preset:
        """The sizes with the preset filled in; raises ValueError for a free transformers config."""
        if self.transformers is not None:
            raise ValueError("a free transformers config has no shape of ours")
        base = PRESETS.get(self.preset or "")
        # A preset's inner sizes belong to its own width and heads.
        same_width = base is not None and self.width in (None, base.width)
        same_heads = base is not None and self.heads in (None, base.heads)
        return Preset(
            family=self.family or (base.family if base else "llama"),
            layers=self.layers or (base.layers if base else 0),
            width=self.width or (base.width if base else 0),
            heads=self.heads or (base.heads if base else 0),
            positions=self.positions or (base.positions if base else 2048),
            parameters=base.parameters if base else 0,
            mlp_width=self.mlp_width or (base.mlp_width if base and same_width else None),
            kv_heads=self.kv_heads or (base.kv_heads if base and same_heads else None),
            tied=(base is None or base.tied) if self.tie_embeddings is None else self.tie_embeddings,
        )

    def architecture(self) -> str:
        """The model type, as transformers names it."""
        return str(self.transformers["model_type"]) if self.transformers is not None else self.shape().family

    def longest_sequence(self) -> int | None:
        """Return the number of positions of the model, if the config alone determines it; T5's relative ones have no
        end."""
        if self.transformers is None:
            shape = self.shape()
            return None if shape.family == "t5" else shape.positions
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(self.transformers.get(key), int):
                return int(self.transformers[key])
        return None
