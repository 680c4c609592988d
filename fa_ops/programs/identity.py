"""What tells one score_mod or mask_mod from another: all that its code can read.

The reading of a function is kept by its identity, so nothing that changes what the function
computes may be missing here. Code says by names what it reads of objects: global variables,
attributes, and strings, by which it may ask for them. The names of all code that a function reaches
count for all objects that it reaches, as one function may hand an object to another. What is not
seen into, such as objects of C, cannot be compared, and its function is read in every call.
"""

from __future__ import annotations

import abc
import argparse
import builtins
import enum
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Generic, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, fx

_PLAIN = (
    int, float, bool, str, bytes, complex, range, type(None), type(Ellipsis), torch.dtype,
    torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_MOST_ITEMS = 256
_OF_GRAPHS = ("placeholder", "call_function", "call_method", "output")
_OF_C = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip
_CONTAINERS = (tuple, list, dict, set, frozenset)
_WITHOUT_ATTRIBUTES = (object, torch.nn.Module, abc.ABC, Generic, Protocol, *_CONTAINERS)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)  # whose attributes are read by name
# What classes define that functions do not run, or that changes nothing which they read.
_NOT_RUN = frozenset(
    """
    __new__ __init__ __del__ __repr__ __str__ __eq__ __hash__ __setattr__ __delattr__ __setstate__
    __getstate__ __reduce__ __reduce_ex__ __copy__ __deepcopy__ __sizeof__ __init_subclass__
    __subclasshook__ __class_getitem__ __post_init__ __replace__ __dir__ __annotate__
    __annotate_func__ __getattr__ __getattribute__
    __getnewargs__ __getnewargs_ex__
    """.split()
)
# State behind functions of libraries: names by which code asks for it, and modules that have it.
_STATE = frozenset(
    """
    environ getenv random get_default_dtype is_grad_enabled is_inference_mode_enabled
    is_autocast_enabled get_autocast_dtype get_autocast_gpu_dtype get_autocast_cpu_dtype
    """.split()
)
_STATEFUL_MODULES = frozenset(("random", "_random", "time", "datetime", "secrets", "numpy.random"))
_ANY_ATTRIBUTE = frozenset(("getattr", "vars", "__dict__"))


class Identity(NamedTuple):
    """What tells one function from another, and the tensors that it may read, in order."""

    key: tuple | None  # None: it has something whose value cannot be compared
    tensors: tuple[Tensor, ...]


class _Incomparable(Exception):
    """A value that cannot be compared later."""


_LIMIT = 1024
_names_of_roots: dict[object, dict[str, None]] = {}  # by code: names that all of it mentions


def identity_of(function: Callable) -> Identity:
    """The identity of a function: its code, numbers by value, tensors by dtype and shape."""
    root = getattr(function, "__func__", function)
    root = getattr(root, "__code__", type(function))
    names = _names_of_roots.get(root, {})
    while True:
        walk = _Walk(dict(names))
        try:
            key = ("root", walk.key(function, is_called=True))
            hash(key)
        except Exception:  # whatever objects raise that are looked into
            key = None
        if len(walk.names) == len(names):
            return Identity(key, tuple(walk.tensors))
        names = walk.names  # of code that was reached behind objects, which may have them
        if len(_names_of_roots) >= _LIMIT:
            _names_of_roots.clear()
        _names_of_roots[root] = names


def names_of_tensors(function: Callable) -> dict[int, str]:
    """How code of a function, or of those that it calls, names tensors, by their identity.

    Those in containers and behind other objects are left out.
    """
    found: dict[int, str] = {}
    seen: set[Callable] = set()
    rest = [function]
    while rest:
        f = rest.pop()
        own = getattr(f, "__func__", getattr(f, "func", f))  # of a method, or a partial
        if not isinstance(own, types.FunctionType):
            own = getattr(type(own), "forward", getattr(type(own), "__call__", None))  # noqa: B004
        if not isinstance(own, types.FunctionType) or own in seen or _is_library(own):
            continue
        seen.add(own)
        code, named = own.__code__, {n: own.__globals__.get(n) for n in own.__code__.co_names}
        for name, cell in zip(code.co_freevars, own.__closure__ or (), strict=True):
            with suppress(ValueError):  # not assigned yet
                named[name] = cell.cell_contents
        if own is not f and code.co_varnames:
            named[code.co_varnames[0]] = getattr(f, "__self__", f)
        for name, x in named.items():
            if isinstance(x, Tensor):
                found.setdefault(id(x), name)
            elif isinstance(x, types.FunctionType):
                rest.append(x)
            elif x is not None:
                parts = dict(getattr(x, "__dict__", {}))
                if isinstance(x, torch.nn.Module):
                    parts |= x._parameters | x._buffers
                for part in code.co_names:
                    if isinstance(parts.get(part), Tensor):
                        found.setdefault(id(parts[part]), f"{name}.{part}")
    return found


class _Walk:
    """One walk through all that a function reaches."""

    def __init__(self, names: dict[str, None]) -> None:
        self.names = names
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}

    def key(self, x: object, is_called: bool = False) -> object:
        """The key of a value; `is_called`: code may call it, and not only read its attributes."""
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, _PLAIN):
            # of floats the text: NaN is equal to itself, and 0.0 is not to -0.0
            return type(x), repr(x) if isinstance(x, float | complex) else x
        if id(x) in self._seen:
            return "again", self._seen[id(x)]
        self._seen[id(x)] = len(self._seen)
        if _is_stateful(x):
            raise _Incomparable
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, fx.GraphModule):
            if any(node.op not in _OF_GRAPHS for node in x.graph.nodes):
                raise _Incomparable  # it has constants, or modules
            return "graph", x.code
        if isinstance(x, types.MethodType):
            return "method", self.key(x.__func__), self.key(x.__self__, is_called=False)
        if isinstance(x, staticmethod | classmethod):
            return "method", self.key(x.__func__)
        if isinstance(x, property | functools.cached_property):
            return "property", self.key(x.fget if isinstance(x, property) else x.func)
        if isinstance(x, functools.partial):
            parts = (*x.args, *x.keywords.values())
            return (
                "partial", len(x.args), tuple(x.keywords), self.key(x.func, is_called=True),
                *self._keys(parts),
            )  # fmt: skip
        if isinstance(x, types.BuiltinFunctionType | types.MethodWrapperType):
            owner = x.__self__
            is_free = owner is None or isinstance(owner, types.ModuleType | type)
            return ("builtin", x) if is_free else ("method", x.__name__, self.key(owner))
        if isinstance(x, (*_OF_C, logging.Logger)):
            return "library", x
        if isinstance(x, types.ModuleType):
            return ("library", x) if _is_library(x) else ("module", x, self._named(vars(x)))
        return self._data(x, is_called)

    def _data(self, x: object, is_called: bool) -> object:
        if isinstance(x, enum.Enum):
            return type(x), x.name, self.key(x.value)
        if isinstance(x, np.generic):
            return type(x), x.tobytes()
        if isinstance(x, _CONTAINERS):
            if len(x) > _MOST_ITEMS:
                raise _Incomparable
            values = [*x, *x.values()] if isinstance(x, dict) else x
            items = tuple([self.key(y, is_called=True) for y in values])
            items = frozenset(items) if isinstance(x, set | frozenset) else items
            if _is_library(type(x)):
                return type(x), items
            return type(x), items, self._object(x, is_called)
        if isinstance(x, type):
            return ("library", x) if _is_library(x) else self._class(x)
        return self._object(x, is_called)

    def _value(self, x: object, is_called: bool = True) -> object:
        """The key of what code reads by a name of its own, such as another name."""
        if type(x) is str and x.isidentifier():
            self.names[x] = None
        return self.key(x, is_called)

    def _keys(self, values: Iterable[object]) -> tuple:
        return tuple([self._value(x) for x in values])

    def _tensor(self, t: Tensor) -> tuple:
        at = next((i for i, x in enumerate(self.tensors) if x is t), None)
        if at is not None:
            return "again", at
        self.tensors.append(t)
        return "tensor", t.dtype, tuple(t.shape), t.device, t.requires_grad

    def _function(self, f: types.FunctionType) -> tuple:
        if _is_library(f):
            return "library", f
        names = _names(f.__code__)
        if not _STATE.isdisjoint(names):
            raise _Incomparable
        self.names |= names
        found = []
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            try:
                # a method's `self` is not called inside its own functions of scores
                found.append(self._value(cell.cell_contents, is_called=name != "self"))
            except ValueError:  # not assigned yet
                found.append(None)
        found += self._keys((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()))
        space = f.__globals__
        for name in names:
            if name in space:
                found.append((name, self._value(space[name])))
            elif not hasattr(builtins, name):
                found.append((name, None))
        if f.__dict__:
            found.append(self._named(f.__dict__))
        return "function", f.__code__, tuple(found)

    def _named(self, attributes: Mapping[str, object], whole: bool = False) -> tuple:
        """The key of those attributes that code may read."""
        whole = whole or not _ANY_ATTRIBUTE.isdisjoint(self.names)
        found = [n for n in attributes if whole or n in self.names]
        if len(found) > _MOST_ITEMS:
            raise _Incomparable
        return tuple([(n, self._value(attributes[n])) for n in found])

    def _class(self, x: type, run: frozenset[str] = frozenset()) -> tuple:
        """A class by what code may read of it and its bases; `run`: names that it need not have.

        Methods such as `__getitem__` are run by operations on instances, without their name.
        """
        found = []
        # attributes that code makes are asked for by name; that code may read everything
        is_run = _is_element if _makes_attributes(x) else _is_operation
        for base in x.__mro__:
            if base is object or _is_library(base):
                continue
            own = vars(base)
            names = [n for n in own if (n in self.names or n in run) and n not in _NOT_RUN]
            found += [(n, self.key(own[n])) for n in names]
            found += [self.key(f) for n, f in own.items() if is_run(n, f)]
            if "__call__" in own and "__call__" in run:
                found.append(self.key(own["__call__"]))
        kind = type(x)
        if not _is_library(kind):  # of which attributes of the class may be properties
            found.append(self._class(kind))
        return "class", x, tuple(found)

    def _object(self, x: object, is_called: bool) -> tuple:
        """An object by its class and those attributes that code may read."""
        kind, own = type(x), dict(getattr(x, "__dict__", {}))
        is_library = _is_of_library(kind)
        if isinstance(x, torch.nn.Module):
            if is_called and (x._forward_hooks or x._forward_pre_hooks):
                raise _Incomparable
            if is_library:  # of which the code of libraries reads what is public
                own = {n: value for n, value in own.items() if not n.startswith("_")}
            own |= x._parameters | x._buffers | x._modules
        else:
            slots = _slots_of(kind)
            own |= {n: getattr(x, n) for n in slots if hasattr(x, n)}
            is_library = is_library and kind not in _NAMESPACES
            is_known = bool(own or slots or hasattr(x, "__dict__") or isinstance(x, _CONTAINERS))
            if is_library and not own and hasattr(kind, "__get__"):
                return "library", x  # a descriptor of C
            if is_library:  # whose state may be of C
                is_known = bool(own) and not (_is_library(kind) and callable(x))
            if not is_known:
                raise _Incomparable
        if _makes_attributes(kind):
            for name in [n for n in self.names if n not in own]:
                with suppress(Exception):  # whatever this code raises where there is none
                    own[name] = getattr(x, name)
        run = frozenset(("forward", "__call__")) if is_called else frozenset()
        of_class = ("library", kind) if _is_library(kind) else self._class(kind, run)
        return "object", of_class, self._named(own, whole=is_library)


@functools.lru_cache(_LIMIT)
def _makes_attributes(kind: type) -> bool:
    """Whether code of the user's says which attributes instances have."""
    return any(
        not {"__getattr__", "__getattribute__"}.isdisjoint(vars(base))
        for base in kind.__mro__
        if not _is_library(base)
    )


@functools.lru_cache(_LIMIT)
def _is_of_library(kind: type) -> bool:
    """Whether a class or a base of it, other than some without attributes, belongs to libraries."""
    return any(_is_library(c) for c in kind.__mro__ if c not in _WITHOUT_ATTRIBUTES)


def _is_operation(name: str, value: object) -> bool:
    """Whether it is a method that Python runs without its name, such as `__getitem__`."""
    is_special = name.startswith("__") and name.endswith("__") and name != "__call__"
    return is_special and name not in _NOT_RUN and isinstance(value, types.FunctionType)


def _is_element(name: str, value: object) -> bool:
    return name == "__getitem__" and isinstance(value, types.FunctionType)


@functools.lru_cache(_LIMIT)
def _slots_of(kind: type) -> list[str]:
    """The attributes of instances that are no keys of their `__dict__`."""
    return [
        n
        for base in kind.__mro__
        if "__slots__" in vars(base)  # else of C
        for n, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    ]


def _is_stateful(x: object) -> bool:
    """Whether it is of a library, and gives something else each time, such as the time."""
    if isinstance(x, types.ModuleType):
        return x.__name__ in _STATEFUL_MODULES
    of_c = types.BuiltinFunctionType | types.MethodType
    owner = x.__self__ if isinstance(x, of_c) else None
    if isinstance(owner, types.ModuleType | type(None)):
        owner = x if isinstance(x, of_c | types.FunctionType) else type(x)
    elif not isinstance(owner, type):
        owner = type(owner)
    return getattr(owner, "__module__", None) in _STATEFUL_MODULES


def _is_library(x: object) -> bool:
    """Whether a function, class or module belongs to torch, Python or this package.

    Those do not change. A function that a call of these has made may capture anything, such as what
    torch's `and_masks` returns.
    """
    if isinstance(x, types.FunctionType) and "<locals>" in x.__qualname__:
        return False
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None) or ""
    root = name.partition(".")[0]
    return root != "__main__" and (root in _LIBRARIES or root in sys.stdlib_module_names)


_LIBRARIES = frozenset(("torch", "fa_ops", "numpy"))
_known_names: dict[types.CodeType, dict[str, None]] = {}


def _names(code: types.CodeType) -> dict[str, None]:
    """The names of globals and attributes that code mentions, inner functions included.

    So are strings that may be names.
    """
    known = _known_names.get(code)
    if known is None:
        known = dict.fromkeys(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                known |= _names(constant)
            elif type(constant) is str and constant.isidentifier():
                known[constant] = None
        if len(_known_names) >= _LIMIT:
            _known_names.clear()
        _known_names[code] = known
    return known
