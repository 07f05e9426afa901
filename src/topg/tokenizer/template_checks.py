"""What each operator, filter, test and method may cost, checked before it runs.

Parameters of filters are looked at by name, whatever the order a template wrote them in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

from topg.tokenizer.template_limits import LimitError, RenderLimits

MAX_WIDTH = 10_000  # of padding and formats, in characters
MAX_FORMAT = 10_000
MAX_INT_BITS = 65_536
MAX_NUMBER_TEXT = 4_300  # characters of a text read as a number; Python's own limit for decimal digits
MAX_ROUND_DIGITS = 100
MAX_ATTRIBUTE = 1_000  # characters of a path such as "function.name"
MAX_SEARCH = 100_000_000  # steps of the methods that compare every place of a text with every character looked for
ESCAPED_CHARS = 5  # the longest escape of one character: `&amp;`
QUOTED_CHARS = 12  # `%F0%9F%98%80`
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # what `str.splitlines` cuts at

Arguments = Mapping[str, Any]
Check = Callable[[RenderLimits, Any, Arguments], None]

TEXT_METHODS = frozenset({
    "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "format", "index", "isalnum",
    "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace",
    "istitle", "isupper", "join", "ljust", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace",
    "rfind", "rindex", "rjust", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
    "swapcase", "title", "upper", "zfill",
})  # fmt: skip
OTHER_METHODS = {
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"count", "index", "copy"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset({"bit_length", "is_integer"}),
    float: frozenset({"is_integer"}),
}


def is_iterator(value: Any) -> bool:
    """Whether looking at the items of `value` uses it up."""
    return isinstance(value, Iterator)


def check_operator(limits: RenderLimits, operator: str, left: Any, right: Any) -> None:
    """Refuse an arithmetic operator whose result would be too large."""
    if operator == "%" and isinstance(left, str):
        check_format(limits, left, right)
    elif operator == "*" and not _both_numbers(left, right):
        sequence, count = (right, left) if isinstance(left, int) else (left, right)
        limits.require(limits.measure(sequence) * count if isinstance(count, int) else 0)
    elif operator == "+" and not _both_numbers(left, right):
        limits.require(limits.measure(left) + limits.measure(right))
    elif isinstance(left, int) and isinstance(right, int):
        _check_int(operator, left, right)
    limits.tick()


def check_filter(limits: RenderLimits, name: str, value: Any, arguments: Arguments) -> None:
    """Refuse a filter that would cost too much.  `arguments` are by the names of its parameters, with defaults."""
    limits.tick()
    for word in ("attribute", "args", "kwargs"):
        _check_attributes(arguments.get(word))
    check = _FILTER_CHECKS.get(name)
    if check is not None:
        check(limits, value, arguments)


def check_test(limits: RenderLimits, name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Refuse a test that would cost too much: some divide, and `%` formats texts."""
    if name in ("odd", "even"):
        check_operator(limits, "%", value, 2)
    elif name == "divisibleby":
        check_operator(limits, "%", value, *args[:1])
    elif name in ("lower", "upper"):
        limits.measure(value)
    limits.tick()


def check_method(limits: RenderLimits, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse methods of built-in values outside the lists above, and those whose results would be too large."""
    limits.tick()
    if not hasattr(function, "__self__"):
        function = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, type):
        raise SecurityError(f"{owner.__name__}.{name} is not available to chat templates")
    if isinstance(owner, str):
        _check_text_method(limits, owner, name, args, kwargs)
    for kind, allowed in OTHER_METHODS.items():
        if isinstance(owner, kind) and name not in allowed:
            raise SecurityError(f"{kind.__name__}.{name} is not available to chat templates")


def check_format(limits: RenderLimits, pattern: str, values: Any) -> None:
    """Refuse a format whose widths or values would give too long a text."""
    if len(pattern) > MAX_FORMAT or re.search(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{", pattern):
        raise LimitError(f"it uses a format longer than {MAX_FORMAT} characters, or one with wide or computed widths")
    widths = sum(int(digits) for digits in re.findall(r"\d+", pattern))
    limits.require(len(pattern) * max(1, limits.measure(values)) + widths)


def _both_numbers(left: Any, right: Any) -> bool:
    return isinstance(left, int | float) and isinstance(right, int | float)


def _check_int(operator: str, left: int, right: int) -> None:
    """All operands count: dividing takes time with the square of their length."""
    bits = {"**": left.bit_length() * abs(right), "*": left.bit_length() + right.bit_length()}
    if max(left.bit_length(), right.bit_length(), bits.get(operator, 0)) > MAX_INT_BITS:
        raise LimitError(f"it computes with numbers of more than {MAX_INT_BITS} bits")


def _check_attributes(value: Any) -> None:
    """Paths of attributes are followed step by step, without a look at the clock."""
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
    if any(isinstance(path, str) and len(path) > MAX_ATTRIBUTE for path in values):
        raise LimitError(f"it names an attribute in more than {MAX_ATTRIBUTE} characters")


def _check_replace(limits: RenderLimits, text: str, old: str, new: str) -> None:
    limits.require(len(text) + text.count(old) * len(new))


def _check_width(*widths: Any) -> None:
    if any(isinstance(width, int) and abs(width) > MAX_WIDTH for width in widths):
        raise LimitError(f"it pads to more than {MAX_WIDTH} characters")


def _check_search(text: str, *wanted: Any) -> None:
    if any(isinstance(piece, str) and len(text) * len(piece) > MAX_SEARCH for piece in wanted):
        raise LimitError(f"it looks for a long text in a long text, which may take over {MAX_SEARCH} steps")


def _text(limits: RenderLimits, value: Any) -> str:
    """`value` as Jinja writes it out, measured first."""
    limits.measure(value)
    return str(value)


def _writes_out(growth: int = 1) -> Check:
    """For filters that write their value out, each character as `growth` characters at most."""

    def check(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
        limits.require(growth * limits.measure(value))

    return check


def _cuts_up(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    limits.require_items(len(_text(limits, value)))


def _filter_replace(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    old, new = (_text(limits, arguments[name]) for name in ("old", "new"))
    _check_replace(limits, _text(limits, value), old, new)


def _filter_format(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    values = [*arguments.get("args", ()), *arguments.get("kwargs", {}).values()]
    check_format(limits, _text(limits, value), values)


def _filter_indent(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    width, text = arguments["width"], _text(limits, value)
    _check_width(width)
    spaces = len(width) if isinstance(width, str) else int(width)
    lines = 1 + sum(text.count(end) for end in LINE_ENDS)
    limits.require_items(lines)
    limits.require(len(text) + (lines + 1) * spaces)


def _filter_number(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    if isinstance(value, str) and len(value) > MAX_NUMBER_TEXT:
        raise LimitError(f"it reads a number from more than {MAX_NUMBER_TEXT} characters")


def _filter_round(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    digits = arguments["precision"]
    if isinstance(digits, int | float) and abs(digits) > MAX_ROUND_DIGITS:
        raise LimitError(f"it rounds to more than {MAX_ROUND_DIGITS} digits")


def _filter_sum(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    if not isinstance(arguments["start"], int | float):
        raise LimitError("it sums what is no number")


def _filter_sort(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    """Every attribute of every item is copied, in lower case."""
    _filter_list(limits, value, arguments)
    attribute = arguments["attribute"]
    if isinstance(attribute, str):
        limits.require(limits.measure(value) * (attribute.count(",") + 1))


def _filter_list(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    """Each character of a text becomes an item."""
    if isinstance(value, str):
        limits.require_items(len(value))


def _filter_trim(limits: RenderLimits, value: Any, arguments: Arguments) -> None:
    _check_search(_text(limits, value), arguments["chars"])


_FILTER_CHECKS: Mapping[str, Check] = {
    "replace": _filter_replace,
    "format": _filter_format,
    "indent": _filter_indent,
    "int": _filter_number,
    "float": _filter_number,
    "round": _filter_round,
    "sum": _filter_sum,
    "list": _filter_list,
    "groupby": _filter_list,
    "sort": _filter_sort,
    "trim": _filter_trim,
    "title": _cuts_up,
    "wordcount": _cuts_up,
    "center": lambda limits, value, arguments: _check_width(arguments["width"]),
    "truncate": lambda limits, value, arguments: _check_width(arguments["length"]),
    "escape": _writes_out(ESCAPED_CHARS),
    "e": _writes_out(ESCAPED_CHARS),
    "urlencode": _writes_out(QUOTED_CHARS),
    **dict.fromkeys(("string", "upper", "lower", "capitalize", "safe"), _writes_out()),
}


def _check_text_method(
    limits: RenderLimits, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    if name not in TEXT_METHODS:
        raise SecurityError(f"str.{name} is not available to chat templates")
    if name == "format":
        check_format(limits, text, [*args, *kwargs.values()])
    elif name == "replace" and len(args) >= 2 and all(isinstance(piece, str) for piece in args[:2]):
        _check_replace(limits, text, args[0], args[1])
    elif name == "join" and args:
        limits.require(limits.measure(args[0]) * (1 + len(text)))
    elif name == "expandtabs":
        _check_expandtabs(limits, text, *args, *kwargs.values())
    elif name in ("center", "ljust", "rjust", "zfill"):
        _check_width(*args)
    elif name in ("split", "rsplit", "splitlines"):
        limits.require_items(_pieces(text, name, *args[:1], *(kwargs[key] for key in kwargs if key == "sep")))
    if name in ("rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip"):
        _check_search(text, *args, *kwargs.values())


def _check_expandtabs(limits: RenderLimits, text: str, tab_size: Any = 8) -> None:
    _check_width(tab_size)
    limits.require(len(text) + text.count("\t") * tab_size if isinstance(tab_size, int) else 0)


def _pieces(text: str, name: str, separator: Any = None) -> int:
    """How many pieces cutting `text` gives at most."""
    if name == "splitlines":
        return 1 + sum(text.count(end) for end in LINE_ENDS)
    if isinstance(separator, str) and separator:
        return 1 + text.count(separator)
    return 1 + len(text) // 2
