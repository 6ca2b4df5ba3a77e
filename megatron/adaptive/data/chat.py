"""Renders conversations with a chat template, and finds the text on which the loss is computed.

A template is a jinja program. It runs in a sandbox with the names that the ``transformers`` library
defines for templates. The loss is computed only on the text of the assistant's messages (answers).
This text is called *taught*. If the template marks the taught text with ``{% generation %}``, these
marks are used. Otherwise, the conversation is rendered with and without each answer, and the
difference is the answer::

    messages[:i] with the generation prompt   [user] hi [end] [assistant]
    messages[:i + 1]                          [user] hi [end] [assistant] yo [end]
    taught                                                               ^^^^^^^^^

This method fails if a template renders an answer differently when more messages follow. It also
fails if an answer does not begin with the generation prompt, for example because the prompt ends
with ``<think>``. In these cases, the conversation is rendered twice, with two different placeholder
words (probes) instead of the answer. The beginning and the end that both renderings share are the
text before and after the answer.

This module imports neither torch nor megatron-core, and imports jinja only when a template is
compiled.
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
"""Range in a text: offset of its first character, and offset after its last character."""

_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that the message field for reasoning may have. Most templates read the first name."""
_BEGUN_TAG = re.compile(r"[<\[(#|][^\s>\])]*$")
# Placeholder words that replace an answer. Their first letters and their last letters differ. Text
# that is common to two renderings therefore never includes a part of a placeholder word.
_PROBES = ("Bqjx", "Wzkv")
_THIRD_PROBE = "Fhnd"
_common_start = os.path.commonprefix


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Conversation for a chat template, with its tools and its documents.

    Attributes:
        messages: Messages in order, each with a ``role`` and usually a ``content``.
        tools: Descriptions of functions that the assistant may call, or ``None`` without tools.
        documents: Texts to which answers may refer, or ``None`` without documents.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Written:
    """Rendered text of a conversation.

    Attributes:
        text: Whole text of the conversation, as the template renders it.
        spans: Taught parts of ``text``, on which the loss is computed.
    """

    text: str
    spans: Sequence[Span]


class ChatTemplate:
    """Renders conversations with a tokenizer's chat templates.

    Args:
        templates: Source text of each template, keyed by name. Conversations with tools use the
            template ``tool_use`` if it exists. All other conversations use ``default``.
        tokens: Text of each special token, keyed by its name in templates, such as ``eos_token``.
        folder: Folder that contains the templates, for error messages.
    """

    def __init__(
        self, templates: Mapping[str, str], tokens: Mapping[str, str], folder: object
    ) -> None:
        self._templates = templates
        self._tokens = tokens
        self._folder = folder

    def write(self, conversation: Conversation) -> Written:
        """Renders ``conversation`` and finds the ranges on which the loss is computed.

        Raises:
            DataError: If the template raises an error, or omits a message of the assistant.
        """
        template = self._templates["default"]
        if conversation.tools is not None:
            template = self._templates.get("tool_use", template)
        try:
            renderer = _Renderer(template, self._tokens, conversation)
            if _MARKED.search(template):
                text, spans = renderer.render_marked()
                return Written(text=text, spans=spans)
            text = renderer.render(renderer.messages)
        except _refusals() as error:
            raise DataError(
                f"the chat template of {self._folder} rejects the conversation "
                f"({' '.join(str(error).split())}); correct the line or the template"
            ) from None
        spans = [
            self._answer(renderer, number, text)
            for number, message in enumerate(renderer.messages)
            if message.get("role") == TAUGHT_ROLE
        ]
        return Written(text=text, spans=spans)

    def _answer(self, renderer: _Renderer, number: int, text: str) -> Span:
        span = renderer.answer(number, text)
        says = renderer.messages[number].get("content")
        if span is None or (span[0] == span[1] and isinstance(says, str) and says.strip()):
            raise DataError(
                f"the chat template of {self._folder} omits the text of message {number + 1}, "
                "which is from the assistant; use another template, or mark this text in the "
                "template with {% generation %}"
            )
        return span


@dataclass(frozen=True, kw_only=True)
class _Around:
    """Rendered text before and after an answer. It does not depend on the answer's text.

    Attributes:
        before: Rendered text from the start up to the answer.
        behind: Rendered text after the answer.
    """

    before: str
    behind: str


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """Difference between the text before an answer and the generation prompt.

    The generation prompt is the text with which a template asks the model to answer.

    Attributes:
        asked: Generation prompt, or an empty string if there is no prompt or it is unknown.
        added: Text that the template writes between the prompt and every answer.
        opened: Last part of the generation prompt, if the template omits this part before an
            answer.
    """

    asked: str
    added: str
    opened: str


class _Renderer:
    """Renders a conversation, or some of its messages, with a chat template."""

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
        """Renders ``messages``, followed by the generation prompt if ``asks`` is true."""
        text = self._compiled.render(
            messages=[*messages], add_generation_prompt=asks, **self._options
        )
        return str(text)

    def render_marked(self) -> tuple[str, list[Span]]:
        """Renders the conversation, and returns its text and the ranges that the template marks."""
        marks = self._compiled.environment.marks
        blocks: list[str] = []
        with marks.collected(blocks) as spans:
            generated = self._compiled.generate(
                messages=[*self.messages], add_generation_prompt=False, **self._options
            )
            for block in generated:
                blocks.append(block)  # mark() adds up the lengths of these blocks.
        return "".join(blocks), spans

    def answer(self, number: int, text: str) -> Span | None:
        """Returns an answer's range in the rendered text, or ``None`` if it is not found.

        Args:
            number: Index of the assistant's message in the conversation, from 0.
            text: Rendered text of the whole conversation.
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
        """Finds an answer's range by rendering two placeholder words instead of the answer.

        The beginning and the end that both renderings share are the text before and after the
        answer. Returns ``None`` if the range is not found.

        Args:
            number: Index of the assistant's message in the conversation, from 0.
            text: Rendered text of the whole conversation.
            plain: Whether the placeholder messages omit the answer's tool calls and reasoning.
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
        # Include the text that the template adds after the prompt, such as an empty <think> block,
        # because the model must also learn this text.
        is_added = bool(prompt.added) and whole.before.endswith(prompt.added)
        start = len(whole.before) - (len(prompt.added) if is_added else 0)
        if prompt.opened and text.startswith(prompt.opened, start):
            # Exclude text that the prompt already contains, because the model need not learn it.
            start += len(prompt.opened)
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
        """Returns an answer's end mark: the text from the answer to the start of the next message.

        Args:
            behind: Rendered text after the answer in the whole conversation.
            ended: Rendered text around the answer if the answer is the last message.
            probes: Two placeholder messages with different content.
            before: Messages of the conversation before the answer.
            asked: Generation prompt, or an empty string if it is unknown.
        """
        if behind.startswith(ended.behind):
            return ended.behind
        asking = self._around([[*before, probe] for probe in probes], asks=True)
        if asking is not None and asked and asking.behind.endswith(asked):
            mark = asking.behind[: -len(asked)]
            if behind.startswith(mark):
                return mark
        # Render two answers in a row. The text between them is the end mark of the first answer,
        # followed by the text that the template writes before the second answer.
        third = {"role": TAUGHT_ROLE, "content": _THIRD_PROBE}
        twice = self._around([[*before, probe, third] for probe in probes])
        so_far = self._try(before)
        if twice is not None and so_far is not None and ended.before.startswith(so_far):
            head = ended.before[len(so_far) :]
            between = twice.behind.partition(_THIRD_PROBE)[0]
            mark = between.removesuffix(head)
            if head and between.endswith(head) and behind.startswith(mark):
                return mark
        # Drop an incomplete tag at the end of the shared text. Such a tag is the common beginning
        # of two different tags, so it does not belong to the end mark.
        return _BEGUN_TAG.sub("", _common_start([behind, ended.behind]))

    def _prompt(self, before: Sequence[Message], rendered: str) -> _Prompt:
        """Compares the generation prompt with the text that the template writes before an answer.

        Args:
            before: Messages of the conversation before the answer.
            rendered: Rendered text of these messages, up to the first word of an answer.
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
        # Ignore whitespace between the earlier messages and the prompt.
        searched = asked.lstrip()
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
        """Renders two ``conversations``, and returns the beginning and end that both texts share.

        If ``asks`` is true, the texts end with a generation prompt. The result is ``None`` if a
        rendering fails, or if the shared beginning and end overlap.
        """
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
    """Returns ``message`` in the form that the ``transformers`` library passes to a template.

    Keys whose value is ``None`` are removed. Reasoning is stored under both keys that templates
    read, ``thinking`` and ``reasoning_content``.
    """
    fields: dict[str, Any] = _clean(
        {key: value for key, value in message.items() if value is not None}
    )
    reasoning = next((fields[key] for key in REASONING if key in fields), None)
    if reasoning is None:
        return fields
    return {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _clean(value: Any) -> Any:
    """Returns the nested data ``value`` without lone surrogates, which UTF-8 cannot encode."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value


def without_surrogates(text: str) -> str:
    """Returns ``text`` with surrogate pairs joined and lone surrogates replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _refusals() -> tuple[type[Exception], ...]:
    """Returns the exception types that a template may raise to reject a conversation."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class _Marks:
    """Records the ranges of rendered text that a template marks with ``{% generation %}``."""

    def __init__(self) -> None:
        self._blocks: list[str] | None = None
        self._spans: list[Span] = []

    @contextmanager
    def collected(self, blocks: list[str]) -> Iterator[list[Span]]:
        """Yields a list that collects the spans of marked blocks while the caller renders text.

        Args:
            blocks: Parts of the text rendered so far. The caller must append each part as soon as
                it is rendered, because the total length of the parts is the offset of the next
                mark.
        """
        self._blocks = blocks
        self._spans = []
        try:
            yield self._spans
        finally:
            self._blocks = None

    def mark(self, caller: Callable[[], str]) -> str:
        """Renders a marked block with ``caller``, records its span, and returns its text."""
        text = caller()
        if self._blocks is not None:
            start = sum(map(len, self._blocks))
            self._spans.append((start, start + len(text)))
        return text


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """Returns ``template``, compiled in a sandbox with the names that ``transformers`` defines."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Lets jinja parse the marks ``{% generation %}`` and ``{% endgeneration %}``."""

        tags = {"generation"}  # noqa: RUF012 - jinja declares it without ClassVar

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marked = nodes.CallBlock(self.call_method("mark"), [], [], body)
            return marked.set_lineno(line)

        def mark(self, caller: Callable[[], str]) -> str:
            """Renders a marked block with ``caller``, records its span, and returns its text."""
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
