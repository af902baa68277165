"""Contradictions between sections and steps that are each valid, found before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from corpus.config import DATA_KINDS, IngestConfig, ShardConfig, TokenizerConfig, ValidateConfig
from corpus.documents.source_names import unknown_source
from corpus.generation.config import GenerateConfig
from corpus.tokens.encode import bounds_of, load_tokenizer
from evaluation.config import BenchmarksConfig, BenchmarkTextConfig, RegisterConfig
from evaluation.config.mitigations import MitigationsConfig
from flows.config.checks.ranks import optimizer_problems, quantized_problems
from flows.config.graph import MODEL, ancestors, first_model, models_before
from flows.config.pipeline_config import Graph, PipelineConfig, dump
from flows.config.problems import nearest
from flows.config.usual import items_to_clear, missing_sections
from infra.errors import Problem, StageError
from infra.fingerprint import canonical
from infra.launch.config import LaunchConfig
from infra.secrets import recognised
from infra.servers.vllm import program_problem
from infra.store.measurements import measurement_of
from tasks.building.payloads import PAYLOADS
from tasks.stage import Node
from training.config import (
    BaseModelConfig,
    Continues,
    DistillConfig,
    KeepEvery,
    MixtureConfig,
    PreferenceTuningConfig,
    PretrainConfig,
    RlhfConfig,
    SftConfig,
    TrainerConfig,
)
from training.config.alignment import samplers_problem
from training.config.alignment.rubrics import JUDGE
from training.config.duration import parse_duration
from training.config.families import documents_problem, sampler_problems


def contradictions(config: PipelineConfig, nodes: Graph) -> Iterator[Problem]:
    """Yield problems of keys that contradict each other.

    Args:
        config: a config whose keys are valid by themselves.
        nodes: those of the config, as far as they make a graph.
    """
    for path, message in recognised(dump(config)):
        yield Problem(
            "secret_in_config", path, f"{message} was found; configs are kept and shown", "use the environment"
        )
    yield from _unknown_adopted(config)
    yield from missing_sections(config)
    built = [node for node in nodes.values() if not node.adopted and not node.measures]
    for node in built:
        yield from map(node.relocated, _of_training(node, nodes))
        yield from map(node.relocated, _of_vllm(node, nodes, config.launch))
        if isinstance(node.config, ShardConfig):
            yield from map(
                node.relocated, _of_document_bounds(node.config, nodes.get(node.inputs.get("tokenizer", "")))
            )
        if isinstance(node.config, RlhfConfig):
            if problem := samplers_problem(node.config, config.launch):
                yield node.relocated(problem)
            yield from _of_judge(node, nodes)
            yield from _of_rewards(node, node.config)
        if isinstance(node.config, DistillConfig):
            yield from _of_teacher(node, nodes)
        if isinstance(node.config, RegisterConfig):
            yield from map(node.relocated, _of_gates(node, node.config, nodes))
        if isinstance(node.config, MitigationsConfig):
            yield from map(node.relocated, node.config.same_names(node.inputs))
        if isinstance(node.config, TrainerConfig) and node.config.continues:
            yield from _of_continuing(node, node.config, node.config.continues, nodes)
        yield from optimizer_problems(config.launch, node)
        yield from quantized_problems(config.launch, node)
    yield from dict.fromkeys(problem for node in built for problem in _not_causal(node, nodes))
    yield from _unequal_heldout(built)
    yield from _bad_suites(config)
    yield from config.launch.missing_packages()
    yield from config.lineage.missing_packages()
    yield from _nothing_to_clear(config)


def _unknown_adopted(config: PipelineConfig) -> Iterator[Problem]:
    for name in config.adopted:
        step = config.steps.get(name)
        if (step.uses if step else name) not in PAYLOADS:
            known = [*PAYLOADS, *(name for name, other in config.steps.items() if other.uses in PAYLOADS)]
            fix = nearest(name, known, "stages that can be imported:", 0.4)
            yield Problem("unknown_stage", f"adopted.{name}", "no artifact of this stage can be imported", fix)


def _of_training(node: Node, nodes: Graph) -> Iterator[Problem]:
    """Yield conflicts between a training step and the shards or model that it reads."""
    section = node.config
    if isinstance(section, PretrainConfig):
        continues = "model" in node.inputs
        if continues:
            yield from section.problems_of_continuing()
        shards = nodes.get(node.inputs.get("shards", ""))
        if shards is None or not isinstance(shards.config, ShardConfig):
            return
        if section.mixture:
            yield from _of_mixture(section.mixture, node, shards, shards.config, nodes)
        tokenizer = nodes.get(shards.inputs.get("tokenizer", ""))
        trained = tokenizer.config if tokenizer and isinstance(tokenizer.config, TokenizerConfig) else None
        vocabulary = trained.vocab_size if trained and not trained.pretrained else None
        yield from section.problems(shards.config.sequence_length, vocabulary, continues=continues)
    elif isinstance(section, SftConfig | PreferenceTuningConfig | DistillConfig | RlhfConfig):
        first = first_model(nodes, node.id)
        pretrain = first.config if first and isinstance(first.config, PretrainConfig) else None
        yield from section.problems(pretrain.model.longest_sequence() if pretrain else None)
        if pretrain:
            yield from _of_tuned_family(section, node.stage.name, pretrain.model.architecture())
    if isinstance(section, SftConfig):
        yield from _of_text("sft", "text_share", section.text_share, section.text_sources, node, nodes)
    if isinstance(section, RlhfConfig):
        yield from _of_text("rlhf", "text_coef", section.text_coef, section.text_sources, node, nodes)
        yield from section.missing_functions()


def _of_tuned_family(section: TrainerConfig, stage: str, architecture: str) -> Iterator[Problem]:
    """Settings of a tuning that the family of the model does not support."""
    if isinstance(section, SftConfig) and section.packing and (problem := documents_problem(architecture)):
        fix = "set it to false, or train a model of another family"
        yield Problem(problem.code, "sft.packing", problem.message, fix)
    if getattr(section, "lora", None) and architecture == "gpt2":
        message = "expected a model with linear layers, gpt2 has none that adapters support"
        yield Problem("no_such_layer", f"{stage}.lora", message, f"tune all weights: set {stage}.lora to null")


def _of_document_bounds(section: ShardConfig, tokenizer: Node | None) -> Iterator[Problem]:
    """Yield a problem for an external tokenizer without an end-of-document token, if its files are available."""
    if tokenizer is None or not isinstance(tokenizer.config, BaseModelConfig):
        return
    folder = Path(tokenizer.config.path)
    if not (folder / "tokenizer.json").is_file():
        return
    try:
        bounds_of(load_tokenizer(folder), folder, section.end_of_text, section.begin_of_text)
    except StageError as error:
        for problem in error.problems:
            yield Problem(problem.code, "shard.end_of_text", f"{folder}: {problem.message}", problem.fix)
    except Exception as error:  # `tokenizers` raises a plain Exception for unreadable files
        yield Problem("bad_tokenizer", "base_model.path", f"{folder / 'tokenizer.json'} cannot be read: {error}")


def _of_vllm(node: Node, nodes: Graph, launch: LaunchConfig) -> Iterator[Problem]:
    """Yield reasons why vLLM cannot serve the step, as far as they are known before the run."""
    section = node.config
    samples = isinstance(section, RlhfConfig) and section.sampler == "vllm"
    if not samples and not (isinstance(section, BenchmarksConfig) and section.engine == "vllm"):
        return
    if problem := program_problem(launch.vllm):
        yield problem
    if not samples:
        return
    first = first_model(nodes, node.id)
    if first and isinstance(first.config, PretrainConfig):
        yield from sampler_problems(first.config.model.architecture())


def _of_mixture(
    mixture: MixtureConfig, node: Node, shards: Node, packed: ShardConfig, nodes: Graph
) -> Iterator[Problem]:
    """Problems of a mixture with the shards that it is read from."""
    if shards.adopted:
        return
    if not packed.by_source:
        message = f"expected shards in which each sequence has one source, but those of {shards.id} mix sources"
        yield Problem("not_by_source", "pretrain.mixture", message, f"set {shards.key}.by_source: true")
    if node.inputs.get("tokenizer") != shards.inputs.get("tokenizer"):
        message = f"expected {shards.inputs.get('tokenizer')}, the tokenizer of {shards.id}"
        yield Problem("other_tokenizer", f"{node.key}.inputs.tokenizer", message, "name that one")
    if read := _sources_of(shards, nodes):
        yield from mixture.problems(read)


def _sources_of(shards: Node, nodes: Graph) -> set[str]:
    """The sources of the text in shards; None if they are not known before the run."""
    read = [nodes[name] for name in ancestors(nodes, [shards.id])]
    if any(node.adopted and node.stage.makes in ("documents", "shards") for node in read):
        return set()
    ingested = {name for node in read if isinstance(node.config, IngestConfig) for name in node.config.names()}
    return ingested | {node.config.name for node in read if isinstance(node.config, GenerateConfig)}


def _of_text(stage: str, key: str, value: float, sources: Sequence[str], node: Node, nodes: Graph) -> Iterator[Problem]:
    """Problems of text to read without shards to read it from, the reverse, and sources that the shards do not have."""
    where = f"{stage}.text_sources"
    if bool(value) != ("shards" in node.inputs):
        message = f"{value:g} and {'no ' if value else ''}shards to read text from were given"
        fix = "add a shard section, or name a step of shards in inputs.shards" if value else "leave the input out"
        yield Problem("contradiction", f"{stage}.{key}", message, fix)
    elif not value and sources:
        yield Problem("contradiction", where, f"{key} is 0, so no text is read", f"set {key}")
    elif value:
        for name in sources if (read := _sources_of(nodes[node.inputs["shards"]], nodes)) else ():
            yield from unknown_source(where, name, read)
        yield from _of_other_ids(f"{stage}.{key}", node, nodes[node.inputs["shards"]], nodes)


def _of_other_ids(where: str, node: Node, shards: Node, nodes: Graph) -> Iterator[Problem]:
    """Yield a problem if text was tokenized for a different vocabulary than the model's, as far as steps show it."""
    models = list(models_before(nodes, node.id))
    by = shards.inputs.get("tokenizer", "")
    made = nodes.get(by)
    if not models or models[-1].adopted or shards.adopted or made is None or made.adopted:
        return
    trained = isinstance(made.config, TokenizerConfig) and not made.config.pretrained
    if trained and by not in [model.inputs.get("tokenizer") for model in models]:
        message = f"expected text in the token ids of {models[0].id}, but {shards.id} has those of {by}"
        fix = f"take shards whose input tokenizer is {models[0].id}, or leave text out"
        yield Problem("other_tokenizer", where, message, fix)


def _of_gates(node: Node, config: RegisterConfig, nodes: Graph) -> Iterator[Problem]:
    """Yield gates on metrics of steps that the registration does not read: they would fail after all is built."""
    if (model := node.inputs.get(MODEL)) is None:
        return
    names = sorted({*node.inputs, model, nodes[model].stage.name} - set(map(measurement_of, node.inputs)))
    for number, gate in enumerate(config.gates):
        step = gate.figure.partition(".")[0]
        if step not in names:
            message = f"{step} is not a step whose metrics this registration reads"
            fix = nearest(step, names, "it reads")
            yield Problem("unknown_figure", f"register.gates.{number}.figure", message, fix)


def _of_judge(node: Node, nodes: Graph) -> Iterator[Problem]:
    """Yield a problem if the judge, or a second reward model, is the reward model that trains the policy: by name, or
    because both would be the same artifact. Also if there are further reward models without the first."""
    declared = {item.name for item in node.stage.inputs} - {"reward_model"}
    further = sorted(node.inputs.keys() - declared - {"reward_model"})
    if further and "reward_model" not in node.inputs:
        message = "expected the first reward model as the input reward_model, and others in addition to it"
        yield Problem("missing_input", f"{node.key}.inputs.{further[0]}", message, f"call {further[0]} reward_model")
    training = [name for name in ("reward_model", *further) if name in node.inputs]
    for index, name in enumerate([*training, "judge"]):
        for other in training[:index]:
            yield from _same_model(node, name, other, nodes)


def _of_teacher(node: Node, nodes: Graph) -> Iterator[Problem]:
    """Yield a problem if teacher and student have different vocabularies, as far as steps and folders show it."""
    has_endpoint = isinstance(node.config, DistillConfig) and node.config.endpoint is not None
    if has_endpoint == ("teacher" in node.inputs):
        message = f"expected either the input teacher or an endpoint, got {'both' if has_endpoint else 'neither'}"
        yield Problem("no_teacher", f"{node.key}.inputs.teacher", message, "give one of the two")
    if not {"model", "teacher"} <= node.inputs.keys():
        return
    student, teacher = node.inputs["model"], node.inputs["teacher"]
    by_student, by_teacher = (_tokenizer_of(nodes, name) for name in (student, teacher))
    if by_student is None or by_teacher is None or by_student == by_teacher:
        return
    where = f"{node.key}.inputs.teacher"
    fix = "use a teacher with the same tokenizer; any teacher can write answers for sft (generate_instructions)"
    folders = [Path(made) if isinstance(made, Path) else None for made in (by_student, by_teacher)]
    if all(folder is None for folder in folders):
        message = f"expected the vocabulary of {student}, made by {by_student}, but {teacher} has that of {by_teacher}"
        yield Problem("other_vocabulary", where, message, fix)
    elif all(folder is not None and (folder / "tokenizer.json").is_file() for folder in folders):
        try:
            vocabularies = [load_tokenizer(folder).get_vocab().items() for folder in folders if folder]
        except Exception:  # a tokenizer that cannot be read is reported where it is imported
            return
        if entries := len(vocabularies[0] ^ vocabularies[1]):
            message = f"expected the vocabulary of {student}; {entries:,} entries of that of {teacher} differ"
            yield Problem("other_vocabulary", where, message, fix)


def _tokenizer_of(nodes: Graph, model: str) -> str | Path | None:
    """The step that trains a model's tokenizer, or the folder that it comes from; None if it is not known."""
    first = [nodes[model], *models_before(nodes, model)][-1]
    made = nodes.get(first.inputs.get("tokenizer", "")) if isinstance(first.config, PretrainConfig) else first
    if made is None or made.adopted or first.adopted:
        return None
    if isinstance(made.config, BaseModelConfig):
        return Path(made.config.path)
    return made.id if isinstance(made.config, TokenizerConfig) and not made.config.pretrained else None


def _of_rewards(node: Node, section: RlhfConfig) -> Iterator[Problem]:
    """Yield settings that need a reward model or judge that the step does not have."""
    key, given = node.key, node.inputs
    if section.chosen_algorithm == "ppo" and "reward_model" not in given:
        message = "expected the input reward_model for ppo: its value function begins from it"
        fix = "add the input, or use algorithm: rloo, grpo or raft with several answers_per_prompt"
        yield Problem("no_reward_model", f"{key}.algorithm", message, fix)
    if section.stop_on_divergence and not {"reward_model", "judge"} <= given.keys():
        message = "expected the inputs reward_model and judge, whose scores it compares"
        fix = "give a judge: a reward model of another seed or of other pairs, or set it to null"
        yield Problem("no_judge", f"{key}.stop_on_divergence", message, fix)
    if section.rubric and section.rubric.endpoint is None and JUDGE not in given:
        message = f"expected a judge: an endpoint, or the input {JUDGE}"
        fix = f"set rubric.endpoint, or give a model that follows instructions as the input {JUDGE}"
        yield Problem("no_rubric_judge", f"{key}.rubric", message, fix)
    members = given.keys() - ({item.name for item in node.stage.inputs} - {"reward_model"})
    for name in sorted(section.reward_weights.keys() - members):
        message = f"expected one of the inputs {', '.join(sorted(members)) or '(there is no reward model)'}"
        fix = "give it as an input, or leave it out"
        yield Problem("unknown_reward_model", f"{key}.reward_weights.{name}", message, fix)


def _same_model(node: Node, name: str, other: str, nodes: Graph) -> Iterator[Problem]:
    """Yield the reason if the inputs `name` and `other` would be the same reward model."""
    code = "same_judge" if name == "judge" else "same_reward_model"
    first, second = node.inputs.get(other, ""), node.inputs.get(name, "")
    judge, trains = nodes.get(second), nodes.get(first)
    if judge is None or trains is None:
        return
    if judge is trains:
        message = f"expected a different reward model from {first}, which trains the policy"
        yield Problem(code, f"{node.key}.inputs.{name}", message, "add a step that uses reward_model")
    elif judge.adopted or trains.adopted:
        if judge.adopted == trains.adopted:
            message = f"expected a different artifact from that of {first}"
            yield Problem(code, f"adopted.{judge.id}", message, "import another")
    elif canonical(judge.config) == canonical(trains.config) and judge.inputs == trains.inputs:
        message = f"it would be the artifact of {first}, which trains the policy"
        yield Problem(code, judge.key, message, "give it another seed, or other preferences")


def _of_continuing(node: Node, section: TrainerConfig, continues: Continues, nodes: Graph) -> Iterator[Problem]:
    """Problems that keep a training from continuing that of another step, as far as their configs show."""
    first, key = continues.step, node.key
    if not node.path:
        fix = f"write it as a step: steps: {{longer: {{continues: {{step: {first}}}, …}}}}"
        yield Problem("contradiction", f"{key}.continues", "only a named step can continue another", fix)
        return
    before = nodes.get(first)
    if before is None or not isinstance(before.config, TrainerConfig) or before.adopted:
        return
    if node.inputs.get("tokenizer") != before.inputs.get("tokenizer"):
        message = f"expected the tokenizer of {first}, on whose token ids its weights were trained"
        yield Problem("contradiction", f"{key}.inputs.tokenizer", message, "leave it out")
    if isinstance(section, PretrainConfig) and isinstance(before.config, PretrainConfig):
        for name in ("model", "objective"):
            if getattr(section, name) != getattr(before.config, name):
                message = f"expected the {name} of {first}, whose weights it continues with"
                yield Problem("contradiction", f"{key}.{name}", message, "leave it out")
        if section.batch_warmup and node.inputs.get("shards") != before.inputs.get("shards"):
            message = f"batch sizes ramp up from the beginning of the data, but {first} did not read it with a ramp-up"
            yield Problem("contradiction", f"{key}.batch_warmup", message, "set it to null")
    of = "duration"
    if isinstance(section, RlhfConfig) and isinstance(before.config, RlhfConfig):
        of = "rollouts"
        was, now = before.config.round_batches, section.round_batches
        if was != now:
            message = (
                f"expected the {was:,} batches of a round of {first}, not {now:,}: its rollouts are counted by them"
            )
            yield Problem("contradiction", key, message, "leave epochs and minibatch_answers unchanged")
    at, behind, length = continues.batches, _duration(before.config), _duration(section)
    done = at or behind
    if done is not None and length is not None and length <= done:
        message = f"expected more than the {done:,} batches that it continues from, not {length:,}"
        fix = f"{of} counts from the beginning of the first training: lengthen it"
        yield Problem("nothing_to_train", f"{key}.{of}", message, fix)
    kept = before.config.keep_state
    every = _batches(kept.every) if isinstance(kept, KeepEvery) else None
    if kept == "none":
        yield Problem("no_state", f"{before.key}.keep_state", f"{key} continues from a state of it", "set it to last")
    elif at is not None and behind is not None and at != behind and (kept == "last" or (every and at % every)):
        message = f"{first} keeps no state after {at:,} batches"
        yield Problem("no_state", f"{key}.continues.at", message, f"set {before.key}.keep_state.every to {at} batches")


def _duration(section: TrainerConfig) -> int | None:
    """Length of a training in batches, if it is given in batches and cannot end early; otherwise None."""
    if isinstance(section, RlhfConfig):
        return None if section.stop_on_divergence else section.rollouts * section.round_batches
    return _batches(section.duration)  # type: ignore[attr-defined]


def _batches(length: str) -> int | None:
    """Length in batches, if given in batches; None for other units, whose conversion needs the data."""
    duration = parse_duration(length)
    return int(duration.value) if duration.unit == "batches" else None


def _not_causal(node: Node, nodes: Graph) -> Iterator[Problem]:
    """Yield a problem for a step that needs a causal model, after pretraining with another objective."""
    first = first_model(nodes, node.id)
    if first is None or first is node or not isinstance(first.config, PretrainConfig) or first.config.continues_text():
        return
    name = node.path or node.stage.name
    if node.stage.continues_text:
        objective = f"{first.key}.objective"
        yield Problem(
            "not_causal",
            name,
            "needs a model that continues text, which pretraining with "
            f"{objective}: {first.config.objective} does not give",
            f"leave {name} out, or set {objective} to causal or prefix",
        )


def _bad_suites(config: PipelineConfig) -> Iterator[Problem]:
    """Problems of the suites. They are small files, so their problems are reported before anything runs."""
    for section in config.all_of(ValidateConfig):
        for kind in DATA_KINDS:
            try:
                section.read(kind)
            except StageError as error:
                yield from error.problems


def _unequal_heldout(built: list[Node]) -> Iterator[Problem]:
    """Held-out pairs must come from text that the base model never saw."""
    shares = {node.key: share for node in built if (share := getattr(node.config, "heldout_share", None)) is not None}
    if len(set(shares.values())) > 1:
        listed = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        yield Problem(
            "contradiction",
            f"{next(iter(shares))}.heldout_share",
            f"expected one share for all of {', '.join(shares)}, or held-out pairs leak into training: {listed}",
        )


def _nothing_to_clear(config: PipelineConfig) -> Iterator[Problem]:
    section, filled = config.of(BenchmarkTextConfig), items_to_clear(config)
    if section is None or filled is None or "benchmark_text" in config.adopted:
        return
    if not (filled.tasks or filled.prompts or filled.pairs):
        yield Problem(
            "missing_section",
            "decontaminate",
            "needs the test items: expected a benchmarks or safety section, or benchmark_text.tasks",
        )
