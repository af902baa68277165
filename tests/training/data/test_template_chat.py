"""Conversations by a model's own chat template: transformers' ids, and the assistant's turns learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cli.models.show_chat import command
from corpus.instructions import file_pairs
from corpus.pairs.files import Pair
from corpus.readers.config import FileInstructions
from flows.config.graph import graph
from flows.config.read import parse
from flows.planning.branches import chat_notes
from infra.errors import ConfigError, StageError
from infra.launch.config import LaunchConfig
from infra.run import Run
from tests.support.chat_templates import FAMILIES, tokenizer_in
from tests.support.open_models import save_model
from training.adopt import import_model
from training.chat.base import Chat, Conversation, chat_of
from training.chat.model_template import TemplateChat
from training.chat.shown import in_line, shown
from training.config import BaseModelConfig, PreferenceTuningConfig, SftConfig
from training.data.conversations import fitted_conversations
from training.data.preferences import fitted_pairs, fitted_rankings
from training.generation.session import answer, chat_prompt, loaded
from training.model.loss import IGNORE
from training.preference_tuning import preference_tuning
from training.serving.requests import ChatRequest
from training.sft import sft

TALK = [
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "It is five."},
    {"role": "user", "content": "Why?\n\nSay it in  two words."},
]
SYSTEM = {"role": "system", "content": "Be short."}
ENDS = {"harmony": "<|return|>", "gemma": "<end_of_turn>", "phi": "<|end|>"}
BOS = {"llama2": 2, "llama3": 1, "gemma": 1, "mistral": 1, "deepseek": 1}
WITHOUT_SYSTEM = ("gemma",)


def ids_by_transformers(tokenizer: Any, messages: list[dict[str, Any]], **values: Any) -> list[int]:
    found: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, **values)["input_ids"]
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
def test_ids_are_transformers_and_what_is_learnt_is_the_assistants(family: str, system: bool) -> None:
    if system and family in WITHOUT_SYSTEM:
        with pytest.raises(StageError, match="System role not supported"):
            chat_of(tokenizer_in(family)).ask([[SYSTEM, *TALK]])
        return
    tokenizer = tokenizer_in(family)
    chat = chat_of(tokenizer)
    assert isinstance(chat, TemplateChat)
    eos = FAMILIES[family][4]
    assert tokenizer.convert_ids_to_tokens(chat.end) == ENDS.get(family, eos)
    messages = [SYSTEM, *TALK] if system else TALK
    [prompt] = chat.ask([messages])
    assert prompt == ids_by_transformers(tokenizer, messages, add_generation_prompt=True)
    if family != "olmo":  # whose bos_token ends answers too
        assert prompt.count(tokenizer.bos_token_id) == BOS.get(family, 0), "as the template says, never doubled"
    [response] = chat.respond([prompt], ["Two and three."])
    whole = ids_by_transformers(tokenizer, [*messages, {"role": "assistant", "content": "Two and three."}])
    told = [*prompt, *response]
    assert told == whole[: len(told)]
    assert tokenizer.decode(whole[len(told) :]).strip() in ("", eos), "nothing of the answer is behind its end"
    assert response[-1] == chat.end
    assert chat.decode(response) == "Two and three." and chat.has_ended(response)
    labels = chat.response_batch([Conversation(prompt, response)], every_answer=True)["labels"][0].tolist()
    learnt = [label for label in labels if label != IGNORE]
    text = tokenizer.decode(learnt, skip_special_tokens=True)
    assert "It is five." in text and text.endswith(tokenizer.decode(response, skip_special_tokens=True))
    assert not any(word in text for word in ("plus", "Say", "short", "user", "assistant\n"))
    ends = {chat.end, *([tokenizer.convert_tokens_to_ids("<|end|>")] if family == "harmony" else [])}
    assert sum(number in ends for number in learnt) == 2


def test_thinking_is_learnt_where_the_template_shows_it() -> None:
    tokenizer = tokenizer_in("qwen3")
    chat = chat_of(tokenizer)
    [prompt] = chat.ask([TALK])
    [response] = chat.respond([prompt], ["<think>\nHm.\n</think>\n\nFive."])
    told = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nFive."}
    assert [*prompt, *response] == ids_by_transformers(tokenizer, [*TALK, told])[: len(prompt) + len(response)]
    assert tokenizer.decode(response) == "<think>\nHm.\n</think>\n\nFive.<|im_end|>"
    [plain] = chat.respond([prompt], ["Five."])
    assert tokenizer.decode(plain) == "<think>\n\n</think>\n\nFive.<|im_end|>" and chat.decode(plain) == "Five."
    quiet = TemplateChat(tokenizer, enable_thinking=False)
    [prompt] = quiet.ask([TALK])
    assert prompt == ids_by_transformers(tokenizer, TALK, add_generation_prompt=True, enable_thinking=False)
    [response] = quiet.respond([prompt], ["Five."])
    assert tokenizer.decode(response) == "Five.<|im_end|>"


def test_harmony_answers_are_what_its_last_channel_says() -> None:
    tokenizer = tokenizer_in("harmony")
    chat = chat_of(tokenizer)
    said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Five.<|return|>"
    ids = tokenizer(said, add_special_tokens=False).input_ids
    assert chat.decode(ids) == "Five." and chat.has_ended(ids)
    assert chat.ask([[{"role": "developer", "content": "Be short."}, *TALK]]) == chat.ask([[SYSTEM, *TALK]])


def test_tools_are_the_templates(tmp_path: Path) -> None:
    tokenizer = tokenizer_in("llama3")
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    chat = chat_of(tokenizer)
    messages = [*TALK, {"role": "tool", "content": "5"}]
    [prompt] = chat.ask([messages], [tools])
    assert prompt == ids_by_transformers(tokenizer, messages, tools=tools, add_generation_prompt=True)


ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [3, "<|end|>"]}}}
CALLED = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 plus 3?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "7", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "It is five."},
    {"role": "user", "content": "And 4 plus 4?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "8", "tool_call_id": "call00001"},
]
CALL_ENDS = {"harmony": "<|call|>"}


def tool_rows(folder: Path, *records: dict[str, Any]) -> list[dict[str, Any]]:
    """What the instructions stage makes of records."""
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = FileInstructions.model_validate({"kind": "files", "paths": [str(folder / "records.jsonl")]})
    pairs = list(file_pairs(source, source.places(), "instructions.read.0"))
    assert all(isinstance(pair, Pair) for pair in pairs), pairs
    return [json.loads(pair.as_line()) for pair in pairs if isinstance(pair, Pair)]


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral", "harmony"])
def test_calls_of_functions_are_learnt_and_their_results_are_not(family: str, tmp_path: Path) -> None:
    """From OpenAI's form, arguments as JSON, to labels; ids are transformers'."""
    tokenizer, answer = tokenizer_in(family), {"role": "assistant", "content": "Eight."}
    as_json = {**CALL, "function": {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}}
    called = {"role": "assistant", "content": None, "tool_calls": [as_json]}
    openai = [{**one, "content": None, "tool_calls": [as_json]} if "tool_calls" in one else one for one in CALLED]
    rows = tool_rows(
        tmp_path,
        {"messages": [*openai, answer], "tools": [ADD]},
        {"messages": [*openai[:6], called], "tools": json.dumps([ADD])},
    )
    answered, calling = sorted(rows, key=lambda row: "tool_calls" in row)
    assert answered["tools"] == calling["tools"] == [ADD] and len(answered["steps"]) == 2 and not calling.get("steps")
    chat = chat_of(tokenizer)
    fit = fitted_conversations(chat, [answered, calling], 1000, "drop")
    for talk, last, messages in ((fit.examples[0], answer, CALLED), (fit.examples[1], CALLED[2], CALLED[:6])):
        assert talk.prompt == _as_text(tokenizer, messages, tools=[ADD], add_generation_prompt=True)
        whole = _as_text(tokenizer, [*messages, last], tools=[ADD])
        assert talk.ids == whole[: len(talk.ids)]
        assert tokenizer.decode(whole[len(talk.ids) :]).strip() == ""
        labels = chat.response_batch([talk], every_answer=True)["labels"][0].tolist()
        learnt = tokenizer.decode([label for label in labels if label != IGNORE])
        calls = sum("tool_calls" in one for one in (*messages, last))
        assert learnt.count('"a": 2') == calls and "It is five." in learnt
        assert not any(word in learnt for word in ("plus", "short", "7", "8", "Add."))
    end = CALL_ENDS.get(family, tokenizer.convert_ids_to_tokens(chat.end))
    assert tokenizer.convert_ids_to_tokens(fit.examples[1].response[-1]) == end
    assert chat.has_ended(fit.examples[1].response)
    short = chat.shortened(fit.examples[0].prompt, len(fit.examples[0].prompt) - 1)
    assert "Add." in tokenizer.decode(short) and "It is five." not in tokenizer.decode(short)


def _as_text(tokenizer: Any, messages: list[dict[str, Any]], **values: Any) -> list[int]:
    """transformers' ids, but for `<|end|>` in the arguments, which no family here may read as the end of a turn."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **values)
    before, *others = text.split('"<|end|>"')
    ids: list[int] = tokenizer(before, add_special_tokens=False).input_ids
    for part in others:
        spelt = tokenizer('"<|end|>"' + part[:1], add_special_tokens=False, split_special_tokens=True).input_ids
        ids += [*spelt, *tokenizer(part[1:], add_special_tokens=False).input_ids]
    return ids


def test_tools_without_a_place_in_the_template_are_refused(tmp_path: Path, base_dir: Path) -> None:
    rows = tool_rows(tmp_path, {"messages": [*CALLED, {"role": "assistant", "content": "Eight."}], "tools": [ADD]})
    for chat in (chat_of(tokenizer_in("gemma")), Chat.load(base_dir)):
        with pytest.raises(StageError, match="does not support tools"):
            fitted_conversations(chat, rows, 1000, "drop")


def test_values_reach_the_template_in_tuning_and_chat_or_are_refused(tmp_path: Path, base_dir: Path) -> None:
    tokenizer = tokenizer_in("qwen3")
    save_model(tmp_path, tokenizer)
    values = {"enable_thinking": False}
    asked = ids_by_transformers(tokenizer, TALK, add_generation_prompt=True, **values)
    assert Chat.load(tmp_path, values).ask([TALK])[0] == asked != Chat.load(tmp_path).ask([TALK])[0]
    tokenizer = loaded(tmp_path).tokenizer
    assert chat_prompt(tokenizer, TALK, (), values)[0] == asked != chat_prompt(tokenizer, TALK)[0]
    request = ChatRequest.model_validate({"messages": TALK, "chat_template_kwargs": values})
    assert request.prompts(tokenizer)[0].ids == asked
    for wrong in ({"enable_thought": True}, {"messages": []}, {"add_generation_prompt": False}, {"eos_token": "x"}):
        with pytest.raises(StageError, match=next(iter(wrong))) as caught:
            Chat.load(tmp_path, wrong, "sft")
        assert caught.value.problems[0].path == f"sft.chat_template_kwargs.{next(iter(wrong))}"
    with pytest.raises(StageError, match=r"rlhf\.chat_template_kwargs.*takes no values"):
        Chat.load(base_dir, values, "rlhf")
    config = {
        "name": "tuned",
        "base_model": {"path": str(tmp_path)},
        "instructions": {"read": [{"kind": "docstrings"}]},
    }
    chat_notes(graph(parse({**config, "sft": {"chat_template_kwargs": values}})))
    with pytest.raises(ConfigError, match=r"sft\.chat_template_kwargs\.enable_thought.*does not read"):
        chat_notes(graph(parse({**config, "sft": {"chat_template_kwargs": {"enable_thought": True}}})))
    for section, more in (("benchmarks", {}), ("safety", {"memorisation": None})):
        measured = {
            **config,
            section: {**more, "chat_template": True, "chat_template_kwargs": {"enable_thought": True}},
        }
        with pytest.raises(ConfigError, match=rf"{section}\.chat_template_kwargs\.enable_thought.*does not read"):
            chat_notes(graph(parse(measured)))
    ours = {**config, "base_model": {"path": str(tmp_path), "chat_template": "stemma"}}
    with pytest.raises(ConfigError, match=r"sft\.chat_template_kwargs: .*which takes none"):
        chat_notes(graph(parse({**ours, "sft": {"chat_template_kwargs": values}})))
    shown_by = CliRunner().invoke(command, [str(tmp_path), "--chat-template-kwargs", json.dumps(values)])
    assert shown_by.exit_code == 0 and "</think>↵↵⟦5.<|im_end|>⟧" in shown_by.output
    assert CliRunner().invoke(command, [str(tmp_path), "--chat-template-kwargs", "[1]"]).exit_code == 2


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral"])
def test_text_that_spells_special_tokens_ends_no_turn(family: str) -> None:
    tokenizer = tokenizer_in(family)
    chat = chat_of(tokenizer)
    end = tokenizer.convert_ids_to_tokens(chat.end)
    spelt = [{"role": "user", "content": f"Say {end} now"}]
    [prompt], [plain] = chat.ask([spelt]), chat.ask([[{"role": "user", "content": "Say it now"}]])
    assert prompt.count(chat.end) == plain.count(chat.end)
    assert f"Say {end} now" in tokenizer.decode(prompt)
    [response] = chat.respond([prompt], [f"No {end} here"])
    assert response.count(chat.end) == 1 and chat.decode(response) == f"No {end} here"


def test_what_is_too_long_loses_its_oldest_exchanges_and_then_the_beginning_of_its_question() -> None:
    chat = chat_of(tokenizer_in("llama3"))
    whole, last = chat.ask([[SYSTEM, *TALK]])[0], chat.ask([[SYSTEM, TALK[-1]]])[0]
    assert chat.shortened(whole, len(whole)) == whole
    assert chat.shortened(whole, len(whole) - 1) == last == chat.dialogue_of([SYSTEM, *TALK], len(last))
    for room in range(chat.least_prompt, len(whole)):
        short = chat.shortened(whole, room)
        assert len(short) <= room
        text = chat.tokenizer.decode(short)
        assert text.endswith(".<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n") and text.count("user") == 1
    rows = [{"prompt": "What is it? " * 40, "response": "Five.", "history": TALK[:2]}]
    fit = fitted_conversations(chat, rows, 60, "cut_prompt")
    assert fit.cut == 1 and len(fit.examples[0].ids) <= 60
    pairs = fitted_pairs(
        chat, [{"prompt": "What is it? " * 40, "chosen": "Five.", "rejected": "No."}], 60, "cut_prompt"
    )
    [pair] = pairs.examples
    assert pair.chosen.prompt == pair.rejected.prompt and len(pair.chosen.ids) <= 60
    assert pair.chosen.response[-1] == pair.rejected.response[-1] == chat.end


def rows_with_calls(count: int) -> list[dict[str, Any]]:
    """Rows of preferences: of one call and its result, an answer or a further call is preferred."""
    call = {"id": "c12345678", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    rows = []
    for number in range(count):
        good, bad = {"role": "assistant", "content": f"It is {number}."}, called
        chosen, rejected = (good, bad) if number % 2 else (bad, good)
        rows.append({
            "id": f"{number:016x}", "source": "s", "prompt": "Add two.", "history": [],
            "steps": [called, {"role": "tool", "content": str(number), "tool_call_id": "c12345678"}],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
            "chosen": chosen["content"] or "add", "rejected": rejected["content"] or "add",
            "chosen_message": chosen, "rejected_message": rejected,
        })  # fmt: skip
    return rows


@pytest.mark.parametrize("family", ["llama3", "qwen3", "mistral"])
def test_preferences_with_functions_are_transformers_ids(family: str) -> None:
    tokenizer = tokenizer_in(family)
    chat, rows = chat_of(tokenizer), rows_with_calls(2)
    pairs = fitted_pairs(chat, rows, 4000, "drop").examples
    rankings = fitted_rankings(chat, rows, 4000, "drop").examples
    for row, pair, ranking in zip(rows, pairs, rankings, strict=True):
        before = [{"role": "user", "content": row["prompt"]}, *row["steps"]]
        for side, conversation in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            whole = tokenizer.apply_chat_template(
                [*before, row[f"{side}_message"]], tools=row["tools"], return_dict=False
            )
            ids = [*conversation.prompt, *conversation.response]
            assert whole[: len(ids)] == ids and not tokenizer.decode(whole[len(ids) :]).strip()
        assert pair.chosen.prompt == pair.rejected.prompt
        won, lost = (ranking.answers[place] for place in (ranking.pairs[0].better, ranking.pairs[0].worse))
        assert (won.ids, lost.ids) == (pair.chosen.ids, pair.rejected.ids)


def test_a_model_is_tuned_by_preferences_with_functions(tmp_path: Path) -> None:
    save_model(tmp_path / "base", tokenizer_in("qwen3"), positions=512)
    (tmp_path / "preferences").mkdir()
    for side in ("train", "heldout"):
        lines = [json.dumps(row) + "\n" for row in rows_with_calls(4)]
        (tmp_path / "preferences" / f"{side}.jsonl").write_text("".join(lines))
    config = PreferenceTuningConfig.model_validate(
        {"duration": "2 batches", "max_length": 400, "answer_max_tokens": 4, "heldout_limit": 4, "heldout_prompts": 4}
    )
    inputs = {"model": tmp_path / "base", "preferences": tmp_path / "preferences"}
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, trainer="native"))
    result = preference_tuning(config, inputs, tmp_path / "out", run)
    # The results of the call differ, and with them the prompts.
    assert result.figures["heldout_prompts"] == 4


def test_a_model_keeps_its_template_through_tuning_and_chat(
    tmp_path: Path, instructions_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tokenizer_in("llama3")
    save_model(tmp_path / "model", tokenizer)
    (tmp_path / "base").mkdir()
    run = Run(tmp_path / "work", LaunchConfig(device="cpu", threads=1, trainer="native"))
    result = import_model(BaseModelConfig(path=str(tmp_path / "model")), {}, tmp_path / "base", run)
    assert result.figures["added_tokens"] == 0
    template = FAMILIES["llama3"][0]
    config = SftConfig.model_validate(
        {"duration": "3 batches", "max_length": 96, "answer_max_tokens": 4, "answers_limit": 2, "heldout_limit": 4,
         "watched_prompts": 0}
    )  # fmt: skip
    inputs = {"model": tmp_path / "base", "instructions": instructions_dir}
    sft(config, inputs, tmp_path / "sft", Run(tmp_path / "sft.work", run.launch))
    for folder in ("base", "sft"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).chat_template == template
        ends = json.loads((tmp_path / folder / "generation_config.json").read_text())["eos_token_id"]
        assert tokenizer.convert_tokens_to_ids("<|eot_id|>") in ends
    pieces = answer(tmp_path / "sft", TALK, 4, 0.0)
    while True:
        try:
            next(pieces)
        except StopIteration as ended:
            assert ended.value.prompt_tokens == len(ids_by_transformers(tokenizer, TALK, add_generation_prompt=True))
            break
    shown_by = CliRunner().invoke(command, [str(tmp_path / "sft")])
    assert shown_by.exit_code == 0
    assert "⟦Hi.<|eot_id|>⟧<|start_header_id|>user<|end_header_id|>↵↵What is 2 plus 3?<|eot_id|>" in shown_by.output
    rows = [{"messages": TALK}, {"prompt": "Why?", "response": "So."}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown_by = CliRunner().invoke(command, [str(tmp_path / "sft"), str(tmp_path / "rows.jsonl"), "--json"])
    assert shown_by.exit_code == 0, (shown_by.output, shown_by.exception)
    [first, second] = json.loads(shown_by.stdout)["conversations"]
    assert [one["id"] for one in first] == ids_by_transformers(tokenizer, TALK, add_generation_prompt=True)
    assert "".join(one["text"] for one in second if one["learnt"]) == "So.<|eot_id|>"

    nodes = graph(parse({"name": "tuned", "base_model": {"path": str(tmp_path / "model")}}))
    assert "keeps its own chat template: <|begin_of_text|>" in chat_notes(nodes)["base_model"]
    own = graph(parse({"name": "tuned", "base_model": {"path": str(tmp_path / "model"), "chat_template": "stemma"}}))
    assert chat_notes(own) == {}

    (tmp_path / "ours").mkdir()
    import_model(
        BaseModelConfig(path=str(tmp_path / "model"), chat_template="stemma"), {}, tmp_path / "ours",
        Run(tmp_path / "ours.work", run.launch),
    )  # fmt: skip
    assert not isinstance(Chat.load(tmp_path / "ours"), TemplateChat)


def test_a_template_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    tokenizer = tokenizer_in("chatml")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(StageError, match="does not show answers with the role assistant") as caught:
        chat_of(tokenizer)
    assert "chat_template: stemma" in caught.value.problems[0].fix
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not show answers with the role assistant"):
        chat_notes(graph(parse({"name": "tuned", "base_model": {"path": str(tmp_path)}})))
    tokenizer.chat_template = "{{ ''.__class__.__mro__ }}{{ messages[0]['content'] }}"
    with pytest.raises(StageError, match="unsafe"):
        chat_of(tokenizer)


def test_a_template_that_takes_too_long_is_refused_before_a_run(tmp_path: Path) -> None:
    """The loop is in conversations of several turns alone, which the first renderings do not have."""
    tokenizer = tokenizer_in("chatml")
    loops = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = f"{{% if messages | length > 2 %}}{loops}{{% endif %}}{FAMILIES['chatml'][0]}"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="2 s of processor time") as caught:
        chat_notes(graph(parse({"name": "tuned", "base_model": {"path": str(tmp_path)}})))
    [problem] = caught.value.problems
    assert problem.code == "bad_template" and "chat_template: stemma" in problem.fix


def test_ours_is_shown_too(base_dir: Path) -> None:
    line = in_line(shown(Chat.load(base_dir), [*TALK[:2], {"role": "user", "content": "Why?"}]))
    assert line == "<|user|>What is 2 plus 3?<|end|><|assistant|>⟦It is five.<|end|>⟧<|user|>Why?<|end|><|assistant|>"
    assert isinstance(Chat.load(base_dir).tokenizer, PreTrainedTokenizerFast)
