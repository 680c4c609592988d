"""Wrong calls raise the same errors wherever they are made, before and after plans exist."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops.compat import flash_attn, flash_attn_interface
from fa_ops.ops import library
from fa_ops.ops.library import Route
from fa_ops.plans import planning
from tests.call.test_errors import (
    DENSE,
    FUNCTION_ONLY,
    MERGE,
    VARLEN,
    VARLEN_FUNCTION_ONLY,
    ints,
    packed,
    rand,
    valid,
)
from tests.compat import test_flash_attn, test_flash_attn_3, test_flash_attn_interface
from tests.ops import test_kv_cache as caches
from tests.ops import test_quantized, test_quantized_packed, test_select_tokens, test_selected
from tests.ops import test_varlen_pages as pages

Call = Callable[[], object]


def rows_of(test) -> list[tuple]:
    """The rows of the table that parametrizes a test."""
    return next(mark.args[1] for mark in test.pytestmark if mark.name == "parametrize")


def over_pages(change: dict):
    q, k, v, ends, lens, table = pages.drawn()
    given = {"query": q, "key": k, "value": v, "cu_seqlens_q": ends, "cu_seqlens_k": None}
    return fa_ops.attention_varlen(**given | {"kv_lens": lens, "page_table": table} | change)


def of_pages(k: int = 8, **change):
    """FlashAttention 2's function over two pages of four keys, of two sequences."""
    q, page, ends = rand(4, 2, 8), rand(2, 4, 2, 8), torch.tensor([0, 2, 4]).int()
    given = {"cu_seqlens_k": torch.tensor([0, 3, 6]).int(), "max_seqlen_q": 2, "max_seqlen_k": 4}
    given |= {"block_table": torch.tensor([[0], [1]]).int()}
    return flash_attn.flash_attn_varlen_func(q, page, page, ends, **given | change)


def appended(**change):
    """FlashAttention 3's append of two packed keys to a page of four."""
    x, page = rand(2, 2, 8), rand(1, 4, 2, 8)
    ends, zero = torch.tensor([0, 2]).int(), torch.zeros(1, 1).int()
    given = {"cache_seqlens": 1, "cu_seqlens_q": ends, "cu_seqlens_k_new": ends}
    given |= {"page_table": zero, "max_seqlen_q": 2, "k_cache": page, "v_cache": 2 * page}
    return flash_attn_interface.flash_attn_with_kvcache(q=x, k=x, v=x, **given | change)


def quantized(change: dict):
    function = fa_ops.attention if "q_scale" in change else fa_ops.quantized_attention
    return function(**change)


def cases_of(changes, call: Callable) -> list[Call]:
    return [partial(call, change) for change in changes]


def controlled(*args):
    """A function of scores, or of indices alone, that cannot be read."""
    return args[0] if args[-1] > 3 else args[-1]


OVER_PAGES = [
    *(change for change, _ in rows_of(pages.test_errors)),
    *(
        {"cu_seqlens_k": ends, "kv_lens": None}
        for ends, _ in rows_of(pages.test_errors_of_borders_of_keys_name_them)
    ),
]
BAD: dict[str, list[Call]] = {
    "attention": cases_of(
        [bad.change for bad in (DENSE | FUNCTION_ONLY).values()],
        lambda change: fa_ops.attention(**valid() | change),
    ),
    "attention_varlen": cases_of(
        [bad.change for bad in (VARLEN | VARLEN_FUNCTION_ONLY).values()],
        lambda change: fa_ops.attention_varlen(**packed(**change)),
    )
    + cases_of(OVER_PAGES, over_pages)
    + cases_of(
        test_quantized_packed.ERRORS.values(),
        lambda change: test_quantized_packed.attend(**change),
    ),
    "attention_with_kv_cache": cases_of(
        (caches.WRONG | caches.WRONG_TYPES).values(), lambda change: caches.by_function(**change)
    ),
    "quantized_attention": cases_of([row[0] for row in test_quantized.BAD.values()], quantized),
    "merge_states": cases_of(
        [bad.change for bad in MERGE.values()], lambda change: fa_ops.merge_states(**change)
    ),
    "attention_selected": cases_of(
        [bad[0] for bad in test_selected.BAD_BLOCKS.values()],
        lambda change: fa_ops.attention_selected(**test_selected.BLOCKS | change),
    ),
    "attention_selected_tokens": cases_of(
        [bad[0] for bad in test_selected.BAD_TOKENS.values()],
        lambda change: fa_ops.attention_selected_tokens(**test_selected.TOKENS | change),
    ),
    "select_tokens": cases_of(
        [bad[0] for bad in test_select_tokens.BAD.values()],
        lambda change: fa_ops.select_tokens(**test_select_tokens.VALID | change),
    ),
    "flex_attention": cases_of(
        [{"score_mod": 3}, {"block_mask": 3}, {"key": rand(1, 1, 7, 8)}, {"score_mod": controlled}],
        lambda change: fa_ops.flex_attention(**valid() | {"enable_gqa": True} | change),
    ),
    "mask_tiles": cases_of([3, controlled], lambda x: fa_ops.mask_tiles(x, 1, 1, 8, 8)),
    "mask_blocks": cases_of([ints(5, 7), rand(1, 2, 1, 5, 7), 3], fa_ops.mask_blocks),
    "explain": cases_of(
        [{"query": rand(4, 5, 8)}, {"scale": "1"}, {"backend": "gpu"}],
        lambda change: fa_ops.explain(**valid() | change),
    ),
    "use_backend": cases_of(["gpu", None, 3], fa_ops.use_backend),
    "set_backend": cases_of(["gpu", 3], fa_ops.set_backend),
    "flash_attn": [row[2] for row in rows_of(test_flash_attn.test_errors_name_the_argument)]
    + [row[2] for row in rows_of(test_flash_attn_interface.test_errors)]
    + [
        partial(of_pages, block_table=torch.tensor([[0], [2]]).int()),
        partial(of_pages, cu_seqlens_k=torch.tensor([0, 3, 2]).int()),
        partial(of_pages, cu_seqlens_k=torch.tensor([0, 3, 9]).int()),
        partial(of_pages, max_seqlen_q=1),
    ],
    "flash_attn_3": [row[2] for row in rows_of(test_flash_attn_3.test_errors)]
    + [
        partial(appended, cache_seqlens=3),
        partial(appended, cache_seqlens=-1),
        partial(appended, cu_seqlens_k_new=torch.tensor([0, 3]).int()),
        partial(appended, page_table=torch.ones(1, 1).int()),
        partial(appended, max_seqlen_q=1),
    ],
}
GOOD: list[Call] = [
    lambda: fa_ops.attention(**valid()),
    lambda: fa_ops.attention(**valid(), scale=1.0, is_causal=True),
    lambda: fa_ops.attention(**valid(), attn_mask=rand(5, 7)),
    lambda: fa_ops.attention_varlen(**packed()),
    lambda: over_pages({}),
    lambda: test_quantized_packed.attend(),
    lambda: fa_ops.attention_selected(**test_selected.BLOCKS),
    lambda: fa_ops.attention_selected_tokens(**test_selected.TOKENS),
    lambda: fa_ops.select_tokens(**test_select_tokens.VALID),
    lambda: fa_ops.flex_attention(**valid(), enable_gqa=True),
    *(partial(caches.by_function, case) for case in (caches.CASES["append"], caches.PAGED)),
    lambda: quantized(test_quantized._tensors()),
    lambda: quantized(test_quantized._tensors(test_quantized.E4M3) | test_quantized.SCALES),
    of_pages,
    appended,
]


def error_of(call: Call) -> tuple[str, str] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def errors() -> dict[str, tuple[str, str] | None]:
    """Of every wrong call."""
    return {
        f"{function} {i}": error_of(call)
        for function, calls in BAD.items()
        for i, call in enumerate(calls)
    }


def errors_of_first_calls() -> dict[str, tuple[str, str] | None]:
    found = {}
    for function, calls in BAD.items():
        for i, call in enumerate(calls):
            planning.forget()
            found[f"{function} {i}"] = error_of(call)
    return found


def warm_up():
    for call in GOOD * 2:
        call()


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[str, str] | None]:
    return errors_of_first_calls()


def test_all_public_functions_have_wrong_calls(expected):
    functions = {name for name in fa_ops.__all__ if callable(getattr(fa_ops, name))}
    assert functions <= BAD.keys()
    assert not [name for name, error in expected.items() if error is None]
    assert len(expected) > 250
    kinds = {kind for kind, _ in expected.values()}
    assert kinds == {"ValueError", "TypeError", "NotImplementedError"}


@contextmanager
def another_thread(work: Callable) -> Iterator[None]:
    """While another thread is inside a compiler; `work` takes what it calls and returns from."""
    inside, done = threading.Event(), threading.Event()

    def wait():
        inside.set()
        done.wait(60)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work, wait)
        try:
            while not inside.wait(0.1):
                assert not other.done(), other.result()
            yield
        finally:
            done.set()
        other.result(60)


def compiling(wait: Callable[[], None]):
    def backend(graph, _):
        wait()
        return graph.forward

    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))


def exporting(wait: Callable[[], None]):
    class Module(torch.nn.Module):
        def forward(self, x):
            wait()
            return x.sin()

    torch.export.export(Module(), (torch.ones(3),), strict=False)


def in_autograd_of_a_compiler(wait: Callable[[], None]):
    """While AOTAutograd has its modes on."""

    def backend(graph, _):
        wait()
        return graph.forward

    aot = torch._dynamo.backends.common.aot_autograd(fw_compiler=backend)
    torch.compile(lambda x: x.sin() + 1, backend=aot)(torch.ones(3, requires_grad=True))


@contextmanager
def capturing() -> Iterator[None]:
    """While a CUDA graph is captured, of which calls on a CPU are no part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


SITUATIONS = {
    "plainly": nullcontext,
    "while another thread compiles": partial(another_thread, compiling),
    "while another thread is in AOTAutograd": partial(another_thread, in_autograd_of_a_compiler),
    "while a CUDA graph is captured": capturing,
    "under a mode that counts": partial(FlopCounterMode, display=False),
    "without gradients": torch.no_grad,
}
# What a recorded gradient is refused for alone.
NEED_GRADIENTS = "require grad", "requires grad", "no gradient"


@pytest.mark.parametrize("situation", SITUATIONS)
def test_errors_are_the_same(situation, expected):
    compared = {
        name: error
        for name, error in expected.items()
        if situation != "without gradients"
        or not any(words in error[1] for words in NEED_GRADIENTS)
    }
    with SITUATIONS[situation]():
        cold = errors_of_first_calls()
        warm_up()
        warm = errors()
    for found in (cold, warm):
        assert {name: found[name] for name in compared} == compared


def test_values_are_checked_after_a_tensor_is_printed_while_another_thread_exports():
    """For which torch takes the modes of that thread away, and leaves them to this one."""
    ends = pages.drawn()[3]
    ends[2] = ends[1] - 1
    with ThreadPoolExecutor(1) as printing:  # a thread of its own, as what torch leaves stays
        with another_thread(exporting):
            printing.submit(repr, torch.ones(2)).result()
        error = printing.submit(error_of, lambda: over_pages({"cu_seqlens_q": ends})).result()
    assert "must not be less than" in error[1]


def test_errors_are_the_same_in_tasks(expected):
    async def task(name: str, call: Call):
        await asyncio.sleep(0)
        with fa_ops.use_backend("auto"):
            await asyncio.sleep(0)
            return name, error_of(call)

    async def all_at_once() -> dict:
        named = ((f"{f} {i}", call) for f, calls in BAD.items() for i, call in enumerate(calls))
        return dict(await asyncio.gather(*(task(*one) for one in named)))

    planning.forget()
    assert asyncio.run(all_at_once()) == expected
    warm_up()
    assert asyncio.run(all_at_once()) == expected


def test_errors_are_the_same_in_threads(expected):
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(errors) for _ in range(4)]
        assert all(one.result(60) == expected for one in found)


def in_child(work: Callable[[], object]):
    """What a function returns in a forked child."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads of this process do not live on
        child = os.fork()
    if not child:
        try:
            with os.fdopen(writer, "wb") as file:
                pickle.dump(work(), file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    return pickle.loads(found)


def test_errors_are_the_same_in_a_forked_child(expected):
    warm_up()
    with another_thread(compiling):  # which is not in the child, where its flags stay
        warm, cold = in_child(lambda: (errors(), errors_of_first_calls()))
    assert warm == cold == expected


@pytest.mark.parametrize("situation", [name for name in SITUATIONS if "thread" in name])
def test_eager_calls_keep_their_route(situation):
    q, k, v = valid().values()
    recorded = q.detach().requires_grad_()
    with SITUATIONS[situation]():
        assert library.route_of(q.detach(), k, v) is Route.DIRECT
        assert library.route_of(recorded, k, v) is Route.RECORD
    assert sum(map(len, chain(BAD.values()))) > 250
