"""The run-time type checker of the test run: jaxtyping with beartype, which looks at each
combination of shapes once.

Whether a call breaks its annotations depends on the types, dtypes and shapes of its arguments and
of its result alone. So a call is not checked if one of the same types and shapes passed before.
Checking every call took a quarter of the tests' time.
"""

import ast
import functools
import inspect
import sys
import threading
import types
import typing
import zlib
from collections.abc import Callable, Collection, Hashable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Annotated, Any, Literal

from beartype import beartype
from jaxtyping import jaxtyped

LOOKS = 4
"""How often a new structure is checked: beartype looks at one item of a list, a random one each
time."""

_CHECKS: "dict[tuple[str, types.CodeType], _Checks]" = {}
"""By the module and the code of a function: one that is defined inside another is made anew by each
call of that."""


def install(modules: Collection[str]) -> None:
    """Check the annotations that name shapes in these modules, which are imported later: of
    functions, nested ones too, and of dataclasses."""
    sys.meta_path.insert(0, _Finder(frozenset(modules)))


def checked(thing: Any) -> Any:
    """A function that checks its annotations, or a class that checks its fields if it is a
    dataclass."""
    if inspect.isclass(thing) or any(
        "{" in hint or "Literal" in hint for hint in map(repr, thing.__annotations__.values())
    ):
        return jaxtyped(thing, typechecker=beartyped)  # such an annotation depends on values
    place = thing.__module__, thing.__code__
    checks = _CHECKS.get(place) or _CHECKS.setdefault(place, _Checks(thing))
    passed, looks, named = checks.passed, checks.looks, checks.named

    @functools.wraps(thing)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        given = (
            *[look(value) for look, value in zip(looks, args, strict=False)],
            *[structure(value) for value in args[len(looks) :]],
            *[(name, named.get(name, structure)(value)) for name, value in kwargs.items()],
        )
        if given not in passed:
            checks.look(checks.arguments, args, kwargs)
            passed.add(given)
        out = thing(*args, **kwargs)
        if checks.result is not None and (whole := (given, checks.result(out))) not in passed:
            checks.look(checks.whole, args, kwargs, out)
            passed.add(whole)
        return out

    return with_checks


def structure(value: Any) -> Hashable:
    """Types, dtypes and shapes of a value and of what it consists of."""
    kind = type(value)
    if kind in _PLAIN:
        return kind
    if issubclass(kind, tuple | list):
        return kind, tuple([structure(item) for item in value])
    if issubclass(kind, dict):
        return kind, tuple([(type(name), structure(item)) for name, item in value.items()])
    return kind, getattr(value, "dtype", None), getattr(value, "shape", None)


_PLAIN = (str, int, float, bool, type(None))


class _Checks:
    """What is known of the calls of a function: the checks themselves are made when the first call
    needs them."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.passed: set[Hashable] = set()
        signature = self._signature = inspect.signature(function)
        self.named = {
            name: _look_for(parameter.annotation)
            for name, parameter in signature.parameters.items()
        }
        self.looks = [
            self.named[name]
            for name in function.__code__.co_varnames[: function.__code__.co_argcount]
        ]
        returns = signature.return_annotation
        self.result = None if returns is inspect.Signature.empty else _look_for(returns)
        self._names = (
            function.__globals__,
            function.__name__,
            function.__qualname__,
            function.__module__,
        )

    @functools.cached_property
    def arguments(self) -> Callable[..., Any]:
        return self._with_jaxtyping(
            self._signature.replace(return_annotation=inspect.Signature.empty)
        )

    @functools.cached_property
    def whole(self) -> Callable[..., Any]:
        return self._with_jaxtyping(self._signature)

    def look(
        self, check: Callable[..., Any], args: Sequence[Any], kwargs: Any, out: Any = None
    ) -> None:
        __tracebackhide__ = True
        _MADE.out = out
        try:
            for _ in range(LOOKS):
                check(*args, **kwargs)
        finally:
            _MADE.out = None

    def _with_jaxtyping(self, signature: inspect.Signature) -> Callable[..., Any]:
        """A function that returns what was made, under this signature and in the module where the
        names of its annotations are known."""
        space, name, qualname, module = self._names
        made = types.FunctionType(_made.__code__, space | {"_MADE": _MADE}, name)
        made.__qualname__, made.__module__, made.__signature__ = qualname, module, signature  # type: ignore[attr-defined]
        return jaxtyped(made, typechecker=beartyped)


_MADE = threading.local()


def _made(*args: Any, **kwargs: Any) -> Any:
    return _MADE.out


def _look_for(hint: Any) -> Callable[[Any], Hashable]:
    """What has to be known of a value: its type, if the annotation is a class without shapes."""
    return (
        type
        if isinstance(hint, type) and not hint.__module__.startswith("jaxtyping")
        else structure
    )


def beartyped(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype(function)` for the annotations that beartype understands.

    A protocol has an instance check only as `runtime_checkable`, and from Python 3.12 on that check
    does not see the submodules of an `nn.Module`. `Self` needs the class, and jaxtyping hands over
    the bare function. Both count as Any here; mypy checks them.

    jaxtyping hands over two functions that it made from a text: one takes the arguments, and the
    other, after the call, arguments and result. In the second the result is all that is left to
    check: what the dimensions are called was settled in the first.
    """
    hints = {name: _checkable(hint) for name, hint in function.__annotations__.items()}
    takes_result = (
        function.__code__.co_filename == "<string>" and hints.get("return", Any) is not Any
    )
    function.__annotations__ = {"return": hints["return"]} if takes_result else hints
    return beartype(function)


def _checkable(hint: Any) -> Any:
    """The hint, with Any for the parts of it that cannot be checked."""
    if hint is typing.Self or (isinstance(hint, type) and getattr(hint, "_is_protocol", False)):
        return Any
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (None, Annotated, Literal, Callable):
        return hint
    parts = tuple(_checkable(argument) for argument in arguments)
    if origin in (typing.Union, types.UnionType):
        return typing.Union[parts]  # noqa: UP007 `|` does not take a tuple
    return origin[parts]


class _Finder(MetaPathFinder):
    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._modules else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    """Reads a module with a decorator at each function and class. Its bytecode is kept next to the
    plain one, by the text of this file."""

    _kept = f".checked-{zlib.crc32(Path(__file__).read_bytes()):08x}.pyc"

    def get_data(self, path: str) -> bytes:
        return super().get_data(path.replace(".pyc", self._kept))

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        super().set_data(path.replace(".pyc", self._kept), data, _mode=_mode)

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> types.CodeType:
        tree = ast.parse(data, path)
        tree = _Decorated(_names_of_shapes(tree)).visit(tree)
        place = isinstance(tree.body[0], ast.Expr)  # a docstring comes first
        tree.body[place:place] = ast.parse("import annotation_checks as _annotation_checks").body
        return compile(
            ast.fix_missing_locations(tree), path, "exec", dont_inherit=True, optimize=_optimize
        )


def _names_of_shapes(tree: ast.Module) -> frozenset[str]:
    """What a module imports from jaxtyping, and what it calls some of that."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "jaxtyping":
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            parts = {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            names.update(
                each.id for each in node.targets if isinstance(each, ast.Name) and parts & names
            )
    return frozenset(names)


class _Decorated(ast.NodeTransformer):
    """Decorates what names shapes; types alone are mypy's work, and were two thirds of the calls
    that were checked."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        given = node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        if self._is_about_shapes(
            [node.returns, *(argument.annotation for argument in arguments if argument)]
        ):
            # The innermost: others take annotations away.
            node.decorator_list.append(_decorator(node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if self._is_about_shapes(
            [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
        ):
            # The outermost: `dataclass` comes first.
            node.decorator_list.insert(0, _decorator(node))
        return self.generic_visit(node)

    def _is_about_shapes(self, annotations: Sequence[ast.expr | None]) -> bool:
        """Whether a name from jaxtyping is in one of some annotations, which may be texts."""
        parts = [part for annotation in annotations if annotation for part in ast.walk(annotation)]
        return any(
            part.id in self._names
            if isinstance(part, ast.Name)
            else isinstance(part, ast.Constant)
            and isinstance(part.value, str)
            and any(f"{name}[" in part.value for name in self._names)
            for part in parts
        )


def _decorator(node: ast.stmt) -> ast.expr:
    return ast.copy_location(ast.parse("_annotation_checks.checked", mode="eval").body, node)
