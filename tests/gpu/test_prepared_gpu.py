"""Repeated decoding calls on a GPU: the prepared way gives the bits of the operator's first."""

import threading

import pytest
import torch

import fa_ops
from fa_ops.ops import kv_cache, prepared

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CASES = ("contiguous", "paged", "latent", "append")


def draw(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Call:
    """attention_with_kv_cache with new queries each time."""

    def __init__(self, case):
        B, Hkv, D, Dv, S = (3, 1, 576, 512, 1024) if case == "latent" else (3, 2, 128, 128, 1024)
        self.shape = (B, 8, 1, D)
        self.lens = torch.tensor([7, 600, 1000], dtype=torch.int32, device="cuda")
        self.options = {}
        if case == "contiguous":
            self.caches = draw(B, Hkv, S, D), draw(B, Hkv, S, Dv)
        else:
            k = draw(B * S // 64, 64, Hkv, D)
            self.caches = k, k[..., :Dv] if case == "latent" else draw(*k.shape)
            pages = torch.randperm(len(k), device="cuda").int().view(B, -1)
            self.options["page_table"] = pages
        if case == "append":
            self.options |= {"key": draw(B, Hkv, 1, D), "value": draw(B, Hkv, 1, Dv)}

    def query(self):
        return draw(*self.shape)

    def __call__(self, q, **options):
        given = (q, *self.caches, self.lens)
        return fa_ops.attention_with_kv_cache(*given, **self.options, **options)

    def expected(self, q):
        """(out, lse) by an operator that remembers nothing."""
        prepared._runs.clear()
        options = dict(self.options)
        new = [options.pop(name) for name in ("key", "value") if name in options]
        operator = kv_cache.APPEND if new else kv_cache.READ
        return operator(q, *self.caches, *new, self.lens, **options)


@pytest.mark.parametrize("case", CASES)
def test_the_second_call_gives_the_bits_of_the_first(case):
    call = Call(case)
    for _ in range(3):
        q = call.query()
        out, lse = call.expected(q)
        prepared._runs.clear()
        results = [call(q, return_lse=True) for _ in range(3)]
        assert prepared._runs and all(prepared._runs.values())
        results += [(call(q), lse) for _ in range(3)]
        results += [call(q.clone(), return_lse=True)]
        for found in results:
            assert torch.equal(found[0], out) and torch.equal(found[1], lse)


@pytest.mark.parametrize("case", CASES)
def test_the_operator_itself_repeats(case):
    call = Call(case)
    q, other = call.query(), call.query()
    out, lse = call.expected(other)
    call.expected(q)  # remembered by the operator
    (run,) = prepared._runs.values()
    assert run is not None
    options = dict(call.options)
    new = [options.pop(name) for name in ("key", "value") if name in options]
    operator = kv_cache.APPEND if new else kv_cache.READ
    versions = [t._version for t in call.caches]
    found = operator(other, *call.caches, *new, call.lens, **options)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    assert len(prepared._runs) == 1
    assert [t._version > before for t, before in zip(call.caches, versions)] == [bool(new)] * 2


@pytest.mark.parametrize("case", ("contiguous", "paged", "latent"))
def test_threads_on_streams_of_their_own(case):
    call, wrong = Call(case), []
    work = [(q, call.expected(q)[0]) for q in (call.query() for _ in range(4))]
    call(work[0][0])
    torch.cuda.synchronize()

    def repeat(q, out):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                if not torch.equal(call(q), out):
                    wrong.append(threading.get_ident())

    threads = [threading.Thread(target=repeat, args=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("case", ("contiguous", "paged", "latent"))
def test_two_graphs_replay_at_once(case):
    call, captured = Call(case), []
    for _ in range(2):
        q = call.query()
        expected = call.expected(q)[0]
        for _ in range(2):
            call(q)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call(q)
        captured.append((graph, out, expected, torch.cuda.Stream(), q))  # q must live
    for _ in range(50):
        for graph, out, _, stream, _ in captured:
            with torch.cuda.stream(stream):
                out.zero_()
                graph.replay()
        torch.cuda.synchronize()
        for _, out, expected, *_ in captured:
            assert torch.equal(out, expected)
