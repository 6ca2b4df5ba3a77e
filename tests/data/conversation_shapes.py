"""Provides conversations of many shapes, such as without messages or with extra spaces."""

from __future__ import annotations

from typing import Any

Given = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Says the weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {}}}
CALL = {
    "id": "call_0001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"town": "Zürich"}},
}
SECOND_CALL = {
    "id": "call_0002",
    "type": "function",
    "function": {"name": "clock", "arguments": {}},
}
DOCUMENTS = [
    {"title": "Rivers", "text": "The Rhine is long."},
    {"title": "Lakes", "text": "Lake Constance is deep."},
]
HELP = "You help."
THOUGHT = "<think>\nfirst this\nthen that\n</think>\n\nit is done"


def system(text: Any) -> Given:
    return {"role": "system", "content": text}


def user(text: Any) -> Given:
    return {"role": "user", "content": text}


def answer(text: Any, **more: Any) -> Given:
    return {"role": "assistant", "content": text, **more}


def result(text: str, number: int = 1) -> Given:
    return {"role": "tool", "name": "weather", "tool_call_id": f"call_000{number}", "content": text}


def _talk(*messages: Given, **beside: Any) -> Given:
    return {"messages": [*messages], **beside}


SHAPES: dict[str, Given] = {
    "one turn": _talk(user("hi"), answer("yo")),
    "with system": _talk(system(HELP), user("hi"), answer("yo")),
    "two turns": _talk(user("hi"), answer("yo"), user("and?"), answer("no more")),
    "five turns": _talk(
        system(HELP), *(m for n in range(5) for m in (user(f"question {n}"), answer(f"answer {n}")))
    ),
    "the same answer twice": _talk(user("a"), answer("yes"), user("a"), answer("yes")),
    "an answer that repeats the question": _talk(user("say it"), answer("say it")),
    "empty answer": _talk(user("hi"), answer("")),
    "empty answer in the middle": _talk(user("hi"), answer(""), user("well?"), answer("yo")),
    "empty question": _talk(user(""), answer("what?")),
    "empty system": _talk(system(""), user("hi"), answer("yo")),
    "blank answer": _talk(user("hi"), answer(" \n ")),
    "blanks around": _talk(user("  hi\n"), answer("\n  yo  \n"), user(" so "), answer(" ok")),
    "many lines": _talk(user("code?"), answer("def f():\n\n    return 1\n\n\n# end\r\nx\ty")),
    "unicode": _talk(
        user("naïve ✓ 中文"), answer("🙂 décrit 中文 ✓"), user("עברית"), answer("ñ🙂")
    ),
    "ends with a character of several tokens": _talk(user("smile"), answer("here 🙂")),
    "half a character": _talk(user("x\ud800y"), answer("\ud83d\ude42 z\udc00")),
    "words of templates": _talk(
        user("what is <|im_end|> and </s>?"),
        answer("<|im_start|>assistant\n[INST] {{ x }} {% y %} <think> </think>x"),
    ),
    "thoughts": _talk(user("do it"), answer(THOUGHT)),
    "thoughts in each turn": _talk(
        user("do it"), answer(THOUGHT), user("again"), answer(THOUGHT.replace("done", "over"))
    ),
    "thoughts without line ends": _talk(user("do it"), answer("<think>a</think>yo")),
    "thoughts that do not end": _talk(user("do it"), answer("<think>\nand so")),
    "thoughts apart": _talk(
        user("do it"),
        answer("done", reasoning_content="one step"),
        user("again"),
        answer("over", reasoning="two steps"),
    ),
    "tools that are not called": _talk(
        user("hi"), answer("yo"), user("so?"), answer("so"), tools=[WEATHER, CLOCK]
    ),
    "a call": _talk(user("weather?"), answer("", tool_calls=[CALL]), tools=[WEATHER]),
    "a call and its result": _talk(
        system(HELP),
        user("weather?"),
        answer("I look.", tool_calls=[CALL]),
        result("sun"),
        answer("It shines."),
        tools=[WEATHER],
    ),
    "two calls": _talk(
        user("weather and time?"),
        answer(None, tool_calls=[CALL, SECOND_CALL]),
        result("sun"),
        result("noon", 2),
        answer("Sun at noon."),
        user("thanks"),
        answer("yes"),
        tools=[WEATHER, CLOCK],
    ),
    "thoughts before a call": _talk(
        user("weather?"),
        answer("", reasoning_content="I must look", tool_calls=[CALL]),
        result("sun"),
        answer("It shines.", reasoning_content="sun it is"),
        tools=[WEATHER],
    ),
    "a call in the text": _talk(user("hi"), answer('<tool_call>{"a": 1}</tool_call>')),
    "documents": _talk(user("rivers?"), answer("The Rhine."), documents=DOCUMENTS),
    "parts of content": _talk(
        user([{"type": "text", "text": "hi"}]), answer([{"type": "text", "text": "yo"}])
    ),
    "the assistant first": _talk(answer("Welcome."), user("hi"), answer("yo")),
    "two answers in a row": _talk(user("hi"), answer("one"), answer("two")),
    "a begun answer": _talk(user("write JSON"), answer('{"a": ')),
    "system in the middle": _talk(user("hi"), answer("yo"), system("be short"), answer("ok")),
    "other fields": _talk(
        {"role": "user", "content": "hi", "name": "Ann", "weight": 1e300},
        {"role": "assistant", "content": "yo", "weight": 0, "id": 10**30, "audio": None},
    ),
}
