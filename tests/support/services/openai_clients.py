"""OpenAI's, LangChain's and LiteLLM's clients against a server, in an environment that has them.

    python openai_clients.py URL MODEL MODEL_WITH_CALLS

Imports nothing of this project. Writes the names of the clients that are installed and were tried,
and raises at the first surprise.
"""

import asyncio
import importlib
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
URL, MODEL, CALLS = sys.argv[1:] if len(sys.argv) == 4 else ("", "", "")
QUESTION = [{"role": "user", "content": "the weather?"}]
LONG = [{"role": "user", "content": "long " * 300}]
FUNCTIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "time")
]
CITY = '{"city": "Rome"}'


def installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def raised(kind: type[Exception], call: Any) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def try_openai(openai: Any) -> None:
    client = openai.OpenAI(base_url=URL, api_key="x", max_retries=0)
    assert MODEL in [model.id for model in client.models.list()] and client.models.retrieve(MODEL).id == MODEL
    chat = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "temperature": 0}
    answer = client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=2)
    assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    *parts, last = client.chat.completions.create(**chat, stream=True, stream_options={"include_usage": True})
    assert parts[0].choices[0].delta.role == "assistant" and last.usage.completion_tokens <= 4
    text = client.completions.create(model=MODEL, prompt=["The cat", "A"], max_tokens=3, n=2, logprobs=1, echo=True)
    assert [choice.index for choice in text.choices] == [0, 1, 2, 3] and text.choices[0].text.startswith("The cat")
    streamed = client.completions.create(model=MODEL, prompt="The cat", max_tokens=3, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in streamed)
    called = {"model": CALLS, "messages": QUESTION, "tools": FUNCTIONS, "temperature": 0}
    (choice,) = client.chat.completions.create(**called, parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls[0].function.arguments == CITY
    (forced,) = client.chat.completions.create(**called, tool_choice="required").choices
    assert forced.message.tool_calls[0].function.name in ("weather", "time")
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["blue", "grey"]}, "warm": {"type": "boolean"}},
        "required": ["sky", "warm"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    typed = client.chat.completions.create(**chat | {"max_tokens": 100}, response_format=form)
    assert json.loads(typed.choices[0].message.content)["sky"] in ("blue", "grey")
    with client.chat.completions.stream(**called) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls[0].function.arguments == CITY

    async def at_once() -> list[Any]:
        several = openai.AsyncOpenAI(base_url=URL, api_key="x", max_retries=0)
        return await asyncio.gather(*(several.chat.completions.create(**chat) for _ in range(4)))

    assert len(asyncio.run(at_once())) == 4
    create = client.chat.completions.create
    too_long = raised(openai.BadRequestError, lambda: create(**chat | {"messages": LONG}))
    assert too_long.code == "context_length_exceeded"
    assert raised(openai.NotFoundError, lambda: create(**chat | {"model": "gpt-4o"})).code == "model_not_found"
    assert raised(openai.BadRequestError, lambda: create(**chat | {"temperature": -1})).param == "temperature"
    raised(openai.NotFoundError, lambda: client.embeddings.create(model=MODEL, input="x"))


def try_langchain(langchain: Any) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool

    options = {"base_url": URL, "api_key": "x", "max_retries": 0, "max_tokens": 4, "temperature": 0}
    model = langchain.ChatOpenAI(model=MODEL, stream_usage=True, **options)
    assert model.invoke("Why?").usage_metadata["output_tokens"] <= 4
    parts = list(model.stream([SystemMessage("Be short."), HumanMessage("Why?")]))
    assert any(part.usage_metadata for part in parts)
    assert len(model.batch(["a", "b", "c"])) == 3
    sky = {
        "title": "Sky",
        "description": "The sky.",
        "type": "object",
        "properties": {"colour": {"enum": ["blue", "grey"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    longer = langchain.ChatOpenAI(model=MODEL, **options | {"max_tokens": 90})
    assert longer.with_structured_output(sky, method="json_schema", strict=True).invoke("the weather?")["colour"]
    assert model.bind(logprobs=True, top_logprobs=2).invoke("a").response_metadata["logprobs"]["content"]
    assert langchain.OpenAI(model=MODEL, **options).invoke("The cat")

    @tool
    def weather(city: str) -> str:
        """Return the weather."""
        return "sunny"

    caller = langchain.ChatOpenAI(model=CALLS, **options | {"max_tokens": None})
    question = HumanMessage("the weather?")
    (call,) = caller.bind(tools=FUNCTIONS).invoke([question]).tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
    # The model has no room for more; that the conversation is read shows in the reason.
    turns = [question, AIMessage("", tool_calls=[call]), ToolMessage("sunny", tool_call_id=call["id"])]
    error = raised(Exception, lambda: caller.bind_tools([weather]).invoke(turns))
    assert "context length" in str(error)


def try_litellm(litellm: Any) -> None:
    options = {"api_base": URL, "api_key": "x"}
    chat = {"model": f"openai/{MODEL}", "messages": QUESTION, "max_tokens": 4, "temperature": 0, **options}
    assert litellm.completion(**chat).usage.completion_tokens <= 4
    *_, last = litellm.completion(**chat, stream=True)
    assert last.choices[0].finish_reason in ("stop", "length")
    assert len(litellm.completion(**chat, n=2, logprobs=True, top_logprobs=1).choices) == 2
    assert litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="The", max_tokens=3, **options)
    (choice,) = litellm.completion(
        model=f"openai/{CALLS}", messages=QUESTION, tools=FUNCTIONS, temperature=0, **options
    ).choices
    assert choice.message.tool_calls[0].function.arguments == CITY
    raised(litellm.NotFoundError, lambda: litellm.completion(**chat | {"model": "openai/gpt-4o"}))
    raised(litellm.ContextWindowExceededError, lambda: litellm.completion(**chat | {"messages": LONG}))


TRIED = {"openai": try_openai, "langchain_openai": try_langchain, "litellm": try_litellm}

if __name__ == "__main__":
    for package, attempt in TRIED.items():
        if module := installed(package):
            attempt(module)
            sys.stdout.write(f"{package}\n")
