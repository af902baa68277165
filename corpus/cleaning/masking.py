"""The step that masks personal data, or drops documents for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from corpus.cleaning.config import PersonalDataConfig, PersonalDataKind
from corpus.cleaning.personal_data import KINDS, Found, find_personal_data
from corpus.cleaning.rules import OURS, Broken, Rule
from corpus.cleaning.step import changed
from corpus.documents import Document


class Masking:
    """Masks personal data by kind; `counts` has how many of each kind were found."""

    name = "personal_data"

    def __init__(self, config: PersonalDataConfig) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._kinds: dict[str, PersonalDataKind] = {kind: getattr(config, kind) for kind in KINDS}
        self._wanted = frozenset(kind for kind, handled in self._kinds.items() if handled.action != "keep")
        self.rules: Sequence[Rule] = [
            Rule(f"personal_data.{kind}", OURS, high=0)
            for kind, handled in self._kinds.items()
            if handled.action == "drop"
        ]

    def __call__(self, documents: Sequence[Document]) -> list[Document | Broken]:
        return [self._masked(document) for document in documents]

    def _masked(self, document: Document) -> Document | Broken:
        found = find_personal_data(document.text, self._wanted, self._config.phone_regions)
        if not found:
            return document
        kinds = Counter(item.kind for item in found)
        self.counts.update({f"personal_data.{kind}": count for kind, count in kinds.items()})
        for rule in self.rules:
            if count := kinds[rule.name.rpartition(".")[2]]:
                return Broken(rule, count)
        return changed(document, self.mask(document.text, found))

    def mask(self, text: str, found: Sequence[Found]) -> str:
        pieces, behind = [], 0
        for start, end, kind in found:
            pieces += [text[behind:start], self._kinds[kind].replacement]
            behind = end
        return "".join([*pieces, text[behind:]])
