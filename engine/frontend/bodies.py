"""JSON bodies into typed values. A body that does not fit its type is a 400 that names the field and its value.

The types are msgspec structs beside the routes that use them: a field's annotation says what is allowed, `null`
always means the default, and a struct decides itself whether unknown fields are ignored or refused.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from engine.frontend.errors import ApiError

Body = TypeVar("Body")

_COMPLAINT = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
_SHOWN_CHARACTERS_MAX = 80


def parse_body(raw: bytes, kind: type[Body], *, strict: type[msgspec.Struct] | None = None) -> Body:
    """Read `raw` as JSON of type `kind`. Raises ApiError 400.

    `strict` is the struct within it that refuses unknown fields; its fields are listed when that happens.
    """
    value = _decoded(raw)
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _explained(str(error), value, strict) from None


def shown(value: Any) -> str:
    """A client's value inside a message: as JSON, cut to a line's length."""
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "..."


def _decoded(raw: bytes) -> Any:
    """JSON into plain values. NaN, infinities, numbers out of range and lone surrogates are not JSON here."""
    try:
        return msgspec.json.decode(raw)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None


def _explained(complaint: str, value: Any, strict: type[msgspec.Struct] | None) -> ApiError:
    """Turn msgspec's complaint about `value` into one line with the field, its value and what is allowed."""
    found = _COMPLAINT.fullmatch(complaint)
    assert found is not None, f"a complaint of another form: {complaint}"
    what, path = found["what"], found["path"] or ""
    name = path.removeprefix(".") or "the body"
    unknown = _UNKNOWN.fullmatch(what)
    if unknown is not None:
        assert strict is not None, f"{name} refuses unknown fields, so its type must be given"
        allowed = ", ".join(strict.__struct_fields__)
        message = f"{name}: unknown field `{unknown['name']}`, expected one of {allowed}"
        return ApiError(400, message, param=f"{name}.{unknown['name']}")
    for attribute, index in _STEP.findall(path):
        value = value[attribute] if attribute else value[int(index)]
    subject = f"a key of {name}" if found["key"] else f"{name} is {shown(value)}"
    return ApiError(400, f"{subject}: {what[:1].lower()}{what[1:]}", param=name)
