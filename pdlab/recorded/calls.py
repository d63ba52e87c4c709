"""A call as it is kept, and found again: whose method, and its arguments by name. Recorder and player agree here."""

import inspect
import json
import re
from collections.abc import Iterable
from typing import Any

from pdlab.trace.answer import Answer
from pdlab.trace.journey import Journey

Arguments = dict[str, Any]

# What differs from run to run, and does not make a call another one.
IGNORED = frozenset({"request_id", "transfer_id", "cache_salt", "since", "pid", "pids"})
UUID = re.compile(r"[0-9a-f]{8}(-?)[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{12}")
LEADING = ("prompt", "point", "name", "journey")  # read well without their names
SHOWN = 3  # values of a long list


def named(function: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of a call by name, as JSON has them: without defaults, and without what differs in every run."""
    signature = inspect.signature(function)
    given: Arguments = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is parameter.VAR_KEYWORD:
            given |= value
        elif value != parameter.default:
            given[name] = value
    return {name: _plain(value) for name, value in given.items() if name not in IGNORED}


def _plain(value: Any) -> Any:
    if isinstance(value, Journey | Answer):
        return {"request": value.request_id}  # of a played journey: as it was recorded
    if isinstance(value, str):
        return UUID.sub("UUID", value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if key not in IGNORED}
    if isinstance(value, list | tuple | range):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return repr(value)


def canonical(arguments: Arguments) -> str:
    """Equal for equal arguments, in whatever order they were given."""
    return json.dumps(arguments, sort_keys=True, default=repr)


def said(path: str, arguments: Arguments) -> str:
    """The call as one would type it, long values shortened."""
    words = [_short(value) if name in LEADING else f"{name}={_short(value)}" for name, value in arguments.items()]
    whose = "pdlab." if path == "up" else "" if "()" in path else "lab."
    return f"{whose}{path.replace('()', '')}({', '.join(words)})"


def _short(value: Any) -> str:
    if isinstance(value, dict) and list(value) == ["request"]:
        return str(value["request"])
    if isinstance(value, list) and len(value) > SHOWN:
        return f"[{', '.join(map(_short, value[:SHOWN]))}, … {len(value)} values]"
    if isinstance(value, str) and len(value) > 40:
        return repr(value[:39] + "…")
    return repr(value)
