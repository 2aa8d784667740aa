"""A model's chat template: messages into the text that the model was trained to see. The template is untrusted.

It runs in jinja's immutable sandbox with the helpers that templates written for `transformers` expect, and within
limits of source, time and output: every round of a loop and every call of a macro looks at the clock. Only plain
JSON values go in and only a text comes out. A client never supplies a template.
"""

from __future__ import annotations

import json
import re
import string
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
from jinja2.visitor import NodeTransformer

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
            code = self._sandbox.compile(_bounded(self._sandbox.parse(source)))
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


def _bounded(tree: nodes.Template) -> nodes.Template:
    """Begin every body of a loop or macro with a look at the clock, and let `~` ask before it joins.

    Both by a node that no template text can write.
    """
    _Joins().visit(tree)
    for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock), node
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
    return tree


class _Joins(NodeTransformer):
    """Makes every `~` a call of the sandbox; jinja lets only binary operators be intercepted."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """The call that stands for one chain of `~`."""
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined")
        return nodes.Call(joined, node.nodes, [], None, None).set_lineno(node.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox with transformers' helpers, where operators and widths cannot make huge values."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._clock = threading.local()
        self.filters["tojson"] = _tojson
        self.filters["format"] = self._format
        self.filters["center"] = _center
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
        elif operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(count, int):
                    _check_length(_length(sized) * count)
        elif operator == "+":
            _check_length(_length(left) + _length(right))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            if "*" in left:  # a width may be among the values
                values = right if isinstance(right, tuple) else (right,)
                _check_length(sum(abs(value) for value in values if isinstance(value, int)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *arguments: Any, **named: Any) -> Any:
        """Call what a template calls. Raises SecurityError for a method of a text that asks for a huge width."""
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name in ("ljust", "rjust", "center", "zfill"):
            _check_length(next((width for width in arguments if isinstance(width, int)), 0))
        return super().call(context, function, *arguments, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """What stands for a text's `format` or `format_map`. Raises SecurityError when its fields are huge."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            forms = [form for _, _, form, _ in string.Formatter().parse(value.__self__) if form]
            if any("{" in form for form in forms):
                raise jinja2.exceptions.SecurityError("a field whose width is a field is not supported")
            _check_widths(" ".join(forms))
        return wrapped

    def joined(self, *parts: Any) -> str:
        """What `~` makes. Raises SecurityError for a result past the limit of the output."""
        texts = [str(part) for part in parts]
        _check_length(sum(map(len, texts)))
        return "".join(texts)

    def _format(self, value: Any, *arguments: Any, **named: Any) -> Any:
        return self.call_binop(None, "%", str(value), named or arguments)


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's words for training: here the words alone."""

    tags = {"generation"}  # noqa: RUF012 (jinja's way to declare them)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _center(value: Any, width: int = 80) -> str:
    _check_length(width)
    return str(value).center(width)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_length(length: int) -> None:
    if length > limits.RENDERED_CHARACTERS_MAX:
        raise jinja2.exceptions.SecurityError(f"{length} characters or items are too many for a template")


def _check_widths(form: str) -> None:
    """Refuse a format with huge numbers in it: any of them may be a width or a precision."""
    _check_length(sum(int(digits[:20]) for digits in re.findall(r"\d+", form)))


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
