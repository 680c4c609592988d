"""What models support: the masks of an architecture, read from its code, and refusals of "fa_ops".

transformers only checks that the name of an implementation is registered. A model with its own
attention code, which never calls transformers' attention interface, would misread our masks. Such a
model keeps the implementation that transformers chooses by default, and a warning names it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from transformers import PreTrainedModel

from hf_integration import call_rewrites, hooks, indexers

_METHOD = "get_correct_attn_implementation"


def install() -> None:
    """Wrap the method with which every model chooses its attention implementation. Idempotent.

    Raises RuntimeError if this transformers release has no such method.
    """
    original = hooks.original_of(getattr(PreTrainedModel, _METHOD, None))
    if original is None:
        raise RuntimeError(
            f"this transformers release has no PreTrainedModel.{_METHOD}; "
            "hf_integration supports 5.17 and later"
        )
    if getattr(original, "_fa_ops", False):
        return

    @functools.wraps(original)
    def choose(self, requested_attention, *args, **kwargs):
        if requested_attention in hooks.names:
            mask_needs(self.config)  # read now, because Dynamo cannot read them
            module = sys.modules.get(type(self).__module__)
            if not may_call_interface(type(self)):
                chosen = original(self, None, *args, **kwargs)
                warnings.warn(
                    f"{type(self).__name__} has its own attention code, which never calls "
                    f"transformers' attention interface: {chosen!r} is used instead of "
                    f"{requested_attention!r}{_remedy(module)}",
                    stacklevel=2,
                )
                return chosen
            if module is not None:
                _complete_class_tables(type(self), requested_attention)
                hooks.install_cu_seqlens(module)
                call_rewrites.install_latents(module, hooks.is_ours)
                indexers.install(module, hooks.is_ours)
            if requested_attention in hooks.FLASH_NAMES:
                return requested_attention  # transformers would ask for the package flash_attn
        return original(self, requested_attention, *args, **kwargs)

    choose._fa_ops = True
    setattr(PreTrainedModel, _METHOD, choose)


def _complete_class_tables(model: type, name: str) -> None:
    """Add our name to transformers' tables of layer classes, with SDPA's or eager's class.

    A table is a plain dict from names of implementations to classes, in the module of transformers
    that defines the class of the model or a base of it. Modules outside transformers are not read.
    """
    modules = {base.__module__ for base in model.__mro__}
    for module in modules:
        if not module.startswith("transformers.models."):
            continue
        for table in vars(sys.modules[module]).values():
            if type(table) is dict and _is_class_table(table):
                table.setdefault(name, table.get("sdpa", table["eager"]))


def _is_class_table(table: dict) -> bool:
    named = all(type(key) is str and isinstance(value, type) for key, value in table.items())
    return named and "eager" in table


def _remedy(module: ModuleType) -> str:
    """How a class outside transformers contradicts, as the end of a warning."""
    if module.__name__.startswith("transformers."):
        return ""
    return f"; a class that does call it sets {DECLARATION} = True"


# What the code of an architecture says: the masks that it supports, read once per config class, and
# whether it calls transformers' attention interface.


# Model types that need the float mask of eager attention, which their source does not show.
_NEEDS_FLOAT_MASK = {"gemma4_audio", "git"}
# Model types whose modules have is_causal = True, although without a mask they attend everything.
_NOT_CAUSAL = {"blt_global_transformer", "bridgetower", "bridgetower_text_model"}
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
DECLARATION = "_supports_attention_backend"
_FLAGS = (DECLARATION, "_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
_LAYERS_WITH_BIAS = ("compressed",)  # layer types whose code concatenates a bias to the mask


@dataclass(frozen=True)
class MaskNeeds:
    """Why an architecture needs a dense bool mask, or a float one; None: a compact mask works."""

    dense: str | None = None
    floating: str | None = None
    computes: bool = False  # the model computes with its masks, which materialises compact ones


UNKNOWN = MaskNeeds(dense="an unknown architecture")
_known: dict[type, MaskNeeds] = {}


def mask_needs(config, may_read_source: bool = True) -> MaskNeeds:
    """The mask needs of a config. Dynamo cannot trace reading source, but can trace a look-up."""
    if config is None:
        return UNKNOWN
    if may_read_source and type(config) not in _known:
        _known[type(config)] = _find(type(config))
    for layer in getattr(config, "layer_types", None) or ():
        if any(word in layer for word in _LAYERS_WITH_BIAS):
            return MaskNeeds(floating=f"layers of type {layer!r} add to their mask")
    return _known.get(type(config), UNKNOWN)


def attends_all(config) -> bool:
    """Whether the `is_causal` attributes of a model are wrong and it attends all keys."""
    return getattr(config, "model_type", "") in _NOT_CAUSAL


def _find(config_class: type) -> MaskNeeds:
    model_type = getattr(config_class, "model_type", "")
    if model_type in _NEEDS_FLOAT_MASK:
        return MaskNeeds(floating=f"{model_type} adds to its mask")
    if not config_class.__module__.startswith("transformers.models."):
        return UNKNOWN
    module = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
    if module is None:
        return UNKNOWN
    if bypasses_interface(module):
        return MaskNeeds(floating=f"{model_type} has its own attention code")
    # Compact masks give right results in all code except code that adds part of a mask to scores
    # and, in graphs, code that writes to a mask.
    try:
        kinds = {use.kind for use in uses(inspect.getsource(module))}
    except (OSError, SyntaxError):
        return UNKNOWN
    if "add" in kinds:
        return MaskNeeds(floating=f"{model_type} adds its mask to scores in its own code")
    if "write" in kinds:
        return MaskNeeds(dense=f"{model_type} writes to its mask")
    return MaskNeeds(computes=bool(kinds))


def bypasses_interface(module: ModuleType) -> bool:
    """Whether a module defines attention layers and never calls transformers' interface."""
    if hasattr(module, _INTERFACE):
        return False
    return any(
        name.endswith("Attention")
        and isinstance(value, type)
        and value.__module__ == module.__name__
        for name, value in vars(module).items()
    )


def may_call_interface(model_class: type) -> bool:
    """Whether the code of a model class may call transformers' interface.

    Outside transformers, attention may have any name and be in any module, so a sign of support is
    needed: a flag of the class, a base class that calls the interface, or the interface or a model
    of transformers in its module. Where that module defines attention layers, the class itself has
    to set `_supports_attention_backend`.
    """
    module = sys.modules.get(model_class.__module__)
    if module is None:
        return True
    is_foreign = not module.__name__.startswith("transformers.")
    if is_foreign and vars(model_class).get(DECLARATION):
        return True
    if bypasses_interface(module):
        return False
    declares = any(getattr(model_class, flag, False) for flag in _FLAGS)
    if declares or not is_foreign or _INTERFACE in vars(module):
        return True
    return any(map(_is_sign, [*model_class.__mro__, *vars(module).values()]))


def _is_sign(value: object) -> bool:
    home = sys.modules.get(value.__module__) if isinstance(value, type) else value
    if not isinstance(home, ModuleType) or home.__name__ == "transformers.modeling_utils":
        return False
    is_auto = home.__name__.startswith("transformers.models.auto.")
    return home.__name__ == "transformers" or is_auto or _INTERFACE in vars(home)


# What modeling code does with the masks that transformers' mask functions return.
#
# A mask is followed through assignments, containers, and arguments of functions, methods and
# submodules of the same file. `uses(source)` returns every use other than passing the mask on. Code
# that runs only with eager attention, or depends on the dtype of the mask, is ignored.

FACTORIES = re.compile(r"create_\w*mask\w*|_prepare_4d_\w*|\w*_mask_for_sdpa|eager_mask|sdpa_mask")
NOT_ATTENTION_MASKS = {"create_recurrent_attention_mask"}  # returns 2-D padding
METADATA = {"shape", "dtype", "device", "ndim", "dim", "size", "is_cuda", "numel"}
# Methods whose result has the same values as the mask.
SAME_VALUES = {
    "bool", "clone", "contiguous", "detach", "expand", "expand_as", "flatten", "flip", "float",
    "permute", "repeat", "reshape", "squeeze", "to", "transpose", "type", "unsqueeze", "view",
}  # fmt: skip
LIBRARIES = {"torch", "F", "nn"}


class Use(NamedTuple):
    """One thing done to a mask."""

    function: str
    kind: str  # "add", "write", "arithmetic", "index", "method", "function"
    detail: str


# The kind of a value: a mask, a container that holds one, or a function that returns one.
MASK, CONTAINER, FACTORY = "mask", "container", "factory"


class Function(NamedTuple):
    """A function of a file, or a method with its class."""

    name: str
    owner: str | None  # the class
    node: ast.FunctionDef

    def parameters(self) -> list[str]:
        """The names of the positional parameters, without self."""
        args = self.node.args
        names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        return names[1:] if self.owner else names

    def has_parameter(self, name: str | None) -> bool:
        """Whether there is a parameter of that name."""
        return name in self.parameters() or any(a.arg == name for a in self.node.args.kwonlyargs)


class Module:
    """The functions of a file, and the names from which each attribute of a class is made."""

    def __init__(self, source: str) -> None:
        tree = ast.parse(source)
        self.functions: dict[str, Function] = {}
        self.bases: dict[str, list[str]] = {}
        self.attributes: dict[tuple[str, str], set[str]] = defaultdict(set)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[node.name] = Function(node.name, None, node)
            elif isinstance(node, ast.ClassDef):
                self._add_class(node)

    def _add_class(self, node: ast.ClassDef) -> None:
        self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                name = f"{node.name}.{item.name}"
                self.functions[name] = Function(name, node.name, item)
                for assigned in ast.walk(item):
                    if isinstance(assigned, ast.Assign):
                        self._add_attributes(node.name, assigned)

    def _add_attributes(self, owner: str, node: ast.Assign) -> None:
        names = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        for target in node.targets:
            if isinstance(target, ast.Attribute) and _is_self(target.value):
                self.attributes[owner, target.attr] |= names

    def ancestors(self, owner: str | None) -> Iterator[str]:
        """A class and its bases in this file."""
        if owner in self.bases:
            yield owner
            for base in self.bases[owner]:
                yield from self.ancestors(base)

    def method(self, owner: str | None, name: str) -> Function | None:
        """The method of a class, which may be inherited from a class of this file."""
        found = (self.functions.get(f"{each}.{name}") for each in self.ancestors(owner))
        return next((function for function in found if function), None)

    def submodules(self, owner: str | None, attribute: str) -> list[Function]:
        """The forward functions that calling an attribute of a module may run."""
        classes = set()
        for each in self.ancestors(owner):
            classes |= self.attributes.get((each, attribute), set())
        return [f for name in sorted(classes) if (f := self.method(name, "forward"))]


def uses(source: str) -> set[Use]:
    """All uses of attention masks in a file."""
    if not FACTORIES.search(source):
        return set()
    module = Module(source)
    tables = _Tables({name: {} for name in module.functions}, {}, set(), set())
    mentioned = {name: _mentions(function.node) for name, function in module.functions.items()}
    pending = {name for name, words in mentioned.items() if any(map(_is_factory, words))}
    while pending:
        name = pending.pop()
        known = tables.returns.get(name)
        visitor = _Visitor(module, module.functions[name], tables)
        for statement in module.functions[name].node.body:
            visitor.visit(statement)
        if tables.returns.get(name) != known:
            unqualified = name.rpartition(".")[2]
            pending |= {other for other, words in mentioned.items() if unqualified in words}
        pending |= tables.changed
        tables.changed.clear()
    return tables.found


class _Tables(NamedTuple):
    """The analysis of all functions of a file."""

    parameters: dict[str, dict[str, str]]  # function -> parameter -> kind
    returns: dict[str, str]  # function -> kind
    changed: set[str]  # functions whose parameters were found to be masks
    found: set[Use]


def _mentions(node: ast.AST) -> set[str]:
    return {_name(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)}


def _is_factory(name: str) -> bool:
    return FACTORIES.fullmatch(name) is not None and name not in NOT_ATTENTION_MASKS


class _Visitor(ast.NodeVisitor):
    """Follow masks through one function, and add what is found to the shared tables."""

    def __init__(self, module: Module, function: Function, tables: _Tables) -> None:
        self.module, self.function, self.tables = module, function, tables
        self.names: dict[str, str] = dict(tables.parameters[function.name])
        self.layers: dict[str, list[Function]] = {}  # loop variable -> forwards of submodules

    def add_use(self, kind: str, detail: str) -> None:
        """Add a use of a mask in this function."""
        self.tables.found.add(Use(self.function.name, kind, detail))

    def add_arithmetic(self, node: ast.BinOp | ast.AugAssign) -> None:
        """Add an operator of which a mask is an operand."""
        is_addition = isinstance(node.op, ast.Add | ast.Sub)
        self.add_use("add" if is_addition else "arithmetic", ast.unparse(node))

    def kind(self, node: ast.AST | None) -> str | None:
        """The kind of an expression's value: MASK, CONTAINER, FACTORY or None."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name) or (FACTORY if _is_factory(name) else None)
            case ast.Attribute(value=value, attr=attr) if _is_self(value):
                return self.names.get(f"self.{attr}")
            case ast.IfExp(body=body, orelse=orelse):
                return self.kind(body) or self.kind(orelse)
            case ast.BoolOp(values=values):
                return next(filter(None, map(self.kind, values)), None)
            case ast.NamedExpr(value=value) | ast.Starred(value=value):
                return self.kind(value)
            case ast.Dict(values=parts) | ast.List(elts=parts) | ast.Tuple(elts=parts):
                return CONTAINER if any(map(self.kind, parts)) else None
            case ast.DictComp(value=value) | ast.ListComp(elt=value):
                return CONTAINER if self.kind(value) else None
            case ast.Subscript(value=value) if self.kind(value):
                return MASK
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr(), left=left, right=right):
                return MASK if MASK in (self.kind(left), self.kind(right)) else None
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                return self.kind(operand)
            case ast.Call():
                return self.call_kind(node)
        return None

    def call_kind(self, node: ast.Call) -> str | None:
        """The kind of the value that a call returns."""
        name = _name(node.func)
        if _is_factory(name) or self.kind(node.func) in (FACTORY, MASK):
            return CONTAINER if name.endswith("for_generate") else MASK
        for function in self.targets(node):
            if function.name in self.tables.returns:
                return self.tables.returns[function.name]
        if isinstance(node.func, ast.Attribute):
            base = self.kind(node.func.value)
            if base == MASK and node.func.attr in SAME_VALUES:
                return MASK
            if base == CONTAINER and node.func.attr in ("get", "pop"):
                return MASK
        return None

    def targets(self, node: ast.Call) -> list[Function]:
        """The functions of this file that a call may run."""
        match node.func:
            case ast.Name(id=name) if name in self.layers:
                return self.layers[name]
            case ast.Name(id=name) if name in self.module.functions:
                return [self.module.functions[name]]
            case ast.Attribute(value=value, attr=attr) if _is_self(value):
                method = self.module.method(self.function.owner, attr)
                return [method] if method else self.module.submodules(self.function.owner, attr)
            case ast.Attribute(value=ast.Attribute(value=value, attr=attr), attr=method) if (
                _is_self(value)
            ):
                forwards = self.module.submodules(self.function.owner, attr)
                owners = (forward.owner for forward in forwards)
                return [f for owner in owners if (f := self.module.method(owner, method))]
            case ast.Subscript(value=ast.Attribute(value=value, attr=attr)) if _is_self(value):
                return self.module.submodules(self.function.owner, attr)
        return []

    def bind(self, target: ast.AST, kind: str | None) -> None:
        """Assign a value of a kind to a target."""
        match target:
            case ast.Name(id=name):
                if kind:
                    self.names[name] = kind
            case ast.Attribute(value=value, attr=attr) if _is_self(value) and kind:
                self.names[f"self.{attr}"] = kind
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self.bind(part, MASK if kind and "mask" in _name(part) else None)
            case ast.Subscript(value=value):
                if self.kind(value) == MASK:
                    self.add_use("write", ast.unparse(target))
                elif kind and isinstance(value, ast.Name):
                    self.names[value.id] = CONTAINER

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        if re.search(r"dtype|\beager\b|using_eager", ast.unparse(node.test)):
            return
        before = dict(self.names)
        for statement in node.body:
            self.visit(statement)
        after, self.names = self.names, dict(before)
        for statement in node.orelse:
            self.visit(statement)
        self.names |= after

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target, self.kind(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target, self.kind(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if self.kind(node.target) == MASK:
            self.add_use("write", ast.unparse(node))
        elif self.kind(node.value) == MASK:
            self.add_arithmetic(node)

    def visit_For(self, node: ast.For) -> None:
        forwards = []
        for part in ast.walk(node.iter):
            if isinstance(part, ast.Attribute) and _is_self(part.value):
                forwards += self.module.submodules(self.function.owner, part.attr)
        for name in ast.walk(node.target):
            if isinstance(name, ast.Name):
                self.layers[name.id] = forwards
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        if kind := self.kind(node.value):
            self.tables.returns.setdefault(self.function.name, kind)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self.generic_visit(node)
        if MASK in (self.kind(node.left), self.kind(node.right)):
            self.add_arithmetic(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if self.kind(node.value) == MASK and isinstance(node.ctx, ast.Load):
            self.add_use("index", ast.unparse(node))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        self.follow(node)
        if not isinstance(node.func, ast.Attribute):
            return
        method, base = node.func.attr, node.func.value
        if self.kind(base) == MASK and method not in METADATA:
            in_place = method.endswith("_") and not method.endswith("__")
            self.add_use("write" if in_place else "method", method)
        root = base
        while isinstance(root, ast.Attribute):
            root = root.value
        arguments = (*node.args, *(keyword.value for keyword in node.keywords))
        is_library = isinstance(root, ast.Name) and root.id in LIBRARIES
        if is_library and any(self.kind(argument) == MASK for argument in arguments):
            kind = "write" if method.endswith("_") else "function"
            self.add_use("add" if method in ("add", "baddbmm") else kind, method)

    def follow(self, node: ast.Call) -> None:
        """Mark the parameters of called functions whose arguments are masks."""
        for function in self.targets(node):
            positional = zip(function.parameters(), node.args, strict=False)
            named = ((k.arg, k.value) for k in node.keywords if function.has_parameter(k.arg))
            for name, value in (*positional, *named):
                kinds = self.tables.parameters[function.name]
                if name not in kinds and (kind := self.kind(value)):
                    kinds[name] = kind
                    self.tables.changed.add(function.name)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
