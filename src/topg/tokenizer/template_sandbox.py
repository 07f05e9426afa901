"""The environment chat templates run in: Jinja2's immutable sandbox, smaller and with its costs counted.

* Of Jinja's filters only those that chat templates use exist, and only harmless methods of texts, lists and mappings
  can be called.  Attributes that lead out of the sandbox, `include`, `import` and `extends` are refused.
* Before a template is compiled, calls that count are woven into its tree (`_CountedTree`): around the items of every
  loop, concatenations, lists and mappings, slices, and at the start of macros.  See template_limits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from inspect import Signature, signature, unwrap
from itertools import islice
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from topg.tokenizer.template_checks import check_filter, check_method, check_operator, check_test, is_iterator
from topg.tokenizer.template_limits import LimitError, RenderLimits

LIMITS = "render limits"  # the key of the account in a rendering's variables; no template can write a name with a space
MAX_TOKENS = 20_000  # of a template's source; what compiling costs goes with them
MAX_JSON_INDENT = 16
MAX_JSON_SEPARATOR = 16

# Filters woven into the tree.  No template can write their names, and `map` refuses them.
_LOOP, _CONCAT, _CHARGE, _OPERAND, _TICK = "loop items", "joined texts", "new value", "compared value", "macro body"

JINJA_FILTERS = (
    "abs", "capitalize", "center", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format",
    "groupby", "indent", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "truncate",
    "unique", "upper", "urlencode", "wordcount",
)  # fmt: skip

# Filters that go through their value's items: an iterator reaches them as a list, whose items were measured.
ITEM_FILTERS = frozenset({
    "groupby", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum",
    "unique", "urlencode",
})  # fmt: skip
MAPPING_FILTERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates.  It keeps no state of a rendering: that travels in the rendering's variables."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})  # what is not here is folded when compiled

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=_count_output
        )
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= functions
        self.filters = {name: _counted(name, FILTERS[name]) for name in JINJA_FILTERS}
        self.filters |= {"tojson": _tojson, "join": _join}
        self.filters |= {_LOOP: _loop, _CONCAT: _concat, _CHARGE: _charge, _OPERAND: _operand, _TICK: _tick}
        self.tests = {name: _counted_test(name, test) for name, test in TESTS.items()}  # type: ignore[arg-type]

    def compile_counted(self, source: str) -> Any:
        """The template, with counting woven in; raises TemplateSyntaxError."""
        if sum(1 for _ in islice(self.lex(source), MAX_TOKENS + 1)) > MAX_TOKENS:
            raise TemplateSyntaxError(f"it has more than {MAX_TOKENS} tokens, which is the limit", 1)
        tree = _CountedTree().visit(self.parse(source))
        code = self.compile(tree, filename="<chat template>")
        return self.template_class.from_code(self, code, self.make_globals(None), None)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A call in the template: checked before, counted after."""
        limits = _limits(context)
        if not isinstance(obj, Macro):  # what is not the template's own may go through an iterator's items at once
            args = tuple(_items(limits, value) for value in args)
            kwargs = {name: _items(limits, value) for name, value in kwargs.items()}
        check_method(limits, obj, args, kwargs)
        return limits.charge(super().call(context, obj, *args, **kwargs))

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

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, _OPERAND)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, _OPERAND)
        return node

    def visit_List(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        constant = all(isinstance(child, nodes.Const) for child in node.iter_child_nodes())
        return node if constant or getattr(node, "ctx", "load") != "load" else _filter(node, _CHARGE)

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
        raise TemplateSyntaxError(
            f"{kind} is not available to chat templates (recursive loops, files, escaping)", node.lineno
        )

    def visit_Include(self, node: nodes.Node) -> NoReturn:  # noqa: N802
        self._refuse(node)

    visit_Import = visit_FromImport = visit_Extends = visit_Include  # noqa: N815
    visit_EvalContextModifier = visit_ScopedEvalContextModifier = visit_Include  # noqa: N815  `{% autoescape %}`


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
def _charge(context: Context, value: Any) -> Any:
    return _limits(context).charge(value)


@pass_context
def _operand(context: Context, value: Any) -> Any:
    """An operand of a comparison; `x in iterator` compares with every item."""
    return _compared(_limits(context), value)


@pass_context
def _tick(context: Context, chars: int) -> None:
    _limits(context).tick(chars)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's `join`, measured first."""
    limits = _limits(context)
    check_filter(limits, "join", value, {"attribute": attribute})
    items = map(make_attrgetter(context.environment, attribute), value) if attribute is not None else value
    limits.measure(d)
    separator = str(d)
    joined: str = limits.charge(separator.join(map(str, limits.listed(items, len(separator)))))
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
        raise LimitError(f"it asks for JSON indented by {indent!r:.40}; at most {MAX_JSON_INDENT} spaces are allowed")
    if separators is not None and not all(len(separator) <= MAX_JSON_SEPARATOR for separator in separators):
        raise LimitError(f"it separates JSON by more than {MAX_JSON_SEPARATOR} characters")
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
    function = unwrap(function)  # without the choice of an asynchronous version
    parameters, first = signature(function), _first_argument(function)
    defaults = {key: item.default for key, item in parameters.parameters.items() if item.default is not item.empty}

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        limits = _limits(context)
        if name in ITEM_FILTERS:
            value = _items(limits, value)
        if name in MAPPING_FILTERS:
            _refuse_own_filters(args)
        given = (value, *args) if first is None else (first(context), value, *args)
        check_filter(limits, name, value, _bound(parameters, given, kwargs) if args or kwargs else defaults)
        return limits.charge(function(*given, **kwargs))

    return counted


def _bound(parameters: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What every parameter gets, defaults included; raises TypeError as the call would."""
    arguments = parameters.bind(*args, **kwargs)
    arguments.apply_defaults()
    return dict(arguments.arguments)


def _counted_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A test of Jinja's (`x is even`), checked before."""
    first = _first_argument(function)

    @pass_context
    def counted(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        limits = _limits(context)
        check_test(limits, name, value, (*args, *kwargs.values()))  # no test takes more than one argument
        args = tuple(_compared(limits, other) for other in args)
        given = (value, *args) if first is None else (first(context), value, *args)
        return function(*given, **kwargs)

    return counted


def _first_argument(function: Callable[..., Any]) -> Callable[[Context], Any] | None:
    """What Jinja hands to a filter or test before the value, if anything."""
    wanted = str(getattr(function, "jinja_pass_arg", None))
    if "eval_context" in wanted:
        return lambda context: context.eval_ctx
    if "environment" in wanted:
        return lambda context: context.environment
    return (lambda context: context) if "context" in wanted else None


def _refuse_own_filters(args: tuple[Any, ...]) -> None:
    """`map('name')` calls any filter of the environment; those woven into the tree are no template's to call."""
    for name in args:
        if name in (_LOOP, _CONCAT, _CHARGE, _OPERAND, _TICK):
            raise SecurityError(f"filter {name!r} is not available to chat templates")


def _items(limits: RenderLimits, value: Any) -> Any:
    """`value`, an iterator as a list of its measured items."""
    return limits.listed(value) if is_iterator(value) else value


def _compared(limits: RenderLimits, value: Any) -> Any:
    """`value`, an iterator with its items counted as they come."""
    limits.tick()
    return limits.each(value) if is_iterator(value) else value
