"""Many queries against a cache on the host: what the forward's kernel finds, and who takes it."""

import struct

import pytest
import torch

import fa_ops
from fa_ops.backends import hopper
from fa_ops.backends.hopper import configs, decode, forward
from fa_ops.backends.hopper.runtime import nvrtc
from fa_ops.call.call import attention_call
from fa_ops.plans import dispatch

LENS = torch.tensor([30, 500], dtype=torch.int32)


@pytest.fixture
def driver(driver):
    driver.struct_bytes = 704
    return driver


def paged(page=16, Dv=64, Sq=64, Hq=64, row=40):
    """A call over pages, whose table is part of a larger one."""
    q = torch.randn(2, Hq, Sq, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(90, page, 4, width, dtype=torch.bfloat16) for width in (64, Dv))
    table = torch.arange(2 * (row + 5), dtype=torch.int32).view(2, row + 5)[:, :row]
    return attention_call(
        q, k, v, is_causal=True, kv_lens=LENS, page_table=table, over_cache=True
    )  # fmt: skip


def told(params: bytes, at: int) -> tuple[tuple[int, ...], ...]:
    """Of a tensor map as the driver noted it: where, sizes, steps in bytes, and the box."""
    rank = params[at + 9]
    where = struct.unpack_from("<Q", params, at)
    at += 11
    sizes = struct.unpack_from(f"<{rank}Q", params, at)
    steps = struct.unpack_from(f"<{rank - 1}Q", params, at + 8 * rank)
    box = struct.unpack_from(f"<{rank}I", params, at + 16 * rank - 8)
    return where, sizes, steps, box


@pytest.mark.parametrize("page", [16, 32, 64, 192])
def test_the_kernel_finds_pages_and_their_table(driver, page):
    call = paged(page)
    (q, k, v), pages = call[:3], call.operands.page_table
    out, lse = forward.cached_forward(call)
    params = driver.launched[-1].params
    row = 4 * 64 * 2
    for at, x in ((128, k), (256, v)):
        where, sizes, steps, box = told(params, at)
        assert where == (x.data_ptr(),) and sizes == (64, page, 4, 90)
        assert steps == (row, 128, page * row) and box == (64, min(page, 64), 1, 1)
    words = struct.unpack_from("<14Q", params, 384)
    assert words[:3] == (out.data_ptr(), lse.data_ptr(), LENS.data_ptr())
    assert words[11:] == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    steps = struct.unpack_from("<9q", params, 496)
    assert steps[3:6] == (page * row // 2, 64, row // 2)
    sizes = struct.unpack_from("<7i", params, 568)
    assert sizes == (2, 64, 16, 64, 40 * page, 64, 64)
    table = struct.unpack_from("<Q3i", params, 680)
    assert table == (pages.data_ptr(), 45, page, 90)
    assert out.shape == q.shape and out.transpose(1, 2).is_contiguous()


def test_copies_bring_pages_with_all_features_where_groups_of_keys_are_regular(driver):
    call, driver.struct_bytes = paged(), 712
    call = call._replace(query=torch.cat((call.query, call.query), -1))
    pages = torch.randn(90, 2, 16, 4, 128, dtype=torch.bfloat16)  # keys and values of a page
    k, v = pages[:, 0], pages[:, 1]
    forward.cached_forward(call._replace(key=k, value=v))
    params = driver.launched[-1].params
    row = 4 * 128 * 2
    for at, x in ((128, k), (256, v)):
        where, sizes, steps, box = told(params, at)
        assert where == (x.data_ptr(),) and sizes == (64, 8, 2, 89 * 4 + 2, 4)
        assert steps == (row, 128, 8 * row, 256) and box == (64, 8, 2, 2, 1)
    assert struct.unpack_from("<5i", params, 688) == (45, 16, 90, 4, 4)
    apart = torch.randn(90, 17, 4, 128, dtype=torch.bfloat16)[:, :16]  # 17 keys from page to page
    forward.cached_forward(call._replace(key=apart, value=apart))
    assert told(driver.launched[-1].params, 128)[3] == (64, 16, 1, 1)


@pytest.mark.parametrize("page", [0, 64])
def test_a_prepared_call_fills_the_same_struct(driver, page):
    call = paged().changed(alibi_slopes=torch.ones(64), sinks=torch.ones(64))
    if not page:
        k, v = (torch.randn(2, 4, 640, 64, dtype=torch.bfloat16) for _ in "kv")
        call = call.changed(key=k, value=v, page_table=None)
    given = *call[:3], call.operands
    run, of_backend = forward.prepare_cached(call), hopper.plan(call).prepare(call)
    # all but the results and the counter of tiles
    found = []
    for attend in (
        lambda: run(*given),
        lambda: of_backend(*given),
        lambda: forward.cached_forward(call),
    ):
        out, lse = attend()
        params = driver.launched[-1].params
        assert struct.unpack_from("<2Q", params, 384) == (out.data_ptr(), lse.data_ptr())
        found.append((params[:384], params[400:464], params[472:]))
    assert found[0] == found[1] == found[2]


def test_one_kernel_serves_all_lengths_and_tables(driver, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        nvrtc, "program", lambda source, entry, defines: compiled.append(defines) or entry
    )
    for Sq, row in ((256, 40), (500, 7), (1000, 3)):
        forward.cached_forward(paged(Sq=Sq, row=row))
    assert len(compiled) == 1
    found = [compiled[0][name] for name in ("IS_PAGED", "COPY_KEYS", "BLOCK_N", "PACKED_HEADS")]
    assert found == [1, 16, 64, 1]
    for Sq, row in ((64, 40), (17, 7), (77, 3)):  # tiles that one head does not fill
        forward.cached_forward(paged(Sq=Sq, row=row))
    assert len(compiled) == 2 and compiled[1]["PACKED_HEADS"] == 16


def test_a_table_without_pages_has_no_keys(driver):
    call = paged(row=0)
    out, _ = forward.cached_forward(call)
    (Sk,) = struct.unpack_from("<i", driver.launched[-1].params, 568 + 16)
    assert Sk == 0 and out.shape == call.query.shape
    decode.forward(call._replace(query=call.query[:, :8, :1]))
    assert driver.launched[-1].name == "decode"


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("page", [16, 32, 64, 192])
def test_blocks_are_whole_copies_of_whole_pages(dims, page):
    config = configs.forward_config(*dims, page=page)
    assert config.block_n % config.copy_keys == page % config.copy_keys == 0
    assert config.shared_bytes() <= configs.SHARED_LIMIT
    assert config.block_n // config.copy_keys <= 32


def test_which_kernel_a_cache_is_for():
    call = paged()
    assert hopper._cache_module(call) is forward and forward.cache_error(call) is None
    few = call.query[:, :16, :4]  # 4 queries of each of 4 heads
    assert hopper._cache_module(call._replace(query=few)) is decode


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: {"key": k[:, :4], "value": v[:, :4]}, "needs pages of 16, 32 or"),
        (lambda q, k, v: {"num_splits": 2}, "without num_splits"),
        (lambda q, k, v: {"new_key": q}, "does not write to caches"),
        (lambda q, k, v: {"key": k.half(), "value": v.half()}, "got float16 for queries"),
        (lambda q, k, v: {"value": v.repeat(1, 1, 1, 2)}, "value head dim"),
        (lambda q, k, v: {"scale": -1.0}, "needs a positive scale"),
        (lambda q, k, v: {"key_ranges": LENS}, "has no key_ranges"),
    ],
)
def test_what_it_does_not_take(change, message):
    call = paged()
    assert message in forward.cache_error(call.changed(**change(*call[:3])))


def test_the_choice_of_one_call_does_not_stand_for_another(monkeypatch):
    """Few and many queries of the same cache are attended by kernels with other limits."""
    monkeypatch.setattr(dispatch, "available_error", lambda name: None)
    monkeypatch.setattr(hopper, "_device_error", lambda q: None)
    monkeypatch.setattr(
        hopper,
        "cache_error",
        lambda call: hopper._cache_module(call).cache_error(call),
    )
    for module in (forward, decode):
        monkeypatch.setattr(
            module, "prepare", lambda call, name=module.__name__: lambda *args: (name, None)
        )
    call = paged()
    (q, k, v), table = call[:3], call.operands.page_table
    ranges = torch.zeros(2, 1, 1, 2, dtype=torch.int32)

    def attend(q):
        return fa_ops.attention_with_kv_cache(
            q, k, v, LENS, table, True, key_ranges=ranges, backend="hopper"
        )

    for _ in range(2):
        assert attend(q[:, :, :1]) == decode.__name__
        with pytest.raises(NotImplementedError, match="has no key_ranges for more than 16 queries"):
            attend(q[:, :, :2])
