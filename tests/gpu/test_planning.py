"""Repeated decoding calls on a GPU: what was prepared gives the bits of the operator's first."""

import threading

import pytest
import torch

import fa_ops
from fa_ops.backends import reference
from fa_ops.call import checks
from fa_ops.call.call import attention_call
from fa_ops.ops import kv_cache
from fa_ops.plans import planning
from fa_ops.testing import assert_within_budget, naive

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
        """(out, lse) by the operator, planned anew."""
        planning.forget()
        options = dict(self.options)
        new = [options.pop(name) for name in ("key", "value") if name in options]
        operator = kv_cache.APPEND if new else kv_cache.READ
        return operator(q, *self.caches, *new, self.lens, **options)


@pytest.mark.parametrize("case", CASES)
def test_repeated_calls_are_bitwise_equal_to_the_first(case):
    call = Call(case)
    for _ in range(3):
        q = call.query()
        out, lse = call.expected(q)
        planning.forget()
        results = [call(q, return_lse=True) for _ in range(3)]
        assert len(planning._prepared) == 1
        results += [(call(q), lse) for _ in range(3)]
        results += [call(q.clone(), return_lse=True)]
        for result in results:
            assert torch.equal(result[0], out) and torch.equal(result[1], lse)


@pytest.mark.parametrize("case", CASES)
def test_repeated_operator_calls_take_the_fast_path(case):
    call = Call(case)
    q, other = call.query(), call.query()
    out, lse = call.expected(other)
    call.expected(q)
    (first,) = planning._prepared.values()
    options = dict(call.options)
    new = [options.pop(name) for name in ("key", "value") if name in options]
    operator = kv_cache.APPEND if new else kv_cache.READ
    versions = [t._version for t in call.caches]
    found = operator(other, *call.caches, *new, call.lens, **options)
    assert torch.equal(found[0], out) and torch.equal(found[1], lse)
    (second,) = planning._prepared.values()
    assert second is first
    assert [t._version > before for t, before in zip(call.caches, versions)] == [bool(new)] * 2


@pytest.mark.parametrize("case", ("contiguous", "paged", "latent"))
def test_concurrent_threads_and_streams(case):
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
def test_concurrent_cuda_graphs(case):
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
        captured.append((graph, out, expected, torch.cuda.Stream(), q))  # keeps q alive
    for _ in range(50):
        for graph, out, _, stream, _ in captured:
            with torch.cuda.stream(stream):
                out.zero_()
                graph.replay()
        torch.cuda.synchronize()
        for _, out, expected, *_ in captured:
            assert torch.equal(out, expected)


LENGTHS = (700, 701, 702, 703, 767, 768, 769, 1500, 512, 513, 2047, 2048)
LAYOUTS = {
    "contiguous": lambda t, S: t[:, :, :S].clone(),
    "transposed": lambda t, S: t[:, :, :S].transpose(1, 2).contiguous().transpose(1, 2),
    "a slice": lambda t, S: t[:, :, :S],
}
SIZES = [(1, 32, 8, 128, 128), (3, 8, 2, 64, 64), (2, 6, 3, 72, 40)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("small", ["", "kv_lens", "sinks kv_lens key_ranges"])
def test_a_cache_that_grows_is_attended_to_its_end(small, layout, sizes, monkeypatch):
    """Beyond its end lies NaN: what is read there shows. The calls of a family are checked once."""
    (B, Hq, Hkv, D, Dv), checked, dense = sizes, [], checks.dense
    monkeypatch.setattr(checks, "dense", lambda *a, **k: checked.append(1) or dense(*a, **k))
    whole = draw(B, Hkv, 2048, D), draw(B, Hkv, 2048, Dv)
    sinks = torch.randn(Hq, device="cuda")
    for S in LENGTHS:
        q, caches = draw(B, Hq, 1, D), [t.clone() for t in whole]
        for t in caches:
            t[:, :, S:] = float("nan")
        k, v = (LAYOUTS[layout](t, S) for t in caches)
        lens = (S - 7 * torch.arange(B, device="cuda")).int()
        bounds = torch.stack([lens // 9, lens], -1)[:, None, None].contiguous()
        given = {"sinks": sinks, "kv_lens": lens, "key_ranges": bounds}
        options = {name: given[name] for name in small.split()}
        out, call = fa_ops.attention(q, k, v, **options), attention_call(q, k, v, **options)
        exact = call._replace(query=q.double(), key=k.double(), value=v.double())
        assert_within_budget(f"{S} keys", out, reference.dense(exact)[0], naive(call)[0])
    families = {(S.bit_length(), (S - 1).bit_length()) for S in LENGTHS}
    assert len(checked) == len(planning._plans) == len(families) < len(planning._prepared)


def test_growing_latent_caches():
    whole = draw(2, 1, 2048, 576)
    for S in LENGTHS:
        q, k = draw(2, 16, 1, 576), whole[:, :, :S].clone()
        out = fa_ops.attention(q, k, k[..., :512], scale=0.07)
        call = attention_call(q, k, k[..., :512], scale=0.07)
        expected, _ = reference.dense(attention_call(*(t.double() for t in call[:3]), scale=0.07))
        assert_within_budget(f"{S} keys", out, expected, naive(call)[0])
