"""Renders conversations by a chat template and finds the text that counts in the loss.

A template is a jinja program. It runs in a sandbox, with the names that ``transformers`` defines
for templates. The assistant's text is *taught*: it counts in the loss. If the template marks it
with ``{% generation %}``, the marks decide. Otherwise an answer is the difference of two
renderings of the conversation's beginning::

    messages[:i] with the generation prompt   [user] hi [end] [assistant]
    messages[:i + 1]                          [user] hi [end] [assistant] yo [end]
    taught                                                               ^^^^^^^^^

This fails if a template renders an answer differently once other messages follow, or if an answer
does not continue the generation prompt (``<think>``). The conversation is then rendered twice with
two probes instead of the answer. The text that both renderings share is before and after the
answer.

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
"""Offset of the first character, and offset after the last one."""

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of the field with a message's reasoning; most templates read the first one."""
_BEGUN_TAG = re.compile(r"[<\[(#|][^\s>\])]*$")
# The probes share no first or last letter, and no template treats them specially.
_PROBES = ("Bqjx", "Wzkv")
_THIRD_PROBE = "Fhnd"
_common_start = os.path.commonprefix


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Holds a conversation and the other inputs of a template.

    Attributes:
        messages: Messages, each with a role and usually with a content.
        tools: Descriptions of functions that the assistant may call.
        documents: Texts to which answers refer.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """Holds the rendered text of a conversation.

    Attributes:
        text: Rendered text.
        spans: Taught parts of the text.
        are_marked: Whether the template itself marks these parts.
    """

    text: str
    spans: Sequence[Span]
    are_marked: bool


class ChatTemplate:
    """Renders conversations by the chat templates of a tokenizer.

    Args:
        templates: Templates by name. Conversations with tools use ``tool_use`` if there is such a
            template; all others use ``default``.
        tokens: Special tokens by their names in templates, such as ``eos_token``.
        folder: Folder of the templates, for messages.
    """

    def __init__(
        self, templates: Mapping[str, str], tokens: Mapping[str, str], folder: object
    ) -> None:
        self._templates = templates
        self._tokens = tokens
        self._folder = folder

    def write(self, conversation: Conversation) -> Written:
        """Renders a conversation and finds its taught parts.

        Raises:
            DataError: The template refuses the conversation, or leaves out an answer.
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
                f"({' '.join(str(error).split())}); correct the line or the template"
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
                f"the chat template of {self._folder} leaves out the assistant's text of "
                f"message {number + 1}; give another template, or mark the answer in it with "
                "{% generation %}"
            )
        return span


@dataclass(frozen=True, kw_only=True)
class _Around:
    """Holds the text around an answer, which does not depend on the answer.

    Attributes:
        before: Text before the answer.
        behind: Text after the answer.
    """

    before: str
    behind: str


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """Compares the text before an answer with the generation prompt.

    Attributes:
        asked: Generation prompt, empty if there is none or it is unknown.
        added: Text that the template adds between the prompt and every answer.
        opened: End of the prompt that is missing in front of an answer.
    """

    asked: str
    added: str
    opened: str


class _Renderer:
    """Renders one conversation by a template."""

    def __init__(
        self, template: str, tokens: Mapping[str, str], conversation: Conversation
    ) -> None:
        self._compiled = _compiled(template)
        self.messages = [_normalized(message) for message in conversation.messages]
        self._options = {
            **tokens,
            "tools": _clean(conversation.tools),
            "documents": _clean(conversation.documents),
        }

    def render(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        """Returns the text of messages, with the generation prompt if ``asks`` is True."""
        text = self._compiled.render(
            messages=[*messages], add_generation_prompt=asks, **self._options
        )
        return str(text)

    def render_marked(self) -> tuple[str, list[Span]]:
        """Returns the text of the conversation and the parts that the template marks."""
        marks = self._compiled.environment.marks
        blocks: list[str] = []
        with marks.collected(blocks) as spans:
            generated = self._compiled.generate(
                messages=[*self.messages], add_generation_prompt=False, **self._options
            )
            for block in generated:
                blocks.append(block)  # the offset of the next mark is the length of these blocks
        return "".join(blocks), spans

    def answer(self, number: int, text: str) -> Span | None:
        """Returns the position of an answer in the conversation's text, ``None`` if not found.

        Args:
            number: Index of the message, from 0.
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
        """Finds an answer by replacing it with two probes and comparing the renderings.

        Args:
            number: Index of the message, from 0.
            text: Text of the whole conversation.
            plain: Whether the probes are plain text, without tool calls and reasoning.
        """
        before = self.messages[:number]
        rest = self.messages[number + 1 :]
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
        # Text that the template adds after the prompt, such as an empty thought, is taught too.
        is_added = bool(prompt.added) and whole.before.endswith(prompt.added)
        start = len(whole.before) - (len(prompt.added) if is_added else 0)
        if prompt.opened and text.startswith(prompt.opened, start):
            start += len(prompt.opened)  # the prompt already contains this text
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
        """Returns the text that ends an answer, without the beginning of the next turn.

        Args:
            behind: Text after the answer in the whole conversation.
            ended: Text around the answer if the conversation ends with it.
            probes: Two messages that replace the answer.
            before: Messages before the answer.
            asked: Generation prompt, empty if it is unknown.
        """
        if behind.startswith(ended.behind):
            return ended.behind
        asking = self._around([[*before, probe] for probe in probes], asks=True)
        if asking is not None and asked and asking.behind.endswith(asked):
            mark = asking.behind[: -len(asked)]
            if behind.startswith(mark):
                return mark
        # Between two answers are the end mark and the text that the template writes before one.
        third = {"role": TAUGHT_ROLE, "content": _THIRD_PROBE}
        twice = self._around([[*before, probe, third] for probe in probes])
        so_far = self._try(before)
        if twice is not None and so_far is not None and ended.before.startswith(so_far):
            head = ended.before[len(so_far) :]
            between = twice.behind.partition(_THIRD_PROBE)[0]
            mark = between.removesuffix(head)
            if head and between.endswith(head) and behind.startswith(mark):
                return mark
        # If both texts begin a tag and continue it differently, that tag is no end mark.
        return _BEGUN_TAG.sub("", _common_start([behind, ended.behind]))

    def _prompt(self, before: Sequence[Message], rendered: str) -> _Prompt:
        """Finds the part of the generation prompt that an answer continues.

        Args:
            before: Messages before the answer.
            rendered: Text of these messages, and of the beginning of an answer.
        """
        prompt = self._try(before, asks=True)
        so_far = self._try(before)
        if prompt is None:
            return _Prompt(asked="", added="", opened="")
        if so_far is None or not prompt.startswith(so_far):
            agreed = len(_common_start([rendered, prompt]))
            return _Prompt(asked="", added=rendered[agreed:], opened=prompt[agreed:])
        asked = prompt[len(so_far) :]
        tail = rendered[len(_common_start([rendered, so_far])) :]
        searched = asked.lstrip()  # without white space that separates turns
        if not searched:
            return _Prompt(asked=asked, added=tail, opened="")
        for length in range(len(searched), 0, -1):
            if (start := tail.rfind(searched[:length])) >= 0:
                rest = tail[start + length :]
                return _Prompt(asked=asked, added=rest, opened=searched[length:])
        return _Prompt(asked=asked, added="", opened="")

    def _around(
        self, conversations: Sequence[Sequence[Message]], *, asks: bool = False
    ) -> _Around | None:
        """Returns the common beginning and end of two conversations, ``None`` without them."""
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


def _normalized(message: Message) -> dict[str, Any]:
    """Returns a message in the form that ``transformers`` passes to a template.

    Keys without a value are left out. Reasoning gets the names that templates read.
    """
    fields: dict[str, Any] = _clean(
        {key: value for key, value in message.items() if value is not None}
    )
    reasoning = next((fields[key] for key in REASONING if key in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _clean(value: Any) -> Any:
    """Replaces lone surrogates in nested data, because UTF-8 cannot encode them."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def without_surrogates(text: str) -> str:
    """Joins surrogate pairs and replaces lone surrogates, which JSON allows but UTF-8 does not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _refusals() -> tuple[type[Exception], ...]:
    """Returns the exceptions by which a template refuses a conversation."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class _Marks:
    """Collects the positions of a template's marked blocks in the rendered text."""

    def __init__(self) -> None:
        self._blocks: list[str] | None = None
        self._spans: list[Span] = []

    @contextmanager
    def collected(self, blocks: list[str]) -> Iterator[list[Span]]:
        """Collects the spans of marked blocks during a rendering.

        Args:
            blocks: Parts of the text rendered so far. The caller must append each part as soon as
                it is rendered.
        """
        self._blocks = blocks
        self._spans = []
        try:
            yield self._spans
        finally:
            self._blocks = None

    def mark(self, caller: Callable[[], str]) -> str:
        """Returns the text of a marked block and records its span."""
        text = caller()
        if self._blocks is not None:
            start = sum(map(len, self._blocks))
            self._spans.append((start, start + len(text)))
        return text


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """Compiles a chat template for the sandbox, with the names that ``transformers`` defines."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Parses ``{% generation %}`` ... ``{% endgeneration %}``."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it without ClassVar

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marked = nodes.CallBlock(self.call_method("mark"), [], [], body)
            return marked.set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            """Returns the text of a marked block and records its span."""
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
