"""Chat templates in the forms of well-known families, written for the tests: the same tokens in the same places, as far
as ids and masks depend on them."""

# ruff: noqa: E501 - a line of a template is a line
from __future__ import annotations

from typing import Any

from tests.support.open_models import tokenizer_with

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

LLAMA2 = """{%- if messages[0]['role'] == 'system' -%}{%- set ns = namespace(s='<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n') -%}
{%- set rest = messages[1:] -%}{%- else -%}{%- set ns = namespace(s='') -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate user and assistant') }}{%- endif -%}
{%- if m['role'] == 'user' -%}{{ bos_token + '[INST] ' + ns.s + m['content'].strip() + ' [/INST]' }}{%- set ns.s = '' -%}
{%- else -%}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{%- endif -%}
{%- endfor -%}"""

LLAMA3 = """{{- bos_token -}}
{%- if tools -%}{{- '<|start_header_id|>system<|end_header_id|>\n\nTools: ' + (tools | tojson) + '<|eot_id|>' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- for c in m.tool_calls -%}{{- '{"name": "' + c.function.name + '", "parameters": ' + (c.function.arguments | tojson) + '}' -}}{%- endfor -%}
{{- '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + ('ipython' if m['role'] == 'tool' else m['role']) + '<|end_header_id|>\n\n' + (m['content'] | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}"""

QWEN25 = """{%- if messages[0]['role'] != 'system' -%}{{- '<|im_start|>system\nYou help.<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

QWEN3 = """{%- if tools -%}{{- '<|im_start|>system\n<tools>' + (tools | tojson) + '</tools><|im_end|>\n' -}}{%- endif -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m['role'] == 'tool' -%}{{- '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' -}}
{%- elif m['role'] != 'assistant' -%}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' -}}
{%- else -%}
{%- set thought = '' -%}{%- set text = m['content'] -%}
{%- if '</think>' in text -%}
{%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') -%}{%- set text = text.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last -%}{{- '<think>\n' + thought + '\n</think>\n\n' -}}{%- endif -%}
{{- text -}}
{%- for c in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}"""

GEMMA = """{{ bos_token }}
{%- for m in messages -%}
{%- if m['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

MISTRAL = """{{- bos_token -}}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m['role'] == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m['role'] == 'system' -%}{{- '[SYSTEM_PROMPT]' + m['content'] + '[/SYSTEM_PROMPT]' -}}
{%- elif m['role'] == 'user' -%}
{%- if tools and loop.index0 == ns.last -%}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST]' + m['content'] + '[/INST]' -}}
{%- elif m['role'] == 'tool' -%}{{- '[TOOL_RESULTS]' + m['content'] + '[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls -%}{{- '[TOOL_CALLS]' -}}
{%- for c in m.tool_calls -%}{{- c.function.name + (c.function.arguments | tojson) -}}{%- endfor -%}{{- eos_token -}}
{%- else -%}{{- m['content'] + eos_token -}}{%- endif -%}
{%- endfor -%}"""

PHI = """{%- for m in messages -%}
{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\n' }}{%- else -%}{{ eos_token }}{%- endif -%}"""

OLMO = """{{- bos_token -}}
{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}{{- '<|assistant|>\n' + m['content'] + eos_token + ('' if loop.last else '\n') -}}
{%- else -%}{{- '<|' + m['role'] + '|>\n' + m['content'] + '\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"""

HARMONY = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' -}}
{%- if tools -%}{{- '<|start|>developer<|message|># Tools\n\n' + (tools | tojson) + '<|end|>' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m['role'] in ('developer', 'system') -%}{{- '<|start|>developer<|message|># Instructions\n\n' + m['content'] + '<|end|>' -}}
{%- elif m['role'] == 'user' -%}{{- '<|start|>user<|message|>' + m['content'] + '<|end|>' -}}
{%- elif m['role'] == 'tool' -%}{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + m['content'] + '<|end|>' -}}
{%- elif m.tool_calls -%}
{%- if m['content'] and m['thinking'] -%}{{- raise_exception('Cannot pass both content and thinking') -}}{%- endif -%}
{%- set thought = m['content'] or m['thinking'] -%}
{%- if thought -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' -}}{%- endif -%}
{%- for c in m.tool_calls -%}{{- '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' + (c.function.arguments | tojson) + '<|call|>' -}}{%- endfor -%}
{%- else -%}
{%- if loop.last and not add_generation_prompt -%}
{%- if m['thinking'] -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m['thinking'] + '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|return|>' -}}
{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' -}}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

DEEPSEEK = """{{- bos_token -}}
{%- for m in messages -%}
{%- if m['role'] == 'system' -%}{{- m['content'] -}}
{%- elif m['role'] == 'user' -%}{{- '<|User|>' + m['content'] -}}
{%- else -%}{{- '<|Assistant|>' + (m['content'].split('</think>')[-1]) + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|Assistant|>' -}}{%- endif -%}"""

SMOLLM3 = """{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}{{- '<|im_start|>assistant\n' -}}{%- generation -%}{{- m['content'] + '<|im_end|>' -}}{%- endgeneration -%}{{- '\n' -}}
{%- else -%}{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

# Template, special tokens, tokens that are whole without being special, bos, eos, put in front of every text.
FAMILIES: dict[str, tuple[str, list[str], list[str], str | None, str, bool]] = {
    "chatml": (CHATML, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [], None, "<|im_end|>", False),
    "llama2": (LLAMA2, ["<unk>", "<s>", "</s>"], [], "<s>", "</s>", True),
    "llama3": (
        LLAMA3,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        [], "<|begin_of_text|>", "<|eot_id|>", True,
    ),
    "qwen2.5": (QWEN25, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [], None, "<|im_end|>", False),
    "qwen3": (QWEN3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>", "<tool_call>", "</tool_call>"], None, "<|im_end|>", False),
    "gemma": (GEMMA, ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], [], "<bos>", "<eos>", True),
    "mistral": (
        MISTRAL, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]",
                  "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [], "<s>", "</s>", True,
    ),
    "phi": (
        PHI, ["<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"], [], "<s>", "<|endoftext|>", False,
    ),
    "olmo": (OLMO, ["<|endoftext|>"], [], "<|endoftext|>", "<|endoftext|>", False),
    "harmony": (
        HARMONY,
        ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"],
        [], "<|startoftext|>", "<|return|>", False,
    ),
    "deepseek": (
        DEEPSEEK, ["<|begin▁of▁sentence|>", "<|end▁of▁sentence|>", "<|User|>", "<|Assistant|>"],
        [], "<|begin▁of▁sentence|>", "<|end▁of▁sentence|>", True,
    ),
    "smollm3": (SMOLLM3, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [], None, "<|im_end|>", False),
}  # fmt: skip


def tokenizer_in(family: str) -> Any:
    """A tokenizer with the template and the tokens of a family."""
    from tokenizers import AddedToken

    template, special, whole, bos, eos, in_front = FAMILIES[family]
    tokenizer = tokenizer_with(special, bos=bos, eos=eos, in_front=in_front)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])
    tokenizer.chat_template = template
    return tokenizer
