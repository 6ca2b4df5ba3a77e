"""Writes conversations as a chat template does, and says which characters the model is taught.

A template is a program of jinja that runs in a sandbox, with what ``transformers`` gives templates.
Taught is what the assistant writes. If the template marks it with ``{% generation %}``, the marks
are the answer. Otherwise an answer lies between two renderings of the conversation's beginning::

    messages[:i] with the generation prompt   [user] hi [end] [assistant]
    messages[:i + 1]                          [user] hi [end] [assistant] yo [end]
    taught                                                               ^^^^^^^^^

If a template writes an answer otherwise once others follow, or a generation prompt that an answer
does not go on from (``<think>``), its place is found by writing the conversation twice more with
other words for the answer: what stays the same is before and behind it.

Imports neither torch nor megatron-core, and jinja only when a template is compiled.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megatron.adaptive.errors import DataError

TAUGHT_ROLE = "assistant"
Message = Mapping[str, Any]
Span = tuple[int, int]
"""Offsets of a text's first character and of the one behind its last."""

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message under which its reasoning is passed, first the one that templates read."""
_BEGUN_TAG = re.compile(r"[<\[(#|][^\s>\])]*$")
# Two answers without a common first or last letter, which no template takes for anything else.
_PROBES = ("Bqjx", "Wzkv")
_THIRD_PROBE = "Fhnd"
_common_start = os.path.commonprefix


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation and what a template is given beside it.

    Attributes:
        messages: Messages, each with a role and mostly with a content.
        tools: Descriptions of functions that the assistant may call.
        documents: Texts that answers refer to.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """A conversation as a text.

    Attributes:
        text: The text.
        spans: Parts of it that are taught.
        are_marked: Whether the template marks them.
    """

    text: str
    spans: Sequence[Span]
    are_marked: bool


class ChatTemplate:
    """Chat templates of one tokenizer.

    Args:
        templates: Templates by name; ``default`` is used, with tools ``tool_use`` if there is one.
        tokens: Special tokens by the name that templates have for them, such as ``eos_token``.
        folder: Folder they are from, for messages.
    """

    def __init__(
        self, templates: Mapping[str, str], tokens: Mapping[str, str], folder: object
    ) -> None:
        self._templates, self._tokens, self._folder = templates, tokens, folder

    def write(self, conversation: Conversation) -> Written:
        """Returns the text of a conversation and what of it is taught.

        Raises:
            DataError: the template refuses the conversation, or leaves out an answer.
        """
        template = self._templates["default"]
        if conversation.tools is not None:
            template = self._templates.get("tool_use", template)
        try:
            renderer = _Renderer(template, self._tokens, conversation)
            if _MARKED.search(template):
                text, spans = renderer.render_marked()
                return Written(text=text, spans=spans, are_marked=True)
            text = renderer.render(renderer.messages)
        except _refusals() as error:
            raise DataError(
                f"the chat template of {self._folder} refuses the conversation "
                f"({' '.join(str(error).split())}); mend the line or the template"
            ) from None
        spans = [
            self._answer(renderer, number, text)
            for number, message in enumerate(renderer.messages)
            if message.get("role") == TAUGHT_ROLE
        ]
        return Written(text=text, spans=spans, are_marked=False)

    def _answer(self, renderer: _Renderer, number: int, text: str) -> Span:
        span = renderer.answer(number, text)
        says = renderer.messages[number].get("content")
        if span is None or (span[0] == span[1] and isinstance(says, str) and says.strip()):
            raise DataError(
                f"the chat template of {self._folder} leaves out what the assistant says in "
                f"message {number + 1}; give another template, or mark what is said in it with "
                "{% generation %}"
            )
        return span


@dataclass(frozen=True, kw_only=True)
class _Around:
    """Text that is the same whatever an answer says.

    Attributes:
        before: Text before the answer.
        behind: Text behind it.
    """

    before: str
    behind: str


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """Says how the text before an answer goes with a generation prompt.

    Attributes:
        asked: The generation prompt, empty if there is none or it is not known.
        own: Text that the template writes behind it before any answer.
        opened: Part of it that is not written before an answer.
    """

    asked: str
    own: str
    opened: str


class _Renderer:
    """One conversation and the template that writes it."""

    def __init__(
        self, template: str, tokens: Mapping[str, str], conversation: Conversation
    ) -> None:
        self._compiled = _compiled(template)
        self.messages = [_as_given(message) for message in conversation.messages]
        self._options = {
            **tokens,
            "tools": _clean(conversation.tools),
            "documents": _clean(conversation.documents),
        }

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Returns the text of messages, with the generation prompt if ``asks``."""
        written = self._compiled.render(
            messages=[*messages], add_generation_prompt=asks, **self._options
        )
        return str(written)

    def render_marked(self) -> tuple[str, list[Span]]:
        """Returns the text of the conversation and what the template marks in it."""
        marks = self._compiled.environment.marks
        blocks: list[str] = []
        with marks.collected(blocks) as spans:
            generated = self._compiled.generate(
                messages=[*self.messages], add_generation_prompt=False, **self._options
            )
            for block in generated:
                blocks.append(block)  # before the template goes on: marks count what is written
        return "".join(blocks), spans

    def answer(self, number: int, text: str) -> Span | None:
        """Returns where a message lies in the text of the conversation, ``None`` if nowhere.

        Args:
            number: Number of the message.
            text: Text of the whole conversation.
        """
        prompt = self._try(self.messages[:number], asks=True)
        is_last = number + 1 == len(self.messages)
        ended = text if is_last else self._try(self.messages[: number + 1])
        are_begins = ended is not None and text.startswith(ended)
        if prompt is not None and ended is not None and are_begins and ended.startswith(prompt):
            return len(prompt), len(ended)
        for plain in (True, False):
            if (span := self._probed(number, text, plain=plain)) is not None:
                return span
        return None

    def _probed(self, number: int, text: str, *, plain: bool) -> Span | None:
        """Finds an answer by what stays the same if it says something else.

        Args:
            number: Number of the message.
            text: Text of the whole conversation.
            plain: Whether the other answers are text alone, without calls and thoughts.
        """
        before, rest = self.messages[:number], self.messages[number + 1 :]
        probes: list[Message] = [
            {"role": TAUGHT_ROLE, "content": probe}
            if plain
            else {**self.messages[number], "content": probe}
            for probe in _PROBES
        ]
        whole = self._around([[*before, probe, *rest] for probe in probes])
        ended = self._around([[*before, probe] for probe in probes])
        if whole is None or ended is None:
            return None
        prompt = self._prompt(before, ended.before)
        # What the template writes of its own accord behind the prompt is taught: an empty thought.
        is_own = bool(prompt.own) and whole.before.endswith(prompt.own)
        start = len(whole.before) - (len(prompt.own) if is_own else 0)
        if prompt.opened and text.startswith(prompt.opened, start):
            start += len(prompt.opened)  # which the prompt has written before
        stop = len(text) - len(whole.behind)
        stop += len(self._end_mark(whole.behind, ended, probes, before, prompt.asked))
        is_there = text.startswith(whole.before[:start]) and text.endswith(whole.behind)
        return (start, stop) if is_there and start <= stop else None

    def _end_mark(
        self,
        behind: str,
        ended: _Around,
        probes: Sequence[Message],
        before: Sequence[Message],
        asked: str,
    ) -> str:
        """Returns what of the text behind an answer ends it, and does not begin the next turn.

        Args:
            behind: Text behind the answer in the whole conversation.
            ended: Text around it if the conversation ends with it.
            probes: Two other answers.
            before: Messages before it.
            asked: The generation prompt, empty if it is not known.
        """
        if behind.startswith(ended.behind):
            return ended.behind
        asking = self._around([[*before, probe] for probe in probes], asks=True)
        if asking is not None and asked and asking.behind.endswith(asked):
            mark = asking.behind[: -len(asked)]
            if behind.startswith(mark):
                return mark
        # Between two answers there is the mark, and what the template writes before an answer.
        third = {"role": TAUGHT_ROLE, "content": _THIRD_PROBE}
        twice = self._around([[*before, probe, third] for probe in probes])
        so_far = self._try(before)
        if twice is not None and so_far is not None and ended.before.startswith(so_far):
            head = ended.before[len(so_far) :]
            between = twice.behind.partition(_THIRD_PROBE)[0]
            mark = between.removesuffix(head)
            if head and between.endswith(head) and behind.startswith(mark):
                return mark
        # A tag that both begin and go on with otherwise belongs to neither.
        return _BEGUN_TAG.sub("", _common_start([behind, ended.behind]))

    def _prompt(self, before: Sequence[Message], written: str) -> _Prompt:
        """Returns which part of a generation prompt an answer goes on from.

        Args:
            before: Messages before the answer.
            written: Text of these and of what the template writes before any answer.
        """
        prompt, so_far = self._try(before, asks=True), self._try(before)
        if prompt is None:
            return _Prompt(asked="", own="", opened="")
        if so_far is None or not prompt.startswith(so_far):
            agreed = len(_common_start([written, prompt]))
            return _Prompt(asked="", own=written[agreed:], opened=prompt[agreed:])
        asked = prompt[len(so_far) :]
        tail = written[len(_common_start([written, so_far])) :]
        searched = asked.lstrip()  # without what parts turns
        if not searched:
            return _Prompt(asked=asked, own=tail, opened="")
        for length in range(len(searched), 0, -1):
            if (at := tail.rfind(searched[:length])) >= 0:
                return _Prompt(asked=asked, own=tail[at + length :], opened=searched[length:])
        return _Prompt(asked=asked, own="", opened="")

    def _around(
        self, conversations: Sequence[Sequence[Message]], *, asks: bool = False
    ) -> _Around | None:
        """Returns what two texts have in common before and behind an answer."""
        first, second = (self._try(messages, asks=asks) for messages in conversations)
        if first is None or second is None:
            return None
        before = len(_common_start([first, second]))
        behind = len(_common_start([first[::-1], second[::-1]]))
        if before == len(first) or before + behind > min(len(first), len(second)):
            return None
        return _Around(before=first[:before], behind=first[len(first) - behind :])

    def _try(self, messages: Sequence[Message], *, asks: bool = False) -> str | None:
        try:
            return self.render(messages, asks=asks)
        except _refusals():
            return None


def _as_given(message: Message) -> dict[str, Any]:
    """Returns a message as ``transformers`` hands it to a template.

    Keys without a value are left out, and reasoning has the name that templates read.
    """
    cleaned = _clean({key: value for key, value in message.items() if value is not None})
    given: dict[str, Any] = cleaned
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _clean(value: Any) -> Any:
    """Returns plain data without halves of characters, which JSON can hold and UTF-8 cannot."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def without_surrogates(text: str) -> str:
    """Joins surrogate pairs and replaces lone halves, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _refusals() -> tuple[type[Exception], ...]:
    """Returns what a template raises that does not take a conversation."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class _Marks:
    """Collects where a template's marked blocks lie in the text that it writes."""

    def __init__(self) -> None:
        self._blocks: list[str] | None = None
        self._spans: list[Span] = []

    @contextmanager
    def collected(self, blocks: list[str]) -> Iterator[list[Span]]:
        """Collects the spans of marked blocks.

        Args:
            blocks: Parts of the text that are written so far; the caller adds each at once.
        """
        self._blocks, self._spans = blocks, []
        try:
            yield self._spans
        finally:
            self._blocks = None

    def mark(self, caller: Callable[[], str]) -> str:
        """Writes a marked block."""
        written = caller()
        if self._blocks is not None:
            start = sum(map(len, self._blocks))
            self._spans.append((start, start + len(written)))
        return written


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """Compiles a chat template for the sandbox, with what ``transformers`` gives templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Takes ``{% generation %}`` ... ``{% endgeneration %}``."""

        tags = {"generation"}  # noqa: RUF012 as jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marked = nodes.CallBlock(self.call_method("mark"), [], [], body)
            return marked.set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            """Writes a marked block."""
            marks: _Marks = getattr(self.environment, "marks")  # noqa: B009 jinja's class lacks it
            return marks.mark(caller)

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.extend(marks=_Marks())
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": _time_of_day}
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _time_of_day(form: str) -> str:
    return datetime.now().strftime(form)
