"""Which stages a command is about: --only, --from, --until and --force, composed."""

from __future__ import annotations

from flows.graph import Graph, ancestors, descendants, known
from infra.config import Config


class Selection(Config):
    """Stage ids; the stages that run are those that every given option allows. Empty means no restriction."""

    only: tuple[str, ...] = ()
    """Just these stages."""
    from_: tuple[str, ...] = ()
    """These stages and all that hang on them."""
    until: tuple[str, ...] = ()
    """These stages and all that they need."""
    force: tuple[str, ...] = ()
    """Build these even if their artifacts are there."""

    def choose(self, nodes: Graph) -> list[str]:
        """The selected nodes, in the DAG's order. Raises ConfigError for an unknown stage id."""
        allowed = set(nodes)
        if self.only:
            allowed &= set(known(nodes, self.only, "--only"))
        if self.from_:
            allowed &= descendants(nodes, known(nodes, self.from_, "--from"))
        if self.until:
            allowed &= ancestors(nodes, known(nodes, self.until, "--until"))
        known(nodes, self.force, "--force")
        return [name for name in nodes if name in allowed]

    def as_options(self) -> list[str]:
        """The command line that says the same."""
        options: list[str] = []
        for flag, names in (("only", self.only), ("from", self.from_), ("until", self.until), ("force", self.force)):
            options += [f"--{flag}", ",".join(names)] if names else []
        return options
