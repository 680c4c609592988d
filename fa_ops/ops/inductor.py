"""Calls of the operators in the code that Inductor generates: they run plans, as eager calls do.

For an operator of which it knows nothing, Inductor writes `torch.ops.fa.attention.default(...)`:
the dispatcher, and planning in the operator's kernel, take several times as long as a launch.
Instead the generated code makes a `CallSite` of each call, with the options that are known, and
gives it the tensors. All else that Inductor knows of the call stays: layouts, what is written, and
the asserts of the results' sizes.

Generated C++ (`cpp_wrapper`, AOTInductor) and generated graphs (`fx_wrapper`) call the operator.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fa_ops.call import backend_option
from fa_ops.call.call import Saved
from fa_ops.call.options import (
    NO_OPERANDS,
    Gradients,
    Operands,
    OperandSet,
    is_default,
    new_operands,
)
from fa_ops.ops import axes, dense, kv_cache, library, programmed, quantized, selected, varlen
from fa_ops.ops.eager import Found
from fa_ops.ops.library import Route, after_import, is_dispatched
from fa_ops.ops.schemas import Schema
from fa_ops.plans import planning, recognition
from fa_ops.plans.planning import Prepared

# read on every call
_is_grad_enabled = torch.is_grad_enabled
_open_blocks = backend_option.open_blocks


class _Place(str):
    """The name of an argument, where its value will be."""


class CallSite:
    """A call of a forward operator in generated code. Its results are those of the operator.

    The last call is recognised as in `ops.eager`, but of each site: in most steps it has the same
    geometry, which other layers of a model need not have.
    """

    leading = 3  # tensors before the operands

    def __init__(self, schema: Schema, name: str, names: tuple, options: dict, results: int):
        self.schema, self.names, self.options = schema, names, options
        self.operator = getattr(torch.ops.fa, name).default
        self.results = results  # how many are read, the first ones
        self.returns_tensor = len(self.operator._schema.returns) == 1
        self.with_lse = results > 1
        self.mask_grad = options.get("mask_grad", False)
        # where the arguments of a call belong among the operands and the scalars
        others = names[self.leading :]
        known = {n: x for n, x in options.items() if n != "mask_grad"}
        operands, self.scalars = schema.bind((), known | {n: _Place(n) for n in others})
        fields = {x: n for n, x in zip(Operands._fields, operands) if x is not None}
        self.operands = OperandSet([fields[n] for n in others if n in fields])
        self.has_others = bool(others)
        self.end = self.leading + len(fields)  # of the tensors
        self.varying = [
            (i, names.index(x)) for i, x in enumerate(self.scalars) if isinstance(x, _Place)
        ]

    def __call__(self, *given):
        """Run the plan, or the operator where something has to see it."""
        if is_dispatched():
            return self.dispatched(given)
        tensors, operands, scalars = given, NO_OPERANDS, self.scalars
        if self.has_others:
            tensors, operands, scalars = self._bound(given)
        backend = backend_option.chosen() if _open_blocks() else backend_option.default
        settings = self, _is_grad_enabled(), backend, given[self.end :]
        last = recognition.last_calls.get(settings)
        if last is not None and last.matches(*tensors):
            plan = last.outcome.plan
        elif library.can_bypass_dispatcher(*tensors):
            plan = planning.plan_of(self.schema.signature, *tensors[:3], operands, scalars)
            test, found = recognition.like_call, Found(Route.DIRECT, plan)
            recognition.note(settings, plan, found, test, tensors, last)
        else:
            return self.dispatched(given)
        q, k, v = given[:3]
        results = plan.run(q, k, v, operands, self.with_lse)
        if operands.new_key is not None:
            kv_cache.written(k, v)
        return results[0] if self.returns_tensor else results

    def _bound(self, given: tuple) -> tuple[tuple, Operands, tuple]:
        """The tensors in the order of the signature, the operands and the scalars of a call."""
        tensors, operands, scalars = given[: self.leading], NO_OPERANDS, self.scalars
        if self.end > self.leading:
            others = given[self.leading : self.end]
            operands = new_operands(self.operands.places((*others, None)))
            tensors += self.schema.signature.operands.select(operands)
        if self.varying:
            values = list(scalars)
            for i, at in self.varying:
                values[i] = given[at]
            scalars = tuple(values)
        return tensors, operands, scalars

    def dispatched(self, given: tuple):
        """Call the operator."""
        return self.operator(**dict(zip(self.names, given)), **self.options)


class BackwardCallSite(CallSite):
    """A call of a backward operator in generated code."""

    leading = 7

    def __call__(self, *given):
        """Run the plan, or the operator where something has to see it."""
        if is_dispatched():
            return self.dispatched(given)
        tensors, operands, scalars = given, NO_OPERANDS, self.scalars
        if self.has_others:
            tensors, operands, scalars = self._bound(given)
        switches = recognition.settings(given[2], self.mask_grad)
        settings = self, _is_grad_enabled(), switches, given[self.end :]
        last = recognition.last_calls.get(settings)
        if last is not None and last.matches(*tensors):
            plan = last.outcome
        elif _is_direct_backward(tensors):
            plan = self._plan(tensors, operands, scalars)
            recognition.note(settings, plan, plan, recognition.like_backward, tensors, last)
        else:
            return self.dispatched(given)
        grads = plan.run(*given[:7], operands)
        return grads if self.results <= 3 else self._all(grads, given[2])

    def _plan(self, tensors: tuple, operands: Operands, scalars: tuple) -> Prepared:
        grad_out, grad_lse, q, k, v, out, lse = tensors[:7]
        saved = Saved(grad_out, grad_lse, out, lse, self.mask_grad)
        signature = self.schema.signature
        options = signature.call(None, None, None, NO_OPERANDS, scalars).options
        return planning.prepared_backward(signature, options, scalars, q, k, v, operands, saved)

    def _all(self, grads: tuple, q: Tensor) -> list[Tensor]:
        """All results: without elements where there is no gradient."""
        named = Gradients(*grads)
        found = (getattr(named, name) for name in axes.RESULTS[self.operator._opname])
        return [q.new_empty(0) if g is None else g for g in found]


def _is_direct_backward(tensors: tuple) -> bool:
    grad_out, grad_lse, *_, lse = tensors[:7]
    return library.can_bypass_dispatcher(*tensors) and all(
        g is None or library.have_same_dispatch_keys(g, lse) for g in (grad_out, grad_lse)
    )


_FORWARD, _PACKED, _SELECTED = dense.OPERATORS, varlen.OPERATORS, selected.OPERATORS
_SCHEMAS = {
    "attention": _FORWARD.forward,
    "attention_with_lse": _FORWARD.forward,
    "attention_backward": _FORWARD.backward,
    "attention_varlen": _PACKED.forward,
    "attention_varlen_backward": _PACKED.backward,
    "attention_selected": _SELECTED.forward,
    "attention_selected_backward": _SELECTED.backward,
    "attention_with_kv_cache": kv_cache.READING,
    "attention_with_kv_cache_append": kv_cache.APPENDING,
    "quantized_attention": quantized.SCHEMA,
    "attention_programmed": programmed.OPERATORS.forward,
    "attention_programmed_max": programmed.MAX_OPERATORS.forward,
    "attention_programmed_backward": programmed.OPERATORS.backward,
}


def call_site(name: str, names: str, results: int | None = None, **options: Any) -> CallSite:
    """What generated code makes of a call of the operator `name`, as `torch.ops.fa.call_site`.

    Inductor keeps generated code in its cache on disk, from where it is loaded beside a later
    version of fa_ops: the name, the parameters and the meaning of this function stay.

    Args:
        names: of the arguments that a call gives, in order: the tensors that begin the schema, then
            operands, then numbers that are known in a call only.
        results: how many of the results are read, the first ones; None: all.
        options: the other arguments; without those that have their defaults.
    """
    schema = _SCHEMAS[name]
    if results is None:
        results = len(getattr(torch.ops.fa, name).default._schema.returns)
    return _kind(name)(schema, name, tuple(names.split()), options, results)


def _kind(name: str) -> type[CallSite]:
    return BackwardCallSite if name.endswith("_backward") else CallSite


# What Inductor writes.


def register_code() -> None:
    """Have Inductor write calls of `CallSite` for our operators, where it writes Python.

    By the table with which it writes its own special calls, such as `print`: the node stays what it
    is for an operator that Inductor does not know, and C++ and graphs do not read the table.
    """
    from torch._inductor.codegen.custom_extern_kernel_codegen import (
        CUSTOM_EXTERN_KERNEL_CODEGEN,
        CustomCodegen,
    )

    for name in _SCHEMAS:
        CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.fa.{name}.default"] = CustomCodegen(write_call)


def write_call(node: Any, write: Callable[[Any], None]) -> None:
    """Write the line of a call in generated Python; `node` is the FallbackKernel of Inductor."""
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    wrapper = V.graph.wrapper_code
    site = _site(node, V.graph.removed_buffers)
    if site is None:
        write(ExternKernelAllocLine(wrapper, node))  # the operator
        return
    name = f"call_{node.get_name()}"
    if __name__.startswith("fa_ops."):  # a copy of the package is known by its operators alone
        wrapper.add_import_once("import fa_ops")
    wrapper.header.writeline(f"{name} = {site}")
    write(_line()(wrapper, node, name))


@functools.cache
def _line() -> type:
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.ir import IRNode

    class CallSiteLine(ExternKernelAllocLine):
        """The call of a site; its tensors have their names when the line is written.

        In a generated graph it is the operator's, as that of an ExternKernelAllocLine.
        """

        def __init__(self, wrapper: Any, node: Any, name: str) -> None:
            super().__init__(wrapper, node)
            self.name = name

        def codegen(self, code: Any) -> None:
            """Write the line."""
            call = copy.copy(self.node)
            call.python_kernel_name = self.name
            given, _ = _arguments(self.node)
            text = self.wrapper.val_to_arg_str
            texts = [
                x.codegen_reference() if isinstance(x, IRNode) else text(x) for x in given.values()
            ]
            self.wrapper._generate_extern_kernel_alloc_helper(call, texts)

    return CallSiteLine


def _site(node: Any, removed: set[str]) -> str | None:
    """What makes the site of a call, as code; None if an argument is of an unexpected type."""
    given, known = _arguments(node)
    name, schema = node.op_overload._opname, node.op_overload._schema
    arguments = [repr(name), repr(" ".join(given))]
    read = [i for i, x in enumerate(node.outputs) if x is not None and x.get_name() not in removed]
    if (results := max(read, default=-1) + 1) < len(schema.returns):
        arguments.append(f"results={results}")
    for x in schema.arguments:
        value = known.get(x.name, x.default_value)
        if is_default(value, x.default_value):
            continue
        kind = x.real_type.getElementType() if x.real_type.kind() == "OptionalType" else x.real_type
        expected = _TYPES.get(kind.kind())
        if type(value) is not expected:  # of a pass; the dispatcher converts it
            return None
        arguments.append(f"{x.name}={value!r}")
    return f"torch.ops.fa.call_site({', '.join(arguments)})"


_TYPES = {"FloatType": float, "IntType": int, "SymIntType": int, "BoolType": bool,
          "StringType": str, "ScalarTypeType": torch.dtype}  # fmt: skip


def _arguments(node: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments by name: those that a call gives, and those that are known when it is compiled.

    The first ones are in the order of `call_site`.
    """
    import sympy
    from torch._inductor.ir import IRNode

    expected = [x.name for x in node.op_overload._schema.arguments]
    args, keywords = node.unflatten_args(node.inputs, node.constant_args)
    values = dict(zip(expected, args)) | keywords
    leading = expected[: _kind(node.op_overload._opname).leading]
    tensors, numbers, known = {n: values.pop(n) for n in leading}, {}, {}
    for name, x in values.items():
        if isinstance(x, IRNode):
            tensors[name] = x
        elif isinstance(x, (torch.SymInt, torch.SymFloat, sympy.Expr)):
            numbers[name] = x
        else:
            known[name] = x
    return tensors | numbers, known


torch.ops.fa.call_site = call_site
after_import("torch._inductor.codegen.custom_extern_kernel_codegen", register_code)
