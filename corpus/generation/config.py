"""Config of the stages generate and generate_instructions. Importing this module loads nothing heavy."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from corpus.config import HELDOUT_SHARE, NearPrompts
from corpus.decontaminate.config import MatchConfig
from corpus.readers.config import fields_of
from infra.config import Config, Seed, StageConfig, outside_identity
from infra.secrets import names_secret
from infra.servers.credentials import SERVERS_ONLY

Share = Annotated[float, Field(ge=0, le=1)]
_RESERVED = {"model", "messages", "stream", "n", "seed", "max_tokens", "max_completion_tokens", "temperature", "top_p"}


class EndpointConfig(Config):
    """An endpoint that answers OpenAI's `/chat/completions`: a provider, vLLM, or `stemma serve`. The model is part of
    the identity; the address and the key are not, since the same model may be served elsewhere tomorrow."""

    url: str = outside_identity(examples=["http://127.0.0.1:8000/v1"])
    """Base URL to which `/chat/completions` is appended, e.g. http://127.0.0.1:8000/v1."""
    model: str = Field(min_length=1, examples=["Qwen/Qwen3-8B"])
    """The model's name at the endpoint, as GET /models lists it."""
    model_version: str = ""
    """A version label, part of the identity: change it when the weights behind the same name change."""
    api_key_variable: str | None = outside_identity(None)
    """Name of the environment variable with the API key, e.g. OPENAI_API_KEY. null: no key is sent."""
    concurrency: int = outside_identity(16, ge=1, le=1024)
    """Maximum number of concurrent requests."""
    requests_per_minute: float | None = outside_identity(None, gt=0)
    """Maximum rate of requests, retries included, evenly spaced. null: as fast as the server answers."""
    timeout_s: float = outside_identity(600, gt=0)
    """Seconds after which a request without a complete answer counts as failed and is retried."""
    attempts: int = outside_identity(8, ge=1, le=100)
    """Maximum number of times that a request is sent while the endpoint is unreachable, silent, overloaded (429) or
    broken (5xx). Pauses double from one second to one minute; a Retry-After of the endpoint is waited for."""
    token_limit_key: Literal["max_tokens", "max_completion_tokens"] = outside_identity("max_tokens")
    """The key of a request that holds `sampling.max_tokens`: OpenAI's newer models take max_completion_tokens alone."""

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError("expected http://HOST:PORT/v1 or https://HOST/v1, without a query")
        if parts.username or parts.password:
            raise ValueError("expected no user or password in the address: name a variable in api_key_variable")
        if parts.path.rstrip("/").endswith("/completions"):
            raise ValueError("expected the address before /chat/completions, which most servers call …/v1")
        return url.rstrip("/")

    @field_validator("api_key_variable")
    @classmethod
    def _names_a_secret(cls, name: str | None) -> str | None:
        if name is None:
            return None
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError("expected the name of an environment variable, not the key itself")
        if not names_secret(name):
            raise ValueError(f"expected a name that marks a secret, such as {name}_API_KEY: logs hide those")
        if name in SERVERS_ONLY:
            raise ValueError(f"stages do not receive {name}: export the key under another name, such as SERVE_API_KEY")
        return name


class SamplingConfig(Config):
    """Sampling parameters, with OpenAI's names."""

    temperature: float = Field(0.7, ge=0, le=2)
    """0 always picks the most likely token."""
    top_p: float = Field(1, gt=0, le=1)
    """Nucleus sampling (Holtzman et al., 2020): the smallest set of tokens with this probability."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum number of tokens in an answer; a longer one is truncated."""
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Further keys of each request that the endpoint supports: {min_p: 0.05}."""

    @field_validator("extra")
    @classmethod
    def _is_further(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(_RESERVED & extra.keys()):
            raise ValueError(f"extra: expected keys other than {', '.join(taken)}, which come from this config")
        return extra


class GenerationLimits(Config):
    """Largest share of the documents that were asked about which may be without a proper answer. Above it the stage
    stops, as soon as that is certain; the answers so far are kept."""

    failed: Share = 0.01
    """Refused by the endpoint, or without an answer after all attempts."""
    truncated: Share = 0.05
    """Cut off at `sampling.max_tokens`."""
    empty: Share = 0.05
    """Without any text."""
    unparsable: Share = 0.2
    """Without a question and answer, where they are asked for."""


class Rephrase(Config):
    """The same content in other words (Maini et al., 2024, Rephrasing the Web)."""

    kind: Literal["rephrase"] = "rephrase"
    style: Literal["plain", "encyclopedia", "textbook", "dialogue"] = "encyclopedia"
    """plain: for a child. encyclopedia: clear, neutral prose. textbook: explained step by step. dialogue: questions of
    a learner with answers of a teacher."""


class Translate(Config):
    """The document in another language, which becomes the `language` of what is made."""

    kind: Literal["translate"] = "translate"
    language: str = Field(pattern="^[a-z]{2,3}$")
    """ISO 639 code of the language to translate to."""

    @field_validator("language")
    @classmethod
    def _is_known(cls, code: str) -> str:
        from babel import Locale

        if code not in Locale("en").languages:
            raise ValueError(f"expected an ISO 639 code such as de or sw, not {code}")
        return code


class Questions(Config):
    """Questions that the document answers, each with its answer. As documents they are one text; as instructions each
    is a pair."""

    kind: Literal["questions"] = "questions"
    count: int = Field(5, ge=1, le=50)
    """Number of questions to request per piece of a document."""
    passage: bool = False
    """Put the piece of the document before each question, as in reading comprehension."""


class Backtranslation(Config):
    """The instruction to which the document is the response (Li et al., 2023, Self-Alignment with Instruction
    Backtranslation)."""

    kind: Literal["backtranslation"] = "backtranslation"


def _template(text: str) -> str:
    named = fields_of(text)
    if "text" not in named:
        raise ValueError("expected {text}, where the document goes")
    if wrong := [name for name in named if name not in ("text", "source", "language") and not _is_metadata(name)]:
        raise ValueError(f"expected {{text}}, {{source}}, {{language}} or {{metadata.KEY}}, not {{{wrong[0]}}}")
    return text


def _is_metadata(name: str) -> bool:
    return name.startswith("metadata.") and name != "metadata."


class Template(Config):
    """A custom prompt."""

    kind: Literal["template"] = "template"
    name: str = Field("template", pattern="^[a-z0-9][a-z0-9_-]*$", max_length=60)
    """Name of the prompt in the provenance."""
    prompt: str
    """The message, with {text} for the document, {source}, {language} and {metadata.KEY}; {{ and }} are braces."""
    language: str | None = Field(None, pattern="^[a-z]{2,3}$")
    """ISO 639 code of the language of the answers. null: that of the document."""

    @field_validator("prompt")
    @classmethod
    def _has_text(cls, prompt: str) -> str:
        return _template(prompt)


class PairTemplate(Template):
    """A custom prompt whose answers become pairs."""

    answer: Literal["pairs", "instruction", "response"] = "pairs"
    """Form of an answer. pairs: lines `Question: …` and `Answer: …`, or a JSON list of {question, answer}. instruction:
    the prompt to which the document is the response. response: the response to `instruction`."""
    instruction: str = ""
    """The prompt of a pair whose response is the answer, with the fields of `prompt`: "Summarise: {text}"."""

    @model_validator(mode="after")
    def _has_instruction(self) -> PairTemplate:
        if bool(self.instruction) != (self.answer == "response"):
            raise ValueError("instruction: expected with answer: response, and only there")
        if self.instruction:
            _template(self.instruction)
        return self


class GenerationConfig(StageConfig):
    """Settings that both stages share."""

    endpoint: EndpointConfig
    sampling: SamplingConfig = SamplingConfig()
    system: str = ""
    """The system's message before each prompt; "" sends none."""
    name: str = Field("generated", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)
    """Source name of the generated text, for mixtures, losses per source and the model card."""
    licence: str = ""
    """Licence of the generated text: check the terms of the endpoint and of the documents."""
    from_sources: tuple[str, ...] | None = None
    """Names of the sources whose documents are asked about. null: all."""
    max_documents: int | None = Field(None, ge=1)
    """Maximum number of documents to ask about, chosen by the lowest ids, which are hashes. null: all."""
    cut_characters: int | None = Field(4000, ge=200)
    """Length of the pieces into which longer documents are split, at blank lines, sentence ends or spaces. null: whole
    documents."""
    samples: int = Field(1, ge=1, le=100)
    """Number of answers per document, drawn with different seeds."""
    keep_truncated: bool = False
    """Keep answers that were cut off at `sampling.max_tokens`. They are counted either way."""
    answer_limits: GenerationLimits = outside_identity(GenerationLimits())
    seed: Seed | None = 17
    """Sent with each request, derived from the document and the sample. null: none is sent, for endpoints that refuse
    it."""


GenerationTask = Annotated[Rephrase | Translate | Questions | Template, Field(discriminator="kind")]
InstructionTask = Annotated[Questions | Backtranslation | PairTemplate, Field(discriminator="kind")]


class GenerateConfig(GenerationConfig):
    """Documents written by a language model from existing documents, in addition to them or instead."""

    task: GenerationTask = Rephrase()
    keep_originals: bool = True
    """Keep the documents themselves too. Models trained on generated text alone get worse (Shumailov et al., 2024)."""


class GenerateInstructionsConfig(GenerationConfig):
    """Prompts with their responses, written by a language model from documents. A pair is on the side of the split that
    its document is on."""

    task: InstructionTask = Questions()
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = HELDOUT_SHARE
    """Share of groups that is held out; the same in tokenizer, shard, instructions and preferences."""
    near_prompts: NearPrompts | None = NearPrompts()
    """Keep near-duplicate prompts on the same side of the split; null compares prompts exactly."""
    decontaminate: MatchConfig | None = MatchConfig()
    """Drop pairs that hold a test item of the pipeline's benchmarks or safety probes; null keeps them."""
    max_quarantine_share: ClassVar[float] = 0.0
