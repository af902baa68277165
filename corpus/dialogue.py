"""Dialogues in the format of Anthropic's HH-RLHF: turns that open with a blank line and "Human:" or "Assistant:"."""

from __future__ import annotations

from typing import NamedTuple

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"


class DialoguePair(NamedTuple):
    """Two answers to one dialogue.

    prompt: all before the last Assistant turn, with its "Human:" and "Assistant:" marks; a single turn goes without.
    first_turn: what the human said first.
    """

    prompt: str
    chosen: str
    rejected: str
    first_turn: str


def split_dialogues(chosen: str, rejected: str) -> DialoguePair | str:
    """Two dialogues with the same beginning as a prompt and two responses, or the reason why they are not that."""
    prompt, mark, good = chosen.rpartition(ASSISTANT)
    other_prompt, other_mark, bad = rejected.rpartition(ASSISTANT)
    if not mark or not other_mark:
        return 'expected dialogues with an "Assistant:" turn'
    if HUMAN not in prompt:
        return 'expected dialogues that open with a "Human:" turn'
    if prompt != other_prompt:
        return "chosen and rejected are not two answers to the same dialogue"
    turns = prompt.removeprefix(HUMAN)
    first_turn = turns.partition(ASSISTANT)[0].strip()
    is_single = prompt.startswith(HUMAN) and ASSISTANT not in turns and HUMAN not in turns
    return DialoguePair((turns if is_single else prompt).strip(), good.strip(), bad.strip(), first_turn)
