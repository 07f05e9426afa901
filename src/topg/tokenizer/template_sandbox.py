"""The environment chat templates run in: Jinja2's immutable sandbox, smaller and with its costs counted.

* Of Jinja's filters only those that chat templates use exist, and only harmless methods of texts, lists and mappings
  can be called.  Attributes that lead out of the sandbox, `include`, `import` and `extends` are refused.
* Before a template is compiled, calls that count are woven into its tree (`_CountedTree`): around the items of every
  loop, concatenations, lists and mappings, slices, and at the start of macros.  See template_limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from topg.tokenizer.template_limits import (
    LimitError,
    RenderLimits,
    check_format,
    check_operator,
    check_replace,
    check_width,
)

LIMITS = "render limits"  # the key of the account in a rendering's variables; no template can write a name with a space
MAX_JSON_INDENT = 16
MAX_ROUND_DIGITS = 100

_LOOP, _CONCAT, _BUILD, _CHARGE, _TICK = "loop items", "concatenation", "container", "copy", "macro body"

JINJA_FILTERS = (
    "abs", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
    "groupby", "indent", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "truncate",
    "unique", "upper", "urlencode", "wordcount",
)  # fmt: skip

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


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates.  It keeps no state of a rendering: that travels in the rendering's variables."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=_count_output
        )
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= functions
        self.filters = {name: _counted(name, FILTERS[name]) for name in JINJA_FILTERS}
        self.filters |= {"tojson": _tojson, "join": _join}
        self.filters |= {_LOOP: _loop, _CONCAT: _concat, _BUILD: _build, _CHARGE: _charge, _TICK: _tick}

    def compile_counted(self, source: str) -> Any:
        """The template, with counting woven in; raises TemplateSyntaxError."""
        tree = _CountedTree().visit(self.parse(source))
        code = self.compile(tree, filename="<chat template>")
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in the template: checked before, counted after."""
        limits = _limits(context)
        _check_method(limits, obj, args, kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return limits.build(result) if isinstance(result, dict | list) else limits.charge(result)

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        """An attribute outside the sandbox: an error at once, not a value that prints as nothing."""
        raise SecurityError(f"attribute {attribute!r} of a {type(obj).__name__} is not available to chat templates")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operator in the template: checked before, counted after."""
        limits = _limits(context)
        check_operator(limits, operator, left, right)
        return limits.charge(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here its content is just content."""

    tags = {"generation"}  # noqa: RUF012  the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CountedTree(NodeTransformer):
    """Weaves counting into a template's tree and refuses what no chat template needs."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  the visitor's naming
        if node.recursive:
            self._refuse(node)
        chars = _literal_chars(node.body)
        self.generic_visit(node)
        node.iter = _filter(node.iter, _LOOP, nodes.Const(chars))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load"), _CONCAT)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if constant or getattr(node, "ctx", "load") != "load" else _filter(node, _BUILD)

    visit_Dict = visit_Tuple = visit_List  # noqa: N815

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, _CHARGE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Macro(self, node: Any) -> nodes.Node:  # noqa: N802
        chars = _literal_chars(node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(chars), _TICK)))
        return node  # type: ignore[no-any-return]

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815

    def _refuse(self, node: nodes.Node) -> NoReturn:
        kind = type(node).__name__.lower()
        raise TemplateSyntaxError(f"{kind} is not available to chat templates (recursive loops, files)", node.lineno)

    def visit_Include(self, node: nodes.Node) -> NoReturn:  # noqa: N802
        self._refuse(node)

    visit_Import = visit_FromImport = visit_Extends = visit_Include  # noqa: N815


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=getattr(node, "lineno", None) or 1)


def _literal_chars(body: Sequence[nodes.Node]) -> int:
    """Characters of literal text in a body, nested ones included."""
    return sum(
        len(data.data)
        for node in body
        for data in ([node] if isinstance(node, nodes.TemplateData) else node.find_all(nodes.TemplateData))
    )


def _limits(context: Context) -> RenderLimits:
    """The account of this rendering; `parent` holds what `render` was given, out of the template's reach."""
    limits: RenderLimits = context.parent[LIMITS]
    return limits


@pass_context
def _count_output(context: Context, value: Any) -> Any:
    limits = _limits(context)
    limits.tick(limits.measure(value))
    return value


@pass_context
def _loop(context: Context, items: Iterable[Any], chars: int) -> Iterator[Any]:
    return _limits(context).each(items, chars)


@pass_context
def _concat(context: Context, parts: tuple[Any, ...]) -> str:
    return str(_join(context, parts))


@pass_context
def _build(context: Context, value: Any) -> Any:
    return _limits(context).build(value)


@pass_context
def _charge(context: Context, value: Any) -> Any:
    return _limits(context).charge(value)


@pass_context
def _tick(context: Context, chars: int) -> None:
    _limits(context).tick(chars)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's `join`, measured first."""
    limits = _limits(context)
    items = list(limits.each(value, 0))
    if attribute is not None:
        items = [context.environment.getitem(item, attribute) for item in items]
    limits.require(sum(limits.measure(item) for item in items) + len(d) * len(items))
    joined: str = limits.charge(str(d).join(map(str, items)))
    return joined


@pass_context
def _tojson(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: no characters escaped for HTML, which would change what the model reads."""
    limits = _limits(context)
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= MAX_JSON_INDENT):
        raise LimitError(f"it asks for JSON indented by {indent!r}; at most {MAX_JSON_INDENT} spaces are allowed")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    limits.measure(value)
    pieces, chars = [], 0
    for piece in encoder.iterencode(value):
        pieces.append(piece)
        chars += len(piece)
        limits.require(chars)
    return str(limits.charge("".join(pieces)))


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's, checked before and counted after."""
    wants = str(getattr(function, "jinja_pass_arg", None))

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        limits = _limits(context)
        _check_filter(limits, name, value, [*args, *kwargs.values()])
        if "eval_context" in wants:
            return limits.charge(function(context.eval_ctx, value, *args, **kwargs))
        if "context" in wants:
            return limits.charge(function(context, value, *args, **kwargs))
        if "environment" in wants:
            return limits.charge(function(context.environment, value, *args, **kwargs))
        return limits.charge(function(value, *args, **kwargs))

    return counted


def _check_filter(limits: RenderLimits, name: str, value: Any, args: list[Any]) -> None:
    if name == "replace" and len(args) >= 2:
        check_replace(limits, str(value), args[0], args[1])
    elif name == "format":
        check_format(limits, str(value), args)
    elif name == "indent":
        _check_indent(limits, str(value), args)
    elif name == "round" and any(isinstance(digits, int) and abs(digits) > MAX_ROUND_DIGITS for digits in args):
        raise LimitError(f"it rounds to more than {MAX_ROUND_DIGITS} digits")
    elif name == "sum" and not all(isinstance(start, int | float | str) for start in args):
        raise LimitError("it sums what is no number")
    elif name in ("center", "truncate"):
        check_width(*args)
    elif name in ("string", "escape", "e", "urlencode", "title", "upper", "lower", "capitalize", "trim", "wordcount"):
        limits.measure(value)
    limits.tick()


def _check_indent(limits: RenderLimits, text: str, args: list[Any]) -> None:
    width = args[0] if args else 4
    check_width(width)
    spaces = len(width) if isinstance(width, str) else int(width)
    limits.require(len(text) + (text.count("\n") + 1) * spaces)


def _check_method(limits: RenderLimits, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse methods of built-in values outside the lists above, and results that would be too large."""
    limits.tick()
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str):
        _check_text_method(limits, owner, name, args, kwargs)
    for kind, allowed in OTHER_METHODS.items():
        if isinstance(owner, kind) and name not in allowed:
            raise SecurityError(f"{kind.__name__}.{name} is not available to chat templates")


def _check_text_method(
    limits: RenderLimits, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if name not in TEXT_METHODS:
        raise SecurityError(f"str.{name} is not available to chat templates")
    if name == "format":
        check_format(limits, text, [*args, *kwargs.values()])
    elif name == "replace" and len(args) >= 2:
        check_replace(limits, text, args[0], args[1])
    elif name == "join" and args:
        items = list(limits.each(args[0], 0))
        limits.require(sum(limits.measure(item) for item in items) + len(text) * len(items))
    elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        check_width(*args, *kwargs.values())
