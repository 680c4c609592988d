"""The Hopper kernels without a GPU: no spills, asynchronous products, shared memory that fits."""

import dataclasses
import itertools
import os
import re
import threading

import pytest
import torch

pytest.importorskip(
    "nvidia.cu13", reason="NVRTC (pip install nvidia-cuda-nvrtc) compiles these kernels"
)
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper import backward, configs, decode, tangents
from fa_ops.backends.hopper.kernel_plan import macros
from fa_ops.backends.hopper.runtime import launch, nvrtc
from tests.compile_only.configurations import BEFORE  # noqa: E402
from tests.compile_only.sass import disassembled, unwritten_uniform_registers  # noqa: E402

OFF = dict.fromkeys(
    (
        "HAS_WINDOW",
        "HAS_LEFT",
        "HAS_KV_LENS",
        "HAS_RANGES",
        "HAS_SOFTCAP",
        "HAS_ALIBI",
        "HAS_SINKS",
        "HAS_MASK",
        "HAS_DROPOUT",
        "SPLITS_GROUP",
    ),
    0,
)
FEATURES = (
    {}, {"HAS_WINDOW": 1}, {"HAS_WINDOW": 1, "HAS_MASK": 1},
    {"HAS_WINDOW": 1, "HAS_DROPOUT": 1}, dict.fromkeys(OFF, 1),
)  # fmt: skip
FEATURE_IDS = ["full", "causal", "mask", "dropout", "all"]
SERIALISED = ("C7510", "C7512", "C7513", "C7514", "C7515")


def compiled(folder, kind, config, **features):
    """(SASS, log) of all entry points of a dense kernel."""
    defines = {"SPLITS_KEYS": 0} | OFF | features | config.defines() | {"IS_BF16": 1}
    if kind == "forward":
        defines["SHARED_BYTES"] = config.shared_bytes(bool(defines["HAS_MASK"]))
    if kind == "backward":
        return compiled_entries(folder, kind, backward.entries_of(config, defines), defines)
    return compiled_entries(folder, kind, [launch.Entry(kind, 0)], defines)


# What has no products, and takes half a second each to disassemble.
WITHOUT_PRODUCTS = {"preprocess", "clip_ranges", "postprocess", "forward_combine"}
WITHOUT_PRODUCTS.update(*BEFORE.values())


def compiled_entries(folder, kind, entries, defines):
    """(SASS, log) of entry points, one behind the other; SASS of those with products alone."""
    sass, logs = "", ""
    for entry in entries:
        program = nvrtc.program(kind, entry.name, defines)
        cubin, log = nvrtc.compile_source(program, "--ptxas-options=-v")
        sass += "" if entry.name in WITHOUT_PRODUCTS else disassembled(cubin, folder)
        logs += log
    return sass, logs


def assert_clean(log, spilled_bytes=0):
    assert not [code for code in SERIALISED if code in log]
    spills = re.findall(r"Function properties for (\w+)\n.*?(\d+) bytes spill stores", log)
    assert spills
    for name, found in spills:
        # what computes rows again calls a function, and keeps things aside meanwhile
        assert int(found) <= (200 if name == "postprocess" else spilled_bytes), name


# Every feature with the fewest, usual and most registers; other dimensions causal, and with all
# features at once.
FORWARD = [
    *itertools.product(((64, 64), (128, 128), (256, 256)), FEATURE_IDS),
    *itertools.product(((192, 192), (192, 128)), ("causal", "all")),
]


@pytest.mark.parametrize("dims, features", FORWARD, ids=str)
def test_forward(dims, features, tmp_path):
    assert_forward(dims, FEATURES[FEATURE_IDS.index(features)], tmp_path)


ODD_DIMS = ((40, 40), (80, 80), (96, 72), (112, 112), (160, 160))


@pytest.mark.parametrize("number, dims", list(enumerate(ODD_DIMS)), ids=str)
def test_forward_of_other_dims(number, dims, tmp_path):
    assert_forward(dims, FEATURES[number], tmp_path)


@pytest.mark.parametrize(
    "dims, options, tile",
    [
        ((72, 72), {}, (192, 96)),
        ((112, 64), {"few_registers": True}, (192, 96)),
        ((72, 72), {"differs_by_row": True}, (192, 96)),
        ((80, 80), {"differs_by_row": True}, (128, 128)),
        ((80, 80), {"bias_bits": 16}, (128, 128)),
        ((80, 80), {"page": 64}, (128, 128)),
        ((64, 64), {}, (256, 64)),
        ((120, 120), {}, (128, 128)),
        ((128, 64), {}, (128, 128)),
    ],
    ids=str,
)
def test_head_dims_between_64_and_128_have_three_consumers(dims, options, tile):
    config = configs.forward_config(*dims, **options)
    assert (config.block_m, config.block_n) == tile


def steps(features):
    """Of a product over features."""
    return -(-features // 16)


def assert_forward(dims, features, tmp_path):
    few_registers = bool(features.keys() & {"HAS_MASK", "HAS_DROPOUT"})
    config = configs.forward_config(*dims, few_registers=few_registers)
    sass, log = compiled(tmp_path, "forward", config, **features)
    # the copying warp has 32 or 40 registers and keeps up to four words aside, those that read
    # masks up to eight; all options at once are no main configuration
    aside = 32 if "HAS_MASK" in features else 16
    assert_clean(log, spilled_bytes=200 if len(features) > 2 else aside)
    # scores: one product per 16 features, first block and loop; output: one per 16 keys, loop and
    # last block
    assert sass.count("HGMMA") == 2 * steps(config.head_features) + 2 * (config.block_n // 16)
    assert sass.count("WARPGROUP.DEPBAR") == 4
    # one thread copies, and the compiler knows it: no loop over lanes around a copy
    assert sass.count("UTMALDG") > 0 and sass.count("ELECT") == 1
    assert not unwritten_uniform_registers(sass)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("lengths", [0, 1])
def test_tangents(dims, lengths, tmp_path):
    config = tangents.tangent_config(*dims)
    features = {"window": 1, "left": lengths, "kv_lens": lengths, "grad_out": 1}
    defines = macros(config, torch.bfloat16, **features)
    sass, log = compiled_entries(tmp_path, "tangent", [launch.Entry("tangent", 0)], defines)
    assert_clean(log)
    # three products of scores, and two that add to the output's tangent
    assert sass.count("HGMMA") == 3 * steps(config.head_features) + 2 * (config.block_n // 16)
    assert not unwritten_uniform_registers(sass)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    "dims, whole_rows",
    [((64, 64), 0), ((128, 128), 1), ((128, 128), 0), ((192, 128), 1), ((256, 256), 1)],
)
def test_forward_over_pages(dims, whole_rows, page, tmp_path):
    config = configs.forward_config(*dims, page=page)
    assert config.whole_rows == (dims[0] > 64)
    config = dataclasses.replace(config, whole_rows=bool(whole_rows))
    sass, log = compiled(tmp_path, "forward", config, HAS_WINDOW=1, HAS_KV_LENS=1)
    # with four consumers the warp that copies and finds pages has 32 registers
    assert_clean(log, spilled_bytes=80 if config.head_dim == 64 else 0)
    assert sass.count("HGMMA") == 2 * (config.head_dim // 16) + 2 * (config.block_n // 16)
    # one thread of each of two warps copies
    assert sass.count("WARPGROUP.DEPBAR") == 4 and sass.count("ELECT") == 2
    assert sass.count("UTMALDG.5D") == (2 * config.block_n // config.copy_keys if whole_rows else 0)
    assert not unwritten_uniform_registers(sass)


def test_larger_pages_run_the_kernel_of_pages_of_64():
    assert configs.forward_config(128, 128, page=192) == configs.forward_config(128, 128, page=64)


@pytest.mark.parametrize("D, heads, page", [(64, 4, 0), (128, 7, 0), (128, 4, 64)])
def test_forward_with_packed_heads(D, heads, page, tmp_path):
    config = dataclasses.replace(configs.forward_config(D, D, page=page), packed_heads=heads)
    sass, log = compiled(tmp_path, "forward", config, HAS_WINDOW=1, HAS_KV_LENS=1, HAS_SINKS=1)
    assert_clean(log)
    assert sass.count("HGMMA") == 2 * (D // 16) + 2 * (config.block_n // 16)
    assert sass.count("WARPGROUP.DEPBAR") == 4 and sass.count("ELECT") == (2 if page else 1)
    assert not unwritten_uniform_registers(sass)


SPLIT = {"HAS_WINDOW": 1, "HAS_KV_LENS": 1, "SPLITS_KEYS": 1}


@pytest.mark.parametrize("D, heads, page", [(64, 8, 0), (128, 4, 0), (256, 2, 64)])
def test_forward_for_parts_of_the_keys(D, heads, page, tmp_path):
    config = dataclasses.replace(configs.forward_config(D, D, page=page), packed_heads=heads)
    sass, log = compiled(tmp_path, "forward", config, **SPLIT)
    assert_clean(log, spilled_bytes=32 if D == 64 else 0)
    assert sass.count("WARPGROUP.DEPBAR") == 4 and not unwritten_uniform_registers(sass)
    defines = {"IS_BF16": 1, "HAS_SINKS": 1, "MAX_SPLITS": 32}
    entry = launch.Entry("forward_combine", 256)
    assert_clean(compiled_entries(tmp_path, "forward_combine", [entry], defines)[1])


@pytest.mark.parametrize("D, page, splits", [(64, 16, 0), (128, 64, 1)])
def test_forward_of_packed_queries_over_pages(D, page, splits, tmp_path):
    config = configs.forward_config(D, D, page=page)
    config = dataclasses.replace(config, packed_heads=4, packs_queries=True)
    assert config.shared_bytes() <= configs.SHARED_LIMIT
    sass, log = compiled(tmp_path, "forward", config, **SPLIT | {"SPLITS_KEYS": splits})
    assert_clean(log)
    assert sass.count("WARPGROUP.DEPBAR") == 4 and not unwritten_uniform_registers(sass)


@pytest.mark.parametrize("Sq, registers", [(50, 80), (77, 80)])
def test_forward_with_several_ctas_on_a_multiprocessor(Sq, registers, tmp_path):
    config = configs.short_config(configs.forward_config(64, 64), Sq, Sq)
    assert config.ctas * config.threads * registers <= 65536
    for features in ({}, {"HAS_WINDOW": 1}, {"HAS_KV_LENS": 1, "HAS_SOFTCAP": 1, "HAS_SINKS": 1}):
        sass, log = compiled(tmp_path, "forward", config, **features)
        assert_clean(log, spilled_bytes=32 if len(features) > 1 else 0)
        assert f"Used {registers} registers" in log
        assert sass.count("WARPGROUP.DEPBAR") == 4


BACKWARD_FEATURES = dict(zip(FEATURE_IDS, FEATURES)) | {
    "parts": {"HAS_WINDOW": 1, "SPLITS_GROUP": 1},
    "lengths": {"HAS_WINDOW": 1, "HAS_KV_LENS": 1},
}


@pytest.mark.parametrize("features", BACKWARD_FEATURES.values(), ids=BACKWARD_FEATURES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_backward_in_one_pass(head_dim, features, tmp_path):
    assert_one_pass(head_dim, features, tmp_path)


# dQ by rows; by whole blocks in turn, with 64 columns and more; by halves of which one is not full
@pytest.mark.parametrize(
    "head_dim, features",
    [
        (40, {}),
        (40, {"HAS_WINDOW": 1, "HAS_MASK": 1}),
        (80, {}),
        (96, {"HAS_WINDOW": 1, "HAS_DROPOUT": 1}),
        (96, {"HAS_WINDOW": 1, "SPLITS_GROUP": 1}),
        (112, {"HAS_WINDOW": 1}),
    ],
    ids=str,
)
def test_backward_of_other_dims_in_one_pass(head_dim, features, tmp_path):
    assert_one_pass(head_dim, features, tmp_path)


@pytest.mark.parametrize(
    "head_dim, few_registers, block_m, alternates, columns",
    [
        (40, False, 128, False, 40),
        (40, True, 64, True, 40),
        (64, True, 64, False, 64),
        (72, False, 64, True, 72),
        (96, True, 64, True, 96),
        (104, False, 64, False, 128),
        (128, False, 64, False, 128),
    ],
)
def test_consumers_share_the_gradients_of_queries(
    head_dim, few_registers, block_m, alternates, columns
):
    """By queries, by halves of the columns, or by blocks where a half would cross 64 features."""
    config = configs.backward_config(head_dim, head_dim, few_registers=few_registers)
    assert (config.block_m, config.alternates) == (block_m, alternates)
    assert config.sum_features == columns
    assert not configs.backward_config(head_dim, head_dim, deterministic=True).alternates


@pytest.mark.parametrize("sums_rows", [False, True])
@pytest.mark.parametrize(
    "head_dim, features",
    [
        (64, {}),
        (64, {"HAS_WINDOW": 1}),
        (128, {"HAS_WINDOW": 1}),
        (120, {}),
    ],
    ids=str,
)
def test_backward_for_whole_heads(head_dim, features, sums_rows, tmp_path):
    assert_one_pass(head_dim, features, tmp_path, whole_heads=True, sums_rows=sums_rows)


def test_backward_with_ranges_has_one_slot_for_keys(tmp_path):
    assert_one_pass(64, {"HAS_RANGES": 1}, tmp_path, differs_by_row=True)


def assert_one_pass(head_dim, features, tmp_path, **options):
    few_registers = bool(features.keys() & {"HAS_MASK", "HAS_DROPOUT", "HAS_SOFTCAP"})
    config = configs.backward_config(head_dim, head_dim, few_registers=few_registers, **options)
    assert config.shared_bytes <= configs.SHARED_LIMIT
    sass, log = compiled(tmp_path, "backward", config, **features)
    # around the loop over queries, what belongs to a tile; a softcap keeps its derivative beside
    # everything else
    assert_clean(log, spilled_bytes=300 if features.get("HAS_SOFTCAP") else 48)
    assert not unwritten_uniform_registers(sass)
    assert_notes(sass, config, features)
    # S and dP: one product per 16 features; dV and dK: one per 16 queries; dQ: one per 16 keys. It
    # comes a step later: the first step has none and a dK of its own, and the last dQ comes alone:
    # at the end of a tile, or with two slots for keys at the end and after a tile without queries
    scores, grads = steps(config.head_features), config.block_m // 16
    queries = (1 + config.key_slots) * (config.block_n // 16)
    assert sass.count("HGMMA") == 2 * scores + 3 * grads + queries
    assert sass.count("WARPGROUP.DEPBAR") == 4 + config.key_slots


# Every feature at the most registers of both kinds of consumers, which own one gradient or both;
# other dimensions causal, and with all features at once.
TWO_PASSES = [
    *itertools.product(((128, 128), (256, 256)), BACKWARD_FEATURES),
    *itertools.product(((64, 64), (128, 64), (192, 128), (192, 192)), ("causal", "all")),
]


@pytest.mark.parametrize("dims, features", TWO_PASSES, ids=str)
def test_backward_in_two_passes(dims, features, tmp_path):
    assert_two_passes(dims, BACKWARD_FEATURES[features], tmp_path)


@pytest.mark.parametrize("number, dims", list(enumerate(ODD_DIMS)), ids=str)
def test_backward_of_other_dims_in_two_passes(number, dims, tmp_path):
    assert_two_passes(dims, FEATURES[number], tmp_path)


def assert_two_passes(dims, features, tmp_path):
    config = configs.backward_config(*dims, deterministic=True)
    sass, log = compiled(tmp_path, "backward", config, **features)
    assert_clean(log, spilled_bytes=160 if features.get("HAS_SOFTCAP") and dims[0] == 128 else 24)
    assert not unwritten_uniform_registers(sass)
    assert_notes(sass, config, features)
    products = kernel_counts(sass, "HGMMA")
    scores = steps(config.head_features) + steps(config.value_features)  # S and dP
    assert products["backward"] == scores + 2 * (config.block_m // 16)
    assert products["backward_queries"] == scores + config.query_block_n // 16
    # of the consumers that own one gradient each, three; of those that own both
    waits = kernel_counts(sass, "WARPGROUP.DEPBAR")
    assert waits == {"backward": 6 if config.is_wide else 3, "backward_queries": 4}


def test_passes_that_overlap(tmp_path):
    """The first lets the second begin after its own wait, and the second waits at its end."""
    config = configs.backward_config(160, 160)
    sass, log = compiled(tmp_path, "backward", config, HAS_WINDOW=1)
    assert_clean(log, spilled_bytes=24)
    waits = [re.findall(r"ACQBULK|PREEXIT|EXIT", part) for part in sass.split("Function : ")[1:]]
    names = re.findall(r"Function : (\w+)", sass)
    found = dict(zip(names, waits))
    first, second = found["backward"], found["backward_queries"]
    assert first.index("ACQBULK") < first.index("PREEXIT") and first.count("PREEXIT") == 1
    assert second.index("PREEXIT") < second.index("ACQBULK") and second.count("ACQBULK") == 1


def assert_notes(sass, config, features):
    """A product with 0 for each gradient of a thread, and none where sums are looked at later: no
    compiler may think that it is 0."""
    found = {
        name: len(re.findall(r"FFMA\S* R\d+, RZ, R\d+, R", body))
        for name, _, body in (part.partition("\n") for part in sass.split("Function : ")[1:])
    }
    gradients = (config.head_features + config.value_features) // 2
    if config.whole_heads:  # dQ too, after each of its products
        gradients += (1 + config.key_slots) * config.block_m * config.sum_features // 256
        gradients += 2 * 8  # of a row that is computed again, before that and between keys
    assert found["backward"] == (0 if features.get("SPLITS_GROUP") else gradients)
    assert found.get("backward_queries", config.head_features // 2) == config.head_features // 2


BIAS_BITS = pytest.mark.parametrize("bits", [16, 32])


@BIAS_BITS
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_forward_with_a_bias(dims, bits, tmp_path):
    config = configs.forward_config(*dims, bits)
    sass, log = compiled(tmp_path, "forward", config, HAS_WINDOW=1)
    assert_clean(log)
    assert sass.count("HGMMA") == 2 * (config.head_dim // 16) + 2 * (config.block_n // 16)
    assert sass.count("WARPGROUP.DEPBAR") == 4
    # what hands the bias's tile back waits until it has been read, twice
    assert sass.count("FENCE.VIEW.ASYNC") == 3
    # twice, 16 columns at once; float32 without ldmatrix
    assert sass.count("LDSM") == (config.block_n // 8 if bits == 16 else 0)
    assert not unwritten_uniform_registers(sass)


@BIAS_BITS
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_backward_with_a_bias(dims, bits, tmp_path):
    config = configs.backward_config(*dims, deterministic=dims == (64, 64), bias_bits=bits)
    sass, log = compiled(tmp_path, "backward", config, HAS_WINDOW=1)
    assert_clean(log, spilled_bytes=12)
    assert not unwritten_uniform_registers(sass)
    defines = configs.MaskGradientConfig(config).defines() | {"HAS_WINDOW": 1, "IS_BF16": 1}
    entry = launch.Entry("mask_gradient", 0)
    defines = OFF | config.defines() | defines
    sass, log = compiled_entries(tmp_path, "mask_gradient", [entry], defines)
    assert_clean(log, spilled_bytes=12)
    assert kernel_counts(sass, "HGMMA", "mask")["mask_gradient"] == sum(dims) // 16
    assert kernel_counts(sass, "WARPGROUP.DEPBAR", "mask")["mask_gradient"] == 1
    assert not unwritten_uniform_registers(sass)


def kernel_counts(sass, instruction, start="backward"):
    bodies = (part.partition("\n") for part in sass.split("Function : ")[1:])
    return {n: body.count(instruction) for n, _, body in bodies if n.startswith(start)}


# With every option and 16 rows, whatever the pages; without options, as most calls are.
DECODE = [
    *((64, 16, 16), (128, 0, 16), (128, 64, 16), (256, 16, 16)),
    *((64, 0, 8), (128, 0, 8), (128, 64, 8), (256, 64, 8), (128, 1, 8), (256, 2, 8)),
]


@pytest.mark.parametrize("head_dim, page, rows", DECODE)
def test_decode(head_dim, page, rows, tmp_path):
    config = configs.decode_config(head_dim, head_dim, rows, page)
    assert config.shared_bytes <= configs.SHARED_LIMIT
    options = dict.fromkeys(("softcap", "alibi", "sinks"), rows == 16)
    defines = macros(config, torch.bfloat16, paged=page > 0, **options)
    entries = decode.entries_of(config)
    sass, log = compiled_entries(tmp_path, "decode", entries, defines)
    # at 256 output and queries take 192 registers; what spills is outside the loop
    assert_clean(log, spilled_bytes=64 if head_dim == 256 else 0)
    assert sass.count("HMMA") == 2 * (head_dim // 16) + head_dim // 8
    # warps merge together, and the compiler knows it: no other code for lanes that come one by one
    assert not kernel_counts(sass, "WARPSYNC.COLLECTIVE", "combine")["combine"]
    assert sass.count("UTMALDG") > 0 and (sass.count("LDGSTS") > 0) == (page in (1, 2))
    assert not unwritten_uniform_registers(sass)


# Scales: of rows of the batch, of pages, of tokens.
@pytest.mark.parametrize(
    "dims, page, rows, scales",
    [((128, 128), 0, 8, 1), ((192, 128), 16, 16, 2), ((256, 256), 64, 16, 3), ((64, 64), 1, 8, 2)],
)
def test_decode_of_e4m3(dims, page, rows, scales, tmp_path):
    config = configs.decode_config(*dims, rows, page, is_e4m3=True, scales=scales)
    assert config.shared_bytes <= configs.SHARED_LIMIT
    options = dict.fromkeys(("softcap", "alibi", "sinks"), rows == 16)
    defines = macros(config, torch.bfloat16, paged=page > 0, **options)
    entries = decode.entries_of(config)
    sass, log = compiled_entries(tmp_path, "decode", entries, defines)
    assert_clean(log)
    assert sass.count("HMMA.16816.F32 ") == 2 * (dims[0] // 16) + dims[1] // 8
    # two numbers each; those beside the products are of rows that are attended exactly
    unpacked = kernel_counts(sass, "E4M3.UNPACK_B", "decode")["decode"]
    assert 0 <= unpacked - sum(dims) // 4 <= 8
    assert sass.count("UTMALDG") > 0 and sass.count("LDSM") == sum(dims) // 32
    assert not unwritten_uniform_registers(sass)


@pytest.mark.parametrize("kind", BEFORE)
def test_kernels_that_run_before_others_do_not_spill(kind, tmp_path):
    entries = [launch.Entry(name, 0) for name in BEFORE[kind]]
    assert_clean(compiled_entries(tmp_path, kind, entries, {})[1])


@pytest.mark.parametrize("page", [0, 1, 16, 64])
def test_mla(page, tmp_path):
    config = configs.mla_config(page)
    assert config.shared_bytes <= configs.SHARED_LIMIT
    defines = macros(config, torch.bfloat16, paged=page > 0)
    sass, log = compiled_entries(tmp_path, "mla", decode.entries_of(config), defines)
    assert_clean(log, spilled_bytes=32 if page == 16 else 0)  # the copying warp has 40 registers
    # one product per 16 features, and one per 16 keys of a warpgroup's own tiles and of the
    # other's, under scores and without
    assert sass.count("HGMMA") == 576 // 16 + 3 * (64 // 16)
    assert (sass.count("LDGSTS") > 0) == (page == 1)
    # six, of which ptxas adds one where a new reference rescales what no product in flight writes
    assert sass.count("WARPGROUP.DEPBAR") == 6 and log.count("C7517") == 1
    assert not kernel_counts(sass, "WARPSYNC.COLLECTIVE", "combine")["combine"]
    assert not unwritten_uniform_registers(sass)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_float16_compiles(kind):
    config = getattr(configs, f"{kind}_config")(64, 64)
    defines = macros(config, torch.float16)
    assert nvrtc.cubins(kind, [kind], defines)[0].startswith(b"\x7fELF")


DIMS = (8, 64, 72, 96, 128, 160, 192, 200, 256)


@pytest.mark.parametrize("dims", list(itertools.product(DIMS, DIMS)))
def test_shared_memory_fits(dims):
    if configs.padded(dims[1]) <= configs.padded(dims[0]):
        assert configs.forward_config(*dims).shared_bytes(has_mask=True) <= configs.SHARED_LIMIT
        for deterministic in (False, True):
            config = configs.backward_config(*dims, deterministic)
            assert config.shared_bytes <= configs.SHARED_LIMIT
            assert config.adds_dq or config.query_shared_bytes <= configs.SHARED_LIMIT
        skips = configs.forward_config(*dims, few_registers=True, skips_tiles=True)
        assert skips.shared_bytes(has_mask=True) <= configs.SHARED_LIMIT
        for bits, deterministic in itertools.product((16, 32), (False, True)):
            for skips in (False, True):
                config = configs.forward_config(*dims, bits, skips_tiles=skips)
                assert config.shared_bytes() <= configs.SHARED_LIMIT
            config = configs.backward_config(*dims, deterministic, bits)
            assert config.shared_bytes <= configs.SHARED_LIMIT
            assert config.adds_dq or config.query_shared_bytes <= configs.SHARED_LIMIT
            gradient = configs.MaskGradientConfig(config)
            assert gradient.stages >= 1 and gradient.shared_bytes <= configs.SHARED_LIMIT


class TestCache:
    DEFINES = macros(configs.forward_config(64, 64), torch.bfloat16)

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("FA_OPS_CACHE_DIR", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def count_compilations(self, monkeypatch):
        calls, real = [], nvrtc.compile_source
        monkeypatch.setattr(nvrtc, "compile_source", lambda *a: calls.append(1) or real(*a))
        return calls

    def code(self):
        return nvrtc.cubins("forward", ["forward"], self.DEFINES)[0]

    def test_second_use_reads_the_file(self, folder, monkeypatch):
        calls = self.count_compilations(monkeypatch)
        assert self.code() == self.code()
        assert len(calls) == 1
        (entry,) = folder.iterdir()
        assert entry.stat().st_mode & 0o077 == 0 and folder.stat().st_mode & 0o077 == 0

    def test_a_truncated_entry_is_compiled_again(self, folder, monkeypatch):
        code = self.code()
        (entry,) = folder.iterdir()
        entry.write_bytes(entry.read_bytes()[:1000])
        calls = self.count_compilations(monkeypatch)
        assert self.code() == code
        assert calls and entry.read_bytes().startswith(code)

    def test_entries_are_programs_of_their_own(self, folder, tmp_path, monkeypatch):
        names = ["pack_rows", "pack_columns"]
        codes = nvrtc.cubins("mask", names, {})
        for name, code in zip(names, codes):
            sass = disassembled(code, tmp_path)
            assert re.findall(r"Function : (\w+)", sass) == [name]
        assert len(list(folder.iterdir())) == 2 and not nvrtc.uncached("mask", names, {})
        # in any order, and what one of them lacks alone
        (folder / nvrtc._path(nvrtc.program("mask", names[1], {}))).unlink()
        calls = self.count_compilations(monkeypatch)
        assert nvrtc.uncached("mask", names, {}) == [names[1]]
        assert nvrtc.cubins("mask", names[::-1], {}) == codes[::-1]
        assert len(calls) == 1

    def test_entries_compile_at_the_same_time(self, monkeypatch):
        together = threading.Barrier(2, timeout=30)

        def compile_source(program):
            together.wait()
            return program.source.encode(), ""

        monkeypatch.setattr(nvrtc, "compile_source", compile_source)
        codes = nvrtc.cubins("mask", ["pack_rows", "pack_columns"], {})
        assert len(set(codes)) == 2

    def test_an_error_in_a_thread_is_the_callers(self, folder, monkeypatch):
        broken = nvrtc.Program('extern "C" __global__ void k() { not_declared(); }')
        whole = nvrtc.program
        monkeypatch.setattr(
            nvrtc, "program", lambda *of: broken if of[1] == "pack_columns" else whole(*of)
        )
        with pytest.raises(nvrtc.CompileError, match="not_declared"):
            nvrtc.cubins("mask", ["pack_rows", "pack_columns"], {})

    def test_a_source_error_shows_the_compiler_log(self):
        with pytest.raises(nvrtc.CompileError, match="not_declared"):
            nvrtc.compile_source(
                nvrtc.Program('extern "C" __global__ void k() { not_declared(); }')
            )


def test_a_missing_nvrtc_is_named(monkeypatch):
    monkeypatch.setenv("FA_OPS_NVRTC", os.devnull)
    nvrtc.nvrtc.cache_clear()
    try:
        with pytest.raises(nvrtc.CompileError, match="NVRTC 12.1 or newer was not found"):
            nvrtc.nvrtc()
    finally:
        monkeypatch.undo()
        nvrtc.nvrtc.cache_clear()
