"""The `stemma` command. Each command's module is imported only when it is called, so that help answers at once."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

import click

COMMANDS = {
    "init": ("cli.pipelines.init", "Look at files of text and write a config for them."),
    "plan": ("cli.pipelines.plan", "What a training needs and costs: size, layout, memory, time, money."),
    "step": ("cli.pipelines.step", "List the stages that a pipeline can use, and show the keys of one."),
    "run": ("cli.pipelines.run", "Run a pipeline: build what is missing, reuse the rest."),
    "check": ("cli.pipelines.check", "Say what a run would build and reuse, and why; start nothing."),
    "config": ("cli.pipelines.config", "Print a config as one whole file, with what it extends."),
    "status": ("cli.pipelines.status", "What runs now, and what is built of a pipeline."),
    "why": ("cli.pipelines.check:why", "Why a stage was built or reused the last time."),
    "logs": ("cli.pipelines.logs", "What a stage printed."),
    "lineage": ("cli.store.lineage", "What an artifact descends from, and what descends from it."),
    "cost": ("cli.store.cost", "Cost of a model or a run: device time, money, energy, and time lost to faults."),
    "ls": ("cli.store.ls", "List runs, models and artifacts with what came out."),
    "open": ("cli.servers.open", "Open the newest report, card or page in the browser."),
    "sweep": ("cli.pipelines.sweep", "Run a pipeline over values of its keys, or ablations, with seeds."),
    "compare": ("cli.pipelines.compare", "What differs between runs, configs or models, with figures and curves."),
    "export": ("cli.models.export", "Write a model as a folder for the Hugging Face hub."),
    "verify": ("cli.store.verify", "Hash an artifact, or its whole ancestry, again."),
    "adopt": ("cli.store.adopt", "Import a corpus, shards or a model made elsewhere."),
    "gc": ("cli.store.gc", "Remove artifacts that nothing needs."),
    "up": ("cli.servers.up", "Start the Prefect and MLflow servers and a worker in the background."),
    "down": ("cli.servers.up:down", "Stop what `up` started."),
    "deploy": ("cli.servers.deploy", "Put a pipeline and its stages on the Prefect page."),
    "schedule": ("cli.servers.deploy:schedule", "When a pipeline runs by itself next."),
    "pause-schedule": ("cli.servers.deploy:pause", "Keep a pipeline from running by itself."),
    "resume-schedule": ("cli.servers.deploy:resume", "Let a pipeline run by itself again."),
    "chat": ("cli.models.chat", "Talk to a model."),
    "show-chat": (
        "cli.models.show_chat",
        "Print conversations as a model's tokens, and what tuning would learn of them.",
    ),
    "promote": ("cli.models.promote", "Make a registered model the one to use."),
    "rollback": ("cli.models.promote:rollback", "Go back to the model that was promoted before."),
    "eval": ("cli.models.eval", "Score models on benchmarks, side by side."),
    "mirror": ("cli.models.mirror", "Put a benchmark's data where its task finds them without a network."),
    "feedback": ("cli.models.feedback", "Have people choose between answers, and train on what they choose."),
    "review": ("cli.models.review", "Have people look through a sample of a corpus and mark what is odd."),
    "serve": ("cli.models.serve", "Serve models by OpenAI's protocol, with a page to talk to two side by side."),
    "drill": ("cli.pipelines.drill", "Hit a pipeline with faults in a scratch store, and check what is promised."),
    "completion": ("cli.common.completion", "Print the script that completes commands in a shell."),
}

GROUPS = {
    "Begin": ("init", "plan", "step", "check", "config"),
    "Run": ("run", "status", "why", "logs", "open", "sweep", "drill"),
    "Servers and schedules": ("up", "down", "deploy", "schedule", "pause-schedule", "resume-schedule"),
    "What the store holds": ("ls", "lineage", "cost", "compare", "verify", "adopt", "gc"),
    "Models": ("chat", "show-chat", "serve", "eval", "mirror", "promote", "rollback", "export"),
    "People": ("feedback", "review"),
    "Shell": ("completion",),
}
"""Headings of `stemma --help`, each with its commands."""
OLD_NAMES = {"pause": "pause-schedule", "resume": "resume-schedule"}
"""Names that still work, with the names that took their place."""


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one when it is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name or "command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in OLD_NAMES:
            new = OLD_NAMES[args[0]]
            continued = "; stemma run continues a run" if args[0] == "resume" else ""
            click.echo(f"{args[0]} is about schedules: its name is {new} now{continued}", err=True)
            args = [new, *args[1:]]
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = get_close_matches(args[0], COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}."
            raise click.UsageError(f"No such command {args[0]!r}: {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), COMMANDS[name][1]) for name in names])


def _version(ctx: click.Context, _: click.Parameter, requested: bool) -> None:
    if not requested or ctx.resilient_parsing:
        return
    from importlib.metadata import version
    from platform import python_version

    from infra.project import code_state, lock_hash

    state = code_state()
    commit = f"commit {str(state['commit'])[:10]}{' with changes' if state['dirty'] else ''}" if state["commit"] else ""
    lock = f"requirements.lock {lock_hash()[:10]}" if lock_hash() else ""
    click.echo(", ".join(filter(None, [f"stemma {version('stemma')}", commit, lock, f"Python {python_version()}"])))
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print version.")
def stemma() -> None:
    """From raw text to an evaluated, instruction-tuned, aligned language model, and its whole family tree.

    \b
    stemma check configs/quickstart.yaml    what would run, and why
    stemma run configs/quickstart.yaml      run it
    """


def run() -> int:
    """Runs the command line and returns its exit code. Raises KeyboardInterrupt if no handler answered to one."""
    try:
        stemma.main(prog_name="stemma", standalone_mode=False)
    except click.UsageError as error:
        from cli.common.output import fail_usage

        return fail_usage(error)
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.Abort as error:
        raise KeyboardInterrupt from error
    return 0
