"""Config of the stage clean: the rules that a document must keep, and what is done to those that stay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from infra.config import Config, Seed, StageConfig, outside_identity
from infra.io.sources import Source, SourcePath, expand

Share = Annotated[float, Field(ge=0, le=1)]
NGramLimits = tuple[tuple[Annotated[int, Field(ge=1)], Share], ...]


class GopherQualityConfig(Config):
    """Rae et al., 2021, Scaling Language Models: Methods, Analysis & Insights from Training Gopher, A1.1, "Quality
    Filtering". Words are those of spaCy's English tokenizer, as in datatrove. null turns a rule off."""

    min_words: int | None = Field(50, ge=1)
    """Minimum number of words that are not only punctuation."""
    max_words: int | None = Field(100_000, ge=1)
    """Maximum number of words that are not only punctuation."""
    min_mean_word_length: float | None = Field(3, gt=0)
    """Minimum mean length of such words, in characters."""
    max_mean_word_length: float | None = Field(10, gt=0)
    """Maximum mean length of such words, in characters."""
    max_symbol_word_ratio: Share | None = 0.1
    """Maximum ratio of hash signs, and of ellipses, to words."""
    max_bullet_line_share: Share | None = 0.9
    """Maximum share of lines that begin with a bullet point."""
    max_ellipsis_line_share: Share | None = 0.3
    """Maximum share of lines that end with an ellipsis."""
    min_alphabetic_word_share: Share | None = 0.8
    """Minimum share of words that contain a letter."""
    min_stop_words: int | None = Field(2, ge=1)
    """Minimum number of different stop words."""
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")
    """Words as in the text, case-sensitive; a list in another language adapts the rule to it. At most
    64."""
    language: str | None = Field(None, pattern="^[a-z]{2}$")
    """The language (ISO 639-1) of texts that the limits on English words do not fit: their words, stop words and
    letters are measured as those of that language, or, in scripts that put no space between words, by characters. null:
    the language that the source declares, else the one found by stop words and script. en: English measures for all
    texts, as in Gopher. Stop words other than the default do the same."""

    @model_validator(mode="after")
    def _limits_fit(self) -> GopherQualityConfig:
        for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise ValueError(f"{low}: expected at most {high} ({most:g})")
        if not 1 <= len(self.stop_words) <= 64:
            raise ValueError("stop_words: expected 1 to 64 words")
        return self


class GopherRepetitionConfig(Config):
    """Rae et al., 2021, A1.1, "Repetition Removal", table A1. null turns a rule off."""

    max_repeated_line_share: Share | None = 0.3
    """Maximum share of lines that occurred before in the same text."""
    max_repeated_paragraph_share: Share | None = 0.3
    """Maximum share of paragraphs, separated by blank lines, that occurred before in the same text."""
    max_repeated_line_character_share: Share | None = 0.2
    """Maximum share of characters in such lines."""
    max_repeated_paragraph_character_share: Share | None = 0.2
    """Maximum share of characters in such paragraphs."""
    most_common_ngrams: NGramLimits = ((2, 0.20), (3, 0.18), (4, 0.16))
    """Pairs [n, share]: maximum share of characters in the most common n-gram of words."""
    repeated_ngrams: NGramLimits = ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10))
    """Pairs [n, share]: maximum share of characters in word n-grams that occurred before."""


class C4Config(Config):
    """Raffel et al., 2020, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2.2:
    lines that are no sentences are taken out of a document. Meant for web pages. null turns a rule off."""

    line_ends: tuple[str, ...] = (".", "?", "!", '"', "'")
    """Characters that a line must end with; an ellipsis does not count. [] accepts any line, as FineWeb does."""
    min_words_in_line: int | None = Field(3, ge=1)
    """Lines with fewer words, counted by spaces, are removed. The paper has 5 at first, 3 in its last version."""
    max_word_length: int | None = Field(1000, ge=1)
    """Lines with a longer word are removed; in the code published with C4, not in the paper."""
    line_words: tuple[str, ...] = ("javascript",)
    """Lines that contain one of these words, in any case, are removed."""
    line_phrases: tuple[str, ...] = (
        "terms of use",
        "privacy policy",
        "cookie policy",
        "uses cookies",
        "use of cookies",
        "use cookies",
    )
    """The same for notes on policies; in the code published with C4, not in the paper."""
    remove_citations: bool = True
    """Remove Wikipedia's marks [1], [edit] and [citation needed] from lines."""
    drop_lorem_ipsum: bool = True
    """Drop documents with "lorem ipsum" in a remaining line."""
    drop_curly_bracket: bool = True
    """Drop documents with a curly bracket in a remaining line: most are code."""
    min_sentences: int | None = Field(5, ge=1)
    """Minimum number of sentences that remain: 3 in the paper's last version, 5 in its first and in datatrove."""

    @model_validator(mode="after")
    def _words_fit(self) -> C4Config:
        if any(len(end) != 1 for end in self.line_ends):
            raise ValueError("line_ends: expected single characters")
        if len(self.line_words) + len(self.line_phrases) > 60 or not all((*self.line_words, *self.line_phrases)):
            raise ValueError(
                "line_words, line_phrases: expected at most 60 words and phrases in all, none of them empty"
            )
        return self


class FineWebConfig(Config):
    """Penedo et al., 2024, The FineWeb Datasets: Decanting the Web for the Finest Text Data at Scale, 3.6. Meant for
    web pages; looks at what C4's rules left. null turns a rule off."""

    min_ended_line_share: Share | None = 0.12
    """Minimum share of lines that end with a sentence-ending mark."""
    max_short_line_share: Share | None = 0.67
    """Maximum share of lines of at most `short_line_length` characters."""
    short_line_length: int = Field(30, ge=1)
    """Longest line, in characters, that counts as short; 30 in the paper and in the code published with it."""
    max_repeated_line_character_share: Share | None = 0.01
    """Maximum share of characters in lines that occurred before in the same text; 0.1 in the paper, 0.01 in the code
    published with it (datatrove)."""
    max_lines_per_word: float | None = Field(0.3, ge=0)
    """Maximum ratio of newlines to words; in the code published with FineWeb (datatrove)."""


class PersonalDataKind(Config):
    """Action for one kind of personal data, and the replacement if it is masked."""

    action: Literal["mask", "drop", "keep"] = "mask"
    """mask replaces it, drop drops the document, keep leaves it unchanged."""
    replacement: str


def _existing_region(code: str) -> str:
    from phonenumbers import SUPPORTED_REGIONS

    if code not in SUPPORTED_REGIONS:
        raise ValueError(f"phone_regions: expected codes such as US or DE, not {code}")
    return code


PhoneRegion = Annotated[str, AfterValidator(_existing_region)]
"""A country (ISO 3166-1 alpha-2) whose phone numbers libphonenumber knows."""


def _masked(replacement: str) -> PersonalDataKind:
    return PersonalDataKind(replacement=replacement)


class PersonalDataConfig(Config):
    """Personal data in the text, found by its form and validated by check digits and numbering rules. Replacements look
    like real values but belong to no person, as in FineWeb (Penedo et al., 2024, 3.1), so that a model learns no
    marker."""

    email: PersonalDataKind = _masked("email@example.com")
    """E-mail addresses."""
    ip: PersonalDataKind = _masked("192.0.2.1")
    """Public IPv4 and IPv6 addresses; private ones identify no person. The default is in TEST-NET-1 (RFC 5737)."""
    phone: PersonalDataKind = _masked("555-0100")
    """Phone numbers that are valid in their country by libphonenumber's rules and written as phone numbers are."""
    phone_regions: tuple[PhoneRegion, ...] = ("US",)
    """Countries (ISO 3166-1 alpha-2) whose numbers are found without a country code too."""
    card: PersonalDataKind = _masked("0000 0000 0000 0000")
    """Payment card numbers: an issuer's digits in front and Luhn's check digit (ISO/IEC 7812) behind."""
    iban: PersonalDataKind = _masked("XX00 0000 0000 0000")
    """Bank accounts with valid check digits (ISO 13616)."""
    secret: PersonalDataKind = _masked("<secret>")
    """Private keys, tokens of known services, passwords in URLs and assignments."""


class LanguageConfig(Config):
    """Language identification by langid.py's model (Lui and Baldwin, 2012), which ships in py3langid and knows 97
    languages. Fills the documents' `language`."""

    keep: tuple[str, ...] = ()
    """ISO 639-1 codes of the languages to keep, e.g. [en, de]; [] drops none."""
    keep_by_source: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """The same for single sources, by their names, instead of `keep`."""
    min_confidence: Share = 0.65
    """Minimum probability: below it the language counts as unknown and, with `keep`, the document is dropped. FineWeb
    (Penedo et al., 2024) uses 0.65, with another model."""


class ClassifierConfig(Config):
    """A classifier that learns good from bad sources of this corpus and drops what looks bad (Brown et al., 2020,
    Language Models are Few-Shot Learners, appendix A: curated corpora against unfiltered Common Crawl; Taylor et al.,
    2022, Galactica). It becomes part of the artifact."""

    good: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the sources (`ingest.read`, `name`) with good documents, e.g. [wikipedia, books]."""
    bad: Annotated[tuple[str, ...], Field(min_length=1)]
    """Names of the unfiltered sources, e.g. [crawl]."""
    apply_to: tuple[str, ...] | None = None
    """Names of the sources to filter; null: the bad ones."""
    keep: Literal["pareto", "threshold"] = "pareto"
    """pareto keeps a document if a draw from numpy's pareto(alpha) is above 1 - score, as GPT-3: mostly good ones, and
    some of all kinds. threshold keeps documents with a score of at least `min_score`."""
    alpha: float = Field(9, gt=0)
    """Shape of pareto: the larger, the fewer bad documents are kept. GPT-3 uses 9 (Brown et al., 2020, appendix A)."""
    min_score: Share = 0.5
    """Minimum score for threshold: the probability, from 0 to 1, that a document is from the good sources."""
    max_examples: int = Field(20_000, ge=10)
    """Maximum number of training documents from each side."""
    features: int = Field(2**18, ge=2**10)
    """Number of features that words and word pairs are hashed to."""
    strength: float = Field(10, gt=0)
    """Inverse of the L2 penalty (scikit-learn's C)."""
    heldout_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of the examples on which accuracy is measured."""
    seed: Seed = 17
    """Seed for drawing examples, held-out examples and GPT-3's Pareto draws."""

    @model_validator(mode="after")
    def _sides_differ(self) -> ClassifierConfig:
        if overlap := sorted(set(self.good) & set(self.bad)):
            raise ValueError(f"good: {', '.join(overlap)} is also listed in bad")
        return self


class ToxicityFilterConfig(Config):
    """Drops documents by a toxicity score. Word lists and classifiers also remove dialects and text by and about
    minorities (Xu et al., 2021, Detoxifying Language Models Risks Marginalizing Minority Voices): inspect
    aux/dropped.parquet, or balance the corpus instead (`counterfactual`)."""

    max_score: Share = 0.9
    """Maximum score of a passage."""
    window_characters: int = Field(1000, ge=50)
    """Length of the passages that are scored; a document gets the score of its most toxic passage."""
    model: SourcePath | None = outside_identity(None)
    """A Hugging Face sequence classifier's folder; by default the SVM of alt-profanity-check, offline and fast."""
    label: str = "toxic"
    """The label of that model whose probability is the score."""


class CounterfactualConfig(Config):
    """Counterfactual data augmentation (Zhao et al., 2018, Gender Bias in Coreference Resolution; Zmigrod et al., 2019,
    Counterfactual Data Augmentation for Mitigating Gender Stereotypes). English only; the pairs are in
    corpus/cleaning/data/counterfactual_pairs.tsv."""

    groups: tuple[Literal["gender", "religion", "ethnicity", "names"], ...] = ("gender",)
    """Groups of terms that are swapped. Names are swapped with those of the list, regardless of the person's gender or
    origin."""
    mode: Literal["add", "replace"] = "add"
    """add keeps the document and adds its counterfactual, in the same group of the held-out split. replace substitutes
    the counterfactual for the document, so that the corpus keeps its size."""
    share: Share = 0.5
    """Share of documents that are drawn."""
    seed: Seed = 17
    """Decides which."""


class NeutralConfig(Config):
    """Neutral rewriting: words that name a gender where a role is meant give way to neutral ones (chairman to chair).
    English only; pronouns stay."""

    words: SourcePath | None = None
    """A file of lines `word<TAB>neutral`; by default corpus/cleaning/data/neutral_words.tsv."""
    share: Share = 1.0
    """Share of documents that are drawn."""
    seed: Seed = 17
    """Decides which."""


class CleanConfig(StageConfig):
    """Rules that drop documents or lines. Each family of rules is off when null; a document is dropped by the first
    rule that it breaks, in the order of the keys."""

    min_characters: int | None = Field(100, ge=1)
    """Minimum length of a text."""
    max_characters: int | None = Field(5_000_000, ge=1)
    """Maximum length of a text: a longer one is most likely a file that should have been split into documents."""
    gopher_quality: GopherQualityConfig | None = GopherQualityConfig()
    gopher_repetition: GopherRepetitionConfig | None = GopherRepetitionConfig()
    c4: C4Config | None = None
    """Off by default: it removes everything that is not a sentence, such as verse, tables and code."""
    fineweb: FineWebConfig | None = None
    """Off by default: like C4's these rules are for web pages."""
    language: LanguageConfig | None = None
    classifier: ClassifierConfig | None = None
    toxicity: ToxicityFilterConfig | None = None
    personal_data: PersonalDataConfig | None = PersonalDataConfig()
    neutral: NeutralConfig | None = None
    counterfactual: CounterfactualConfig | None = None

    def sources(self) -> list[Source]:
        sources = []
        if self.toxicity and self.toxicity.model:
            sources.append(Source("clean.toxicity.model", paths=expand([self.toxicity.model])))
        if self.neutral and self.neutral.words:
            sources.append(Source("clean.neutral.words", paths=expand([self.neutral.words])))
        return sources

    @model_validator(mode="after")
    def _lengths_are_ordered(self) -> CleanConfig:
        if self.min_characters and self.max_characters and self.min_characters > self.max_characters:
            raise ValueError(f"min_characters: expected at most max_characters ({self.max_characters})")
        return self
