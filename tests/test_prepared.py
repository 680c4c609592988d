"""Repeated eager calls: when they take the fast path by a prepared function, and when not."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fa_ops
from fa_ops import dispatch
from fa_ops.backends import cpu
from fa_ops.ops import checks, kv_cache, prepared

FAST = torch.tensor(7.0)


@pytest.fixture(autouse=True)
def preparing_backend(monkeypatch):
    monkeypatch.setattr(prepared, "_runs", {})
    monkeypatch.setattr(prepared, "_ways", {})
    monkeypatch.setattr(cpu, "prepare", lambda q, k, v, spec: lambda q, k, v: FAST, raising=False)
    cached = lambda *call: lambda with_lse, q, k, v, *tensors: (FAST, None)  # noqa: E731
    monkeypatch.setattr(cpu, "prepare_cached", cached, raising=False)


def qkv(Sk=5, **options):
    return [torch.randn(1, 2, S, 8, **options) for S in (5, Sk, Sk)]


def is_fast(*args, **options):
    fa_ops.attention(*args, **options)
    return fa_ops.attention(*args, **options) is FAST


def is_new(*args, **options):
    """Whether the call is prepared anew, because it differs from all earlier calls."""
    before = len(prepared._runs)
    fa_ops.attention(*args, **options)
    return len(prepared._runs) > before


def test_first_and_repeated_calls_take_the_fast_path():
    q, k, v = qkv()
    assert fa_ops.attention(q, k, v) is FAST  # each decoding step has a new length
    assert is_fast(q, k, v)
    assert is_fast(*qkv(), is_causal=True, window=(3, 0), softcap=2.0, scale=0.3)
    with torch.inference_mode():
        assert is_fast(*qkv())


def test_calls_with_other_properties_are_prepared_anew():
    q, k, v = qkv()
    assert is_new(q, k, v) and not is_new(q, k, v)
    for other in (q.double(), q.transpose(1, 2).contiguous().transpose(1, 2), q[:, :, :4]):
        others = (other, k.to(other.dtype), v.to(other.dtype))
        assert is_new(*others)
    assert is_new(q, k, v, is_causal=True)
    assert is_new(q, k, v, scale=0.5)
    with fa_ops.use_backend("reference"):
        assert is_new(q, k, v)
    assert is_new(q, k, v, backend="reference")


def test_gradients_and_tensor_options_take_the_operator():
    q, k, v = qkv(requires_grad=True)
    assert not is_fast(q, k, v)
    with torch.no_grad():
        assert is_fast(q, k, v)
        for options in (
            {"sinks": torch.zeros(2)},
            {"attn_mask": torch.ones(5, 5, dtype=torch.bool)},
            {"return_lse": True},
            {"dropout_p": 0.5},
        ):
            assert not is_fast(q, k, v, **options)


LENS = torch.tensor([3], dtype=torch.int32)
RANGES = torch.tensor([0, 3], dtype=torch.int32).view(1, 1, 1, 2)
SINKS = torch.zeros(2)


@pytest.mark.parametrize(
    "small",
    [
        {"kv_lens": LENS},
        {"key_ranges": RANGES},
        {"sinks": SINKS},
        {"kv_lens": LENS, "key_ranges": RANGES, "sinks": SINKS},
    ],
    ids=" and ".join,
)
def test_repeated_calls_receive_new_small_tensors(small, monkeypatch):
    def prepare(q, k, v, cache, spec):
        return lambda with_lse, q, k, v, *tensors: (tensors, None)

    monkeypatch.setattr(cpu, "prepare_cached", prepare)
    q, k, v = qkv(512)
    fa_ops.attention(q, k, v, **small)
    others = {name: t + 1 for name, t in small.items()}
    received = fa_ops.attention(q, k, v, **others)
    names = ("kv_lens", "page_table", "key_ranges", "alibi_slopes", "sinks")
    for name, tensor in zip(names, received, strict=True):
        assert tensor is others.get(name)
    assert is_new(q, k, v)
    assert is_new(q, k, v, **small, is_causal=True)


def test_small_tensors_take_the_fast_path_in_decoding_only(monkeypatch):
    for small in ({"kv_lens": LENS}, {"sinks": SINKS}):
        assert is_fast(*qkv(512), **small)
        assert not is_fast(*qkv(511), **small)
    monkeypatch.setattr(cpu, "cache_error", lambda *call: "cannot", raising=False)
    assert is_fast(*qkv(600), kv_lens=LENS)  # the choice for other lengths is reused
    assert not is_fast(*qkv(600), kv_lens=LENS, scale=2.0)


def test_key_ranges_with_other_strides_take_the_operator():
    assert is_fast(*qkv(512), key_ranges=RANGES)
    assert not is_fast(*qkv(512), key_ranges=RANGES.expand(1, 1, 5, 2))
    apart = torch.stack([RANGES, RANGES], -1)[..., 0]
    assert not is_fast(*qkv(512), key_ranges=apart)


def test_invalid_lengths_and_ranges_are_refused_every_time():
    q, k, v = qkv()
    for _ in range(2):
        with pytest.raises(TypeError, match="kv_lens must be int32"):
            fa_ops.attention(q, k, v, kv_lens=LENS.long())
        with pytest.raises(ValueError, match="key_ranges must have shape"):
            fa_ops.attention(q, k, v, key_ranges=RANGES[0])
        with pytest.raises(TypeError, match="kv_lens must be a Tensor"):
            fa_ops.attention(q, k, v, kv_lens=[3])
    assert not prepared._runs


def test_modes_transforms_and_the_profiler_observe_the_operator():
    q, k, v = qkv()
    assert is_fast(q, k, v)
    with FlopCounterMode(display=False) as flops:
        assert fa_ops.attention(q, k, v) is not FAST
    assert flops.get_total_flops() > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert fa_ops.attention(q, k, v).dtype == torch.bfloat16
    with torch.profiler.profile() as profile:
        fa_ops.attention(q, k, v)
    assert "fa::attention" in {event.key for event in profile.key_averages()}
    batched = torch.func.vmap(fa_ops.attention)(*(t[None] for t in (q, k, v)))
    assert batched.shape == (1, *q.shape)
    compiled = torch.compile(fa_ops.attention, backend="eager", fullgraph=True)
    assert compiled(q, k, v) is not FAST


def test_lazily_negated_tensors_take_the_operator():
    negated = torch.view_as_complex(torch.randn(1, 2, 8, 4, 2)).conj().imag
    same = negated.resolve_neg()
    assert negated.is_neg() and prepared.key_of(same, negated, same, ()) is None
    assert prepared.key_of(same, same, same, ()) is not None
    expected = torch.ops.fa.attention(same, same, same)
    torch.testing.assert_close(fa_ops.attention(negated, negated, negated), expected)


def test_invalid_calls_are_not_remembered():
    q, k, v = qkv()
    for _ in range(2):
        with pytest.raises(ValueError, match="head dimension"):
            fa_ops.attention(q, k[..., :4], v)
    with pytest.raises(TypeError, match="window"):
        fa_ops.attention(q, k, v, window=[[], 1])
    assert not prepared._runs


@pytest.mark.parametrize(
    "good, bad",
    [
        ({"is_causal": True}, {"is_causal": 1}),
        ({}, {"is_causal": 0}),
        ({"window": (3, 0)}, {"window": (3.0, 0)}),
        ({"scale": 1.0}, {"scale": Fraction(1)}),
        ({"softcap": 2.0}, {"softcap": Fraction(2)}),
        ({}, {"dropout_p": None}),
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused_even_if_equal_to_remembered_ones(good, bad):
    q, k, v = qkv()
    assert is_fast(q, k, v, **good)
    (name,) = bad
    with pytest.raises(TypeError, match=name):
        fa_ops.attention(q, k, v, **bad)


def test_equivalent_windows_are_the_same_call():
    q, k, v = qkv()
    assert is_fast(q, k, v, window=(3, None))
    assert fa_ops.attention(q, k, v, window=[3, -1]) is FAST
    assert is_new(q, k, v, window=(None, 3))
    for bad in ((), (3,), "3-", 3):
        with pytest.raises(TypeError, match="window must be a pair"):
            fa_ops.attention(q, k, v, window=bad)


def test_nested_tensors_are_refused_by_the_operator():
    rows = [torch.randn(2, n, 8) for n in (3, 4)]
    q = torch.nested.nested_tensor(rows, layout=torch.strided)
    with pytest.raises(NotImplementedError, match="fa::attention"):
        fa_ops.attention(q, q, q)
    with pytest.raises(NotImplementedError, match="fa::attention"):
        fa_ops.attention(*qkv(), kv_lens=q)


def test_empty_calls_are_not_remembered_and_the_cache_is_bounded(monkeypatch):
    q, k, v = qkv()
    assert fa_ops.attention(q[:, :, :0], k, v).shape == (1, 2, 0, 8)
    assert not prepared._runs
    monkeypatch.setattr(prepared, "_LIMIT", 2)
    for n in range(1, 5):
        assert is_fast(q[:, :, :n], k, v)
    assert len(prepared._runs) <= 2


@pytest.fixture
def checked(monkeypatch):
    """The names of the checks and of the backend selection, in the order of their calls."""
    names = []
    for module, name in ((checks, "dense"), (dispatch, "select"), (cpu, "cache_error")):
        original = getattr(module, name)
        spy = lambda *a, original=original, name=name, **k: names.append(name) or original(*a, **k)  # noqa: E731
        monkeypatch.setattr(module, name, spy)
    return names


@pytest.mark.parametrize("small", [{}, {"kv_lens": LENS, "sinks": SINKS}], ids=("plain", "small"))
def test_a_growing_cache_is_checked_once_and_prepared_in_every_step(small, checked, monkeypatch):
    lengths = []
    cached = lambda q, k, *call: lengths.append(k.shape[2]) or (lambda *call: (FAST, None))  # noqa: E731
    monkeypatch.setattr(cpu, "prepare_cached", cached)
    for Sk in range(512, 520):
        assert is_fast(*qkv(Sk), **small)
        assert checked == ["dense", "select", "cache_error"]
    assert lengths == list(range(512, 520)) and len(prepared._runs) == 8
    assert is_new(*qkv(520), **small, is_causal=True) and len(checked) == 6
    with pytest.raises(ValueError, match="value has length 520, but key's is 521"):
        fa_ops.attention(*qkv(521)[:2], qkv(520)[2], **small)


def test_strided_features_are_refused_for_unaligned_tensors_too():
    def off(*shape):
        return torch.zeros(1, 2, shape[0] * shape[1] + 1)[..., 1:].unflatten(2, shape)

    q, k, v = off(5, 8), off(600, 8), off(600, 4)
    assert is_fast(q, k, v) and is_fast(q, off(601, 8), off(601, 4))
    wide = off(601, 16)[..., ::2]
    with pytest.raises(ValueError, match="key must be contiguous in its last dimension"):
        fa_ops.attention(q, wide, off(601, 4))
    with pytest.raises(ValueError, match="value must be contiguous in its last dimension"):
        fa_ops.attention(q, off(601, 8), wide[..., :4])


def test_meta_tensors_have_results_and_are_not_remembered():
    for _ in range(2):
        assert fa_ops.attention(*qkv(device="meta")).shape == (1, 2, 5, 8)
    assert not prepared._runs


@pytest.fixture
def cached_calls(monkeypatch):
    """The arguments of prepared calls over caches, and the keys by which they are looked up."""
    calls, keys = [], []

    def find(key):
        keys.append(key)
        return lambda *args: calls.append(args) or ("out", "lse")

    monkeypatch.setattr(prepared, "find", find)
    return calls, keys


def test_calls_over_caches_pass_their_tensors_to_the_prepared_function(cached_calls):
    calls, _ = cached_calls
    q, k, v = qkv(512)
    call = fa_ops.attention_with_kv_cache
    assert call(q, k, v, LENS) == "out"
    table = torch.zeros(1, 4, dtype=torch.int32)
    assert call(q, k, v, LENS, table, return_lse=True) == ("out", "lse")
    assert calls == [(False, q, k, v, LENS, None), (True, q, k, v, LENS, table)]

    names = (
        "key_ranges", "alibi_slopes", "sinks", "key", "value", "k_scale", "v_scale", "rotary_cos",
        "rotary_sin", "unified_max",
    )  # fmt: skip
    for name in names:
        given = torch.ones(1)
        before = k._version
        call(q, k, v, LENS, **{name: given})
        assert calls[-1][:6] == (False, q, k, v, LENS, None)
        assert calls[-1][6:] == tuple(given if name == other else None for other in names)
        assert k._version == v._version == before + (name == "key")


def test_different_calls_over_caches_have_different_keys(cached_calls):
    _, keys = cached_calls
    q, k, v = qkv(512)
    other, call = torch.ones(2, 2), fa_ops.attention_with_kv_cache
    tables = [torch.zeros(1, n, dtype=torch.int32) for n in (4, 5)]
    options = (
        {}, *({"page_table": table} for table in tables), {"page_table": tables[0].long()},
        {"sinks": other}, {"sinks": other.t()[:1]}, {"alibi_slopes": other}, {"key": other},
        {"value": other}, {"sinks": other, "alibi_slopes": other}, {"is_causal": True},
        {"scale": 2.0}, {"window": (1, 2)}, {"softcap": 1.0}, {"num_splits": 2},
        {"batch_invariant": True}, {"rotary_interleaved": True}, {"backend": "cpu"},
        {"is_causal": 1}, {"num_splits": 2.0}, {"batch_invariant": 1}, {"rotary_interleaved": 1},
        {"scale": Fraction(2)}, {"softcap": Fraction(1)},
    )  # fmt: skip
    for one in options:
        call(q, k, v, LENS, **one)
    assert len(set(keys)) == len(keys) == len(options)
    call(q, k, v, LENS + 1, tables[0] + 1)
    assert keys[-1] == keys[1]
    call(q, k, v, LENS, window=[1, 2])
    assert keys[-1] in keys[:-1]
    with pytest.raises(TypeError, match="window must hold ints"):
        call(q, k, v, LENS, window=(1.0, 2))


def test_shared_values_and_matmul_precision_are_part_of_a_key(cached_calls, monkeypatch):
    _, keys = cached_calls
    q, k, _ = qkv(512)
    call = fa_ops.attention_with_kv_cache
    call(q, k, k[..., :4], LENS)
    call(q, k, k.clone()[..., :4], LENS)
    matmul = SimpleNamespace(fp32_precision="other")
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    call(q, k, k[..., :4], LENS)
    assert len(set(keys)) == 3


def test_calls_over_caches_with_parameters_or_lists_have_no_key(cached_calls):
    _, keys = cached_calls
    q, k, v = qkv(512)
    call = fa_ops.attention_with_kv_cache
    sinks = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="has no gradient"):
        call(q, k, v, LENS, sinks=sinks)
    with pytest.raises(TypeError, match="kv_lens must be a Tensor"):
        call(q, k, v, [3])
    assert not keys and not prepared._runs


READ, APPEND = kv_cache.READ, kv_cache.APPEND


@pytest.fixture
def prepared_tensors(monkeypatch):
    """The arguments of prepared calls over caches, which are remembered on the CPU as on CUDA."""
    calls = []

    def prepare(q, k, v, cache, spec):
        return lambda *args: calls.append(args) or (q.new_zeros(1), q.new_ones(1))

    monkeypatch.setattr(cpu, "prepare_cached", prepare)
    monkeypatch.setattr(prepared, "values_are_free", lambda q: True)
    return calls


def test_repeated_operator_calls_take_the_fast_path(prepared_tensors):
    q, k, v = qkv(512)
    new = torch.randn(1, 2, 1, 8)
    READ(q, k, v, LENS)
    APPEND(q, k, v, new, new, LENS)
    assert not prepared_tensors
    lens, before = LENS + 1, k._version
    assert READ(q, k, v, lens)[1].shape == (1,)
    with torch.no_grad():
        APPEND(q, k, v, new, new + 1, lens)
    one, other = prepared_tensors
    assert one[0] is other[0] is True
    assert [t.data_ptr() for t in one[1:5]] == [t.data_ptr() for t in (q, k, v, lens)]
    assert one[5:] == (None,) * 11
    assert torch.equal(other[9], new) and torch.equal(other[10], new + 1)
    assert other[5:9] == (None,) * 4 and other[11:] == (None,) * 5
    assert k._version == v._version == before + 1


def test_the_first_call_over_a_cache_is_checked_and_takes_the_fast_path(prepared_tensors):
    q, k, v = qkv(512)
    call, new = fa_ops.attention_with_kv_cache, torch.randn(1, 2, 1, 8)
    before = k._version
    assert call(q, k, v, LENS).shape == (1,)
    assert call(q, k, v, LENS, key=new, value=new, return_lse=True)[1].shape == (1,)
    assert len(prepared_tensors) == 2 and k._version == v._version == before + 1
    for bad in ({"kv_lens": LENS.long()}, {"sinks": torch.zeros(3)}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(bad))} "):
            call(q, k, v, **{"kv_lens": LENS} | bad)
    assert len(prepared_tensors) == len(prepared._runs) == 2


def test_different_operator_calls_are_prepared_separately(prepared_tensors):
    q, k, v = qkv(512)
    options = (
        {}, {"scale": 0.5}, {"window_left": 3}, {"window_right": 3}, {"softcap": 2.0},
        {"num_splits": 2}, {"batch_invariant": True}, {"is_causal": True}, {"backend": "cpu"},
        {"sinks": torch.zeros(2)}, {"alibi_slopes": torch.zeros(2)}, {"key_ranges": RANGES},
    )  # fmt: skip
    for one in options:
        READ(q, k, v, LENS, **one)
    with fa_ops.use_backend("reference"):
        READ(q, k, v, LENS)
    assert not prepared_tensors
    for one in options:
        READ(q, k, v, LENS, **one)
    assert len(prepared_tensors) == len(options)


def test_remembered_operator_calls_refuse_gradients(prepared_tensors):
    q, k, v = qkv(512)
    for _ in range(2):
        READ(q, k, v, LENS)
    with pytest.raises(ValueError, match="has no gradient"):
        READ(q.detach().requires_grad_(), k, v, LENS)
    with pytest.raises(ValueError, match="batch size"):
        READ(q, k[:, :, :], v[:0], LENS)


def test_lengths_on_the_cpu_are_checked_on_every_call():
    q, k, v = qkv(512)
    for _ in range(2):
        READ(q, k, v, LENS)
        with pytest.raises(ValueError, match="past the"):
            READ(q, k, v, LENS + 512)
    assert not prepared._runs


def test_calls_of_a_backend_without_prepare_take_the_operator(monkeypatch):
    monkeypatch.delattr(cpu, "prepare")
    q, k, v = qkv()
    assert not is_fast(q, k, v)
    assert list(prepared._runs.values()) == [None]
    assert dispatch.select(q, k, v, fa_ops.types.Spec()) is cpu
