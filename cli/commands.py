"""The `stemma` command. Each command's module is imported only when it is called, so that help answers at once."""

from __future__ import annotations

import importlib
from difflib import get_close_matches

import click

COMMANDS = {
    "init": ("cli.pipelines.init", "Inspect text files and write a config for them."),
    "plan": ("cli.pipelines.plan", "Plan a training run: model size, layout, memory, time and cost."),
    "step": ("cli.pipelines.step", "List the stages that a pipeline can use, and show the keys of one."),
    "run": ("cli.pipelines.run", "Run a pipeline: build what is missing, reuse the rest."),
    "check": ("cli.pipelines.check", "Show what a run would build and reuse, and why, without starting it."),
    "config": ("cli.pipelines.config", "Print a config as one complete file, merged with the files it extends."),
    "status": ("cli.pipelines.status", "Show current runs, and which stages of a pipeline are built."),
    "why": ("cli.pipelines.check:why", "Explain why a stage was last built or reused."),
    "logs": ("cli.pipelines.logs", "Print the log of a stage."),
    "lineage": ("cli.store.lineage", "Show the ancestors or descendants of an artifact."),
    "cost": ("cli.store.cost", "Show the cost of a model or run: device time, money, energy, time lost to faults."),
    "ls": ("cli.store.ls", "List runs, models and artifacts with their results."),
    "open": ("cli.servers.open", "Open the newest report, card or page in the browser."),
    "sweep": ("cli.pipelines.sweep", "Run a pipeline over a grid or range of config values, or as ablations."),
    "compare": ("cli.pipelines.compare", "Compare runs, configs or models: settings, metrics and curves."),
    "export": ("cli.models.export", "Export a model as a folder for the Hugging Face Hub."),
    "verify": ("cli.store.verify", "Check the hashes of an artifact, or of all its ancestors too."),
    "adopt": ("cli.store.adopt", "Import a corpus, shards or a model made elsewhere."),
    "gc": ("cli.store.gc", "Remove artifacts that nothing needs."),
    "up": ("cli.servers.up", "Start the Prefect and MLflow servers and a worker in the background."),
    "down": ("cli.servers.up:down", "Stop what `up` started."),
    "deploy": ("cli.servers.deploy", "Put a pipeline and its stages on the Prefect page."),
    "schedule": ("cli.servers.deploy:schedule", "Show a pipeline's schedule and next runs."),
    "pause-schedule": ("cli.servers.deploy:pause", "Pause a pipeline's schedule."),
    "resume-schedule": ("cli.servers.deploy:resume", "Resume a pipeline's schedule."),
    "chat": ("cli.models.chat", "Chat with a model in the terminal."),
    "show-chat": (
        "cli.models.show_chat",
        "Print conversations as a model's tokens, marking those that fine-tuning learns.",
    ),
    "promote": ("cli.models.promote", "Promote a registered model."),
    "rollback": ("cli.models.promote:rollback", "Undo the last promotion."),
    "eval": ("cli.models.eval", "Score models on benchmarks, side by side."),
    "mirror": ("cli.models.mirror", "Copy a benchmark's data into a mirror for offline evaluation."),
    "feedback": ("cli.models.feedback", "Collect human preferences between answers, and train on them."),
    "review": ("cli.models.review", "Have people review a sample of a corpus and mark problems."),
    "serve": ("cli.models.serve", "Serve models through an OpenAI-compatible API, with a chat page."),
    "drill": ("cli.pipelines.drill", "Inject faults into a pipeline in a scratch store, and check its guarantees."),
    "completion": ("cli.common.completion", "Print the shell completion script."),
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
"""Deprecated command names, with their replacements."""


class LazyGroup(click.Group):
    """A group that imports a command's module when the command is called."""

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
    """From raw text to an evaluated, instruction-tuned, aligned language model, with full lineage.

    \b
    stemma check configs/quickstart.yaml    what would run, and why
    stemma run configs/quickstart.yaml      run it
    """


def run() -> int:
    """Run the command line and return its exit code. Raises KeyboardInterrupt if no handler caught it."""
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
