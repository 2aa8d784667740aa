"""A model's chat template: messages into the text that the model was trained to see. The template is untrusted.

It runs in jinja's immutable sandbox with the helpers that templates written for `transformers` expect, and within
limits of source, time and output: every round of a loop and every call of a macro looks at the clock. Only plain
JSON values go in and only a text comes out. A client never supplies a template.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.frontend import limits


class TemplateFailure(ValueError):
    """A chat cannot be rendered: the template refuses the messages, or breaks a limit. The text is one line."""


class ChatTemplate:
    """A compiled template; thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > limits.TEMPLATE_CHARACTERS_MAX:
            raise TemplateFailure(
                f"the model's chat template has {len(source)} characters; "
                f"allowed are {limits.TEMPLATE_CHARACTERS_MAX}"
            )
        self._sandbox = _Sandbox()
        try:
            code = self._sandbox.compile(_with_clock(self._sandbox.parse(source)))
            self._template = jinja2.Template.from_code(self._sandbox, code, self._sandbox.make_globals(None))
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateFailure(f"the model's chat template cannot be compiled: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the next answer. `messages` are plain JSON values. Raises TemplateFailure."""
        values = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        parts: list[str] = []
        length = 0
        self._sandbox.start_clock()
        try:
            for part in self._template.generate(values):
                self._sandbox.tick()
                length += len(part)
                if length > limits.RENDERED_CHARACTERS_MAX:
                    raise TemplateFailure(
                        f"the chat template wrote over {limits.RENDERED_CHARACTERS_MAX} characters"
                    )
                parts.append(part)
        except TemplateFailure:
            raise
        except Exception as error:  # a template may fail in any way that Python code can
            raise TemplateFailure(
                f"the chat template refuses these messages: {str(error) or type(error).__name__}"
            ) from None
        return "".join(parts)


def _with_clock(tree: nodes.Template) -> nodes.Template:
    """Begin every body of a loop or macro with a look at the clock, by a node that no template text can write."""
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock), node
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    return tree


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox with transformers' helpers, where `*` and `**` cannot make huge values."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._clock = threading.local()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def start_clock(self) -> None:
        """Begin a rendering in this thread."""
        self._clock.deadline = time.monotonic() + limits.TEMPLATE_SECONDS_MAX

    def tick(self) -> str:
        """Called again and again while a template runs. Raises TemplateFailure past the limit of time."""
        if time.monotonic() > self._clock.deadline:
            raise TemplateFailure(f"the chat template ran for over {limits.TEMPLATE_SECONDS_MAX} seconds")
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an intercepted operator. Raises SecurityError for a result past the limit of the output."""
        if operator == "**":
            bound = abs(right) if isinstance(left, int | float) and isinstance(right, int | float) else 0
            if bound > 64:
                raise jinja2.exceptions.SecurityError(f"{left} ** {right} is too large for a template")
        for sized, count in ((left, right), (right, left)):
            length = len(sized) if isinstance(sized, str | list | tuple) else 0
            if isinstance(count, int) and length * count > limits.RENDERED_CHARACTERS_MAX:
                raise jinja2.exceptions.SecurityError(f"{length} items times {count} are too many")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's words for training: here the words alone."""

    tags = {"generation"}  # noqa: RUF012 (jinja's way to declare them)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands, where jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
