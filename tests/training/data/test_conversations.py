"""Conversations of several turns: what the chat template writes, the loss on the assistant's turns alone, what is too
long, several in one sequence, and an SFT of all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from corpus.tokens.chat_template import CHAT_TEMPLATE, EARLIER_TEMPLATES
from infra.errors import StageError
from infra.run import Run
from training.chat.base import Chat
from training.config import RewardModelConfig, SftConfig
from training.core.hardware import Hardware
from training.data.conversations import fitted_conversations, packed_batch, packs
from training.data.rows import by_weight
from training.model.loss import IGNORE
from training.model.models import load
from training.reward_model import reward_model
from training.sft import sft
from training.train_modules.language_model import LanguageModel

CPU = Hardware(torch.device("cpu"), bf16=False)
SYSTEM = {"role": "system", "content": "Be brief."}


def _row(turns: int, *, system: bool = False, words: int = 3) -> dict[str, Any]:
    """A conversation with so many answers."""
    said = [
        {"role": role, "content": f"{verb} the {noun} {number}" + " now" * words}
        for number in range(turns)
        for role, verb, noun in (("user", "Sort", "list"), ("assistant", "Load", "file"))
    ]
    *history, asked, answer = [*([SYSTEM] if system else []), *said]
    return {"id": f"{turns:016x}", "history": history, "prompt": asked["content"], "response": answer["content"]}


def _messages(row: dict[str, Any]) -> list[dict[str, str]]:
    last = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}]
    return [*row["history"], *last]


@pytest.fixture(scope="module")
def chat(base_dir: Path) -> Chat:
    return Chat.load(base_dir)


@pytest.mark.parametrize("row", [_row(1), _row(3), _row(2, system=True)], ids=["one turn", "three", "system"])
def test_tokens_and_what_bears_loss_are_those_of_transformers_chat_template(row: dict[str, Any], chat: Chat) -> None:
    theirs = chat.tokenizer.apply_chat_template(_messages(row), return_dict=True, return_assistant_tokens_mask=True)
    (one,) = fitted_conversations(chat, [row], 1000, "drop").examples
    assert one.ids == theirs["input_ids"]
    labels = chat.response_batch([one], every_answer=True)["labels"][0].tolist()
    expected = [id_ if mask else IGNORE for id_, mask in zip(one.ids, theirs["assistant_masks"], strict=True)]
    assert labels == [*expected[1:], IGNORE]
    last = chat.response_batch([one])["labels"][0]
    assert int((last != IGNORE).sum()) == len(one.response)


def test_a_long_conversation_loses_its_oldest_exchanges_and_never_its_answer(chat: Chat) -> None:
    row = _row(3, system=True)
    (whole,) = fitted_conversations(chat, [row], 10_000, "drop").examples
    first, *later = [place for place, id_ in enumerate(whole.prompt) if id_ == chat.user]
    assert first == 0
    for limit in range(len(whole.ids) + 2):
        found = fitted_conversations(chat, [row], limit, "cut_prompt")
        if limit < len(whole.response) + 4:
            assert (found.cut, found.dropped, found.examples) == (0, 1, [])
            continue
        (one,) = found.examples
        assert one.response == whole.response and one.response[-1] == chat.end
        assert len(one.ids) <= limit and found.cut == (limit < len(whole.ids))
        begins = next((place for place in (0, *later) if len(whole.ids) - place <= limit), None)
        if begins is not None:
            assert one.prompt == whole.prompt[begins:]
        else:
            assert (
                one.prompt[0] == chat.user and whole.prompt[len(whole.prompt) - len(one.prompt) + 1 :] == one.prompt[1:]
            )
    assert fitted_conversations(chat, [row], len(whole.ids) - 1, "drop").dropped == 1


def test_conversations_that_share_a_sequence_do_not_see_each_other(base_dir: Path, chat: Chat) -> None:
    """Loss and gradients are those of the same conversations in rows of their own."""
    rows = [_row(1 + number % 3, system=number % 2 == 0, words=number) for number in range(7)]
    talks = fitted_conversations(chat, rows, 120, "cut_prompt").examples
    shared = packs(talks, 120)
    assert len(shared) < len(talks) and sorted(map(id, talks)) == sorted(id(one) for pack in shared for one in pack)
    assert all(sum(len(one.ids) for one in pack) <= 120 for pack in shared)
    found = []
    for batch in (chat.response_batch(talks, every_answer=True), packed_batch(chat, shared)):
        model = LanguageModel(load(base_dir).eval(), CPU)
        loss = model.loss(model(batch), batch)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_a_weight_says_how_often_a_row_is_seen() -> None:
    rows = [{"id": f"{number * 2**26:08x}{0:08x}", "weight": weight} for number in range(64) for weight in (0.25, 2.5)]
    seen = by_weight([*rows, {"id": "0" * 16}])
    counts = {weight: sum(row.get("weight") == weight for row in seen) for weight in (0.25, 2.5, None)}
    assert counts == {0.25: 16, 2.5: 160, None: 1}


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dialogues")
    rows = [_row(1 + number % 3, system=number % 2 == 0, words=number % 4) for number in range(40)]
    for side, some in (("train", rows[8:]), ("heldout", rows[:8])):
        (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    return folder


@pytest.mark.parametrize("packing", [False, True])
def test_sft_learns_dialogues_in_rows_or_packed(
    packing: bool, base_dir: Path, dialogues: Path, tmp_path: Path, run: Run, journal: Any
) -> None:
    """Of a model whose tokenizer knows no system yet; what has no room is counted and told."""
    old = tmp_path / "old"
    load(base_dir).save_pretrained(old)
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    tokenizer.chat_template = EARLIER_TEMPLATES[0]
    tokenizer.save_pretrained(old)
    config = SftConfig.model_validate(
        {"duration": "12 batches", "global_batch_examples": 4, "max_length": 80, "answer_max_tokens": 8}
        | {"optimizer": {"learning_rate": 3.0e-3, "weight_decay": 0.0}, "packing": packing}
    )
    result = sft(config, {"model": old, "instructions": dialogues}, tmp_path / "out", run)
    figures = result.figures
    assert figures["heldout_loss_sft"] < 0.8 * figures["heldout_loss_base"]
    assert figures["prompts_cut"] > 0 and any("truncated at the beginning" in said for said in journal.events())
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.chat_template == CHAT_TEMPLATE
    assert exported.apply_chat_template([SYSTEM, {"role": "user", "content": "Why?"}], tokenize=False).startswith(
        "<|user|>Be brief.\n\nWhy?<|end|>"
    )
    samples = [json.loads(line) for line in (tmp_path / "out" / "aux" / "samples.jsonl").read_text().splitlines()]
    assert [len(line.get("history", ())) for line in samples[:3]] == [1, 2, 5]


def test_noise_and_label_smoothing_reach_the_training(
    dialogues: Path, base_dir: Path, tmp_path: Path, run: Run
) -> None:
    settings = {"duration": "2 batches", "global_batch_examples": 4, "max_length": 120, "answer_max_tokens": 4,
                "answers_limit": 2, "heldout_limit": 2, "watched_prompts": 0}  # fmt: skip
    weights = set()
    for keys in ({}, {"neftune_alpha": 5.0}, {"neftune_alpha": 5.0}, {"label_smoothing": 0.2}):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        inputs = {"model": base_dir, "instructions": dialogues}
        sft(SftConfig.model_validate({**settings, **keys}), inputs, out, Run(out.with_suffix(".work"), run.launch))
        weights.add((out / "model.safetensors").read_bytes())
    assert len(weights) == 3, "each key changes the weights, and noise is drawn by the seed"


def test_the_reward_model_cuts_no_answer(base_dir: Path, tmp_path: Path, run: Run, journal: Any) -> None:
    rows = [
        {"id": str(n), "prompt": "Sort the list. " * 16, "chosen": f"Load {n}.", "rejected": "Copy. " * (n % 4) + "No."}
        for n in range(12)
    ]
    rows += [{**rows[0], "id": "long", "chosen": "Load the file. " * 40}]
    for side in ("train", "heldout"):
        (tmp_path / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"duration": "1 batches", "global_batch_pairs": 4, "max_length": 48}
    inputs = {"model": base_dir, "preferences": tmp_path}
    figures = reward_model(RewardModelConfig.model_validate(settings), inputs, tmp_path / "out", run).figures
    assert figures["heldout_pairs"] == 12 and figures["pairs_dropped"] == figures["heldout_pairs_dropped"] == 1
    assert figures["prompts_cut"] == figures["heldout_prompts_cut"] == 12
    assert any("reward_model: 1 training pairs are longer than 48 tokens" in said for said in journal.events())
    with pytest.raises(StageError, match=r"reward_model\.max_length.*expected training pairs that fit 48"):
        reward_model(RewardModelConfig.model_validate(settings | {"too_long": "drop"}), inputs, tmp_path / "none", run)
