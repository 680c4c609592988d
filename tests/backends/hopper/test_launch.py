"""Driver calls of the Hopper backend, with a driver that answers as told; layouts of parameters."""

import itertools
import struct
import threading
from functools import partial

import pytest
import torch

from fa_ops.backends import hopper
from fa_ops.backends.hopper import kernel_plan
from fa_ops.backends.hopper.runtime import launch, nvrtc, structs
from fa_ops.call.call import attention_call

# Driver calls of the Hopper backend, with a driver that answers as told.

load = launch._load  # the `driver` fixture replaces it


def start():
    launch.Kernel(None, 128, 0).launch((1, 1), 0, None)


def test_a_thread_without_a_context_gets_the_runtimes(driver):
    driver.answers["cuLaunchKernelEx"] = [201]
    start()
    assert driver.called == [
        "cuLaunchKernelEx", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuLaunchKernelEx"
    ]  # fmt: skip


@pytest.mark.parametrize("answers", [[700], [201, 201]])
def test_other_failures_are_raised_at_once(driver, answers):
    driver.answers["cuLaunchKernelEx"] = [*answers]
    with pytest.raises(launch.DriverError, match=rf"cuLaunchKernelEx failed: .*\({answers[-1]}\)"):
        start()
    assert driver.answers == {"cuLaunchKernelEx": []}


def test_nothing_is_asked_where_a_context_is(driver):
    start()
    assert driver.called == ["cuLaunchKernelEx"]


def test_tensor_maps_of_a_thread_without_a_context(driver):
    driver.answers["cuTensorMapEncodeTiled"] = [101]
    tensor_map = launch.TensorMap(torch.bfloat16, (1, 2, 3, 64), (384, 192, 64, 1), 64)
    assert len(tensor_map[256]) == 128
    assert driver.called[1:] == ["cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", driver.called[0]]
    driver.answers["cuTensorMapEncodeTiled"] = [1]
    with pytest.raises(launch.DriverError, match=r"cuTensorMapEncodeTiled .*shape \(1, 2, 3, 64\)"):
        tensor_map[512]


@pytest.fixture
def recompiled(driver, monkeypatch):
    """The sources that were compiled again, because the driver refused what was stored."""
    sources = []

    def replacements(source, refused):
        assert refused == b"stored"
        sources.append(source)
        yield b"new"

    monkeypatch.setattr(launch, "_load", load)
    monkeypatch.setattr(nvrtc, "begin", lambda sources: [lambda: b"stored"] * len(sources))
    monkeypatch.setattr(nvrtc, "replacements", replacements)
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda lib: (13, 0))
    return sources


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_module_that_the_driver_refuses_is_compiled_again(driver, recompiled, call):
    driver.answers[call] = [200]
    entries = [launch.Entry("first", 128), launch.Entry("second", 128)]
    first, second = launch.kernels("packed", None, entries)
    assert recompiled == ["first"]
    assert driver.called.count("cuModuleLoadData") == 3
    assert launch.kernels("packed", None, entries) == (first, second)
    assert driver.called.count("cuModuleLoadData") == 3


def test_a_driver_that_refuses_a_new_module_too(driver, recompiled):
    driver.answers["cuModuleLoadData"] = [209, 209]
    with pytest.raises(launch.DriverError, match=r"\(209\), of a kernel that NVRTC 13.0 has just"):
        launch.kernels("packed", None, [launch.Entry("first", 128)])
    assert recompiled == ["first"]
    launch.kernels("packed", None, [launch.Entry("first", 128)])  # nothing was remembered


@pytest.mark.parametrize("status", [2, 700])
def test_failures_that_are_not_the_modules_compile_nothing(driver, recompiled, status):
    driver.answers["cuModuleLoadData"] = [status]
    with pytest.raises(launch.DriverError, match=rf"cuModuleLoadData failed: .*\({status}\)$"):
        launch.kernels("packed", None, [launch.Entry("first", 128)])
    assert recompiled == []


# Compiling


@pytest.fixture
def events(driver, monkeypatch):
    """What was begun, waited for and loaded, in this order."""
    noted = []

    def code(name):
        noted.append(f"wait {name}")
        return name

    def begin(names):
        noted.extend(f"begin {name}" for name in names)
        return [partial(code, name) for name in names]

    def loaded(name, entry):
        noted.append(f"load {name}")
        return launch.Kernel(name, 128, 0)

    monkeypatch.setattr(nvrtc, "begin", begin)
    monkeypatch.setattr(launch, "_load", loaded)
    return noted


def entries(*names):
    return [launch.Entry(name, 128) for name in names]


def test_kernels_of_one_plan_are_compiled_together(events):
    def prepare(call):
        launch.kernels("a", None, entries("one", "two"))
        launch.kernels("b", None, entries("three"))
        assert events == ["begin one", "begin two", "begin three"]
        return call

    assert launch.together(launch.together(prepare))("run") == "run"
    assert events[3:] == [f"{what} {name}" for name in ("one", "two", "three")
                          for what in ("wait", "load")]  # fmt: skip
    assert all(type(one) is launch.Kernel for one in launch._loaded.values())
    launch.together(lambda call: launch.kernels("b", None, entries("three")))("run")
    assert len(events) == 9


def test_kernels_outside_of_a_plan_are_loaded_at_once(events):
    one, two = launch.kernels("a", None, entries("one", "two"))
    assert type(one) is type(two) is launch.Kernel and len(events) == 6


@pytest.mark.parametrize("dependent", [False, True])
def test_a_kernel_that_another_thread_compiles_is_loaded_by_the_first_launch(events, dependent):
    asked = []

    def prepare(call):
        asked.append(launch.kernels("a", None, entries("one"))[0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.together(prepare)(None)
    (one,) = asked
    assert events == ["begin one"]
    for _ in range(2):
        one.launch((1, 1), 0, None, dependent)
        assert events == ["begin one", "wait one", "load one"]


def test_after_an_error_kernels_are_compiled_again(events, monkeypatch):
    def fails():
        raise nvrtc.CompileError("no memory")

    begin = nvrtc.begin
    monkeypatch.setattr(nvrtc, "begin", lambda names: [fails for _ in names])
    prepare = launch.together(lambda call: launch.kernels("a", None, entries("one")))
    with pytest.raises(nvrtc.CompileError, match="no memory"):
        prepare(None)
    monkeypatch.setattr(nvrtc, "begin", begin)
    (one,) = prepare(None)
    assert type(one) is launch.Kernel and events == ["begin one", "wait one", "load one"]


def test_packed_sequences_compile_both_kernels_at_once(events, monkeypatch):
    q = torch.zeros(64, 2, 64, dtype=torch.bfloat16)
    ends = torch.tensor([0, 64], dtype=torch.int32)
    call = attention_call(q, q, q, cu_seqlens_q=ends, cu_seqlens_k=ends)
    hopper.plan(call).prepare(call)
    assert events[:2] == ["begin packed_ranges", "begin forward"] and len(events) == 6


def test_programs_are_compiled_at_the_same_time(monkeypatch):
    both = threading.Barrier(2)

    def compiled(program, _):
        both.wait(10)
        return program.source.encode()

    monkeypatch.setattr(nvrtc, "_found", lambda program: b"" if not program.source else None)
    monkeypatch.setattr(nvrtc, "_compiled", compiled)
    programs = [nvrtc.Program(source) for source in ("a", "b", "", "a")]
    assert nvrtc.compiled(programs) == [b"a", b"b", b"", b"a"]
    assert [code() for code in nvrtc.begin(programs)] == [b"a", b"b", b"", b"a"]


def test_configurations_of_launches_are_kept(driver):
    kernel = launch.Kernel("kernel", 128, 7)
    grids = (1, 1), (2**31 - 1, 3)
    launches = list(itertools.product(grids, (0, 2**40), (False, True)))
    for _ in range(2):
        for grid, stream, dependent in launches:
            kernel.launch(grid, stream, None, dependent)
            config = kernel._configs[grid, stream, dependent][0]._obj
            assert [*config.grid] == [*grid, 1] and [*config.block] == [128, 1, 1]
            assert (config.shared, config.stream or 0, config.count) == (7, stream, dependent)
            assert bool(config.attributes) == dependent
        assert len(kernel._configs) == len(launches)
    for x in range(1, launch._MAX_CONFIGS + 2):
        kernel.launch((x, 1), 0, None)
    assert len(kernel._configs) <= launch._MAX_CONFIGS


# Layouts of kernel parameters read from C declarations, and what a cubin's name depends on.

TEXT = """
  TensorMap q;       // a comment; with a semicolon
  const int *lens, *ends;
  int B, H;
  long long wide;
#if BIAS_BITS
  float last;
#endif
#if HAS_PROGRAM
  int a;
  long long b;
#endif
"""


def test_fields_are_laid_out_as_c_does():
    layout = structs.ParamsLayout(TEXT)
    offsets = {"q": 0, "lens": 128, "ends": 136, "B": 144, "H": 148, "wide": 152, "last": 160}
    offsets |= {"a": 160, "b": 168}  # a kernel has those of one #if
    assert {name: field.offset for name, field in layout.fields.items()} == offsets
    assert (layout.size, layout.alignment) == (192, 64)
    assert layout.packer("lens", "H").format == "<QQii"
    assert layout.packer(packed=("B:wide",)).format == "<128sQQ16sf28x"
    assert layout.packer("a", "b").format == "<i4xq16x"
    asserted = "static_assert(__INTADDR__(&((Params*)0)->last) == 160);"
    assert f"#if BIAS_BITS\n{asserted}\n#endif" in layout.assertions("Params")
    assert "(__INTADDR__(&((Params*)0)->wide) == 152);" in layout.assertions("Params")


def test_packed_fields_are_unpacked_by_name():
    layout = structs.ParamsLayout("int a; float b; long long c;")
    assert layout.unpack(struct.pack("<ifq", 1, 2.0, 3)) == {"a": (1,), "b": (2.0,), "c": (3,)}


@pytest.mark.parametrize(
    "source, name",
    [
        ("forward_rows.cuh", "ForwardParams"),
        ("backward_tiles.cuh", "BackwardParams"),
        ("decode.cu", "DecodeParams"),
        ("mla.cu", "MlaParams"),
    ],
)
def test_a_packer_of_all_fields_has_the_size_of_the_struct(source, name):
    layout = structs.struct_layout(source, name)
    assert layout.packer().size == layout.size


def test_a_program_holds_all_that_it_includes_and_asserts_its_layouts():
    defines = {"HEAD_DIM": 64, "VALUE_DIM": 64, "BLOCK_N": 64}
    program = nvrtc.program("forward", "forward", defines)
    names = dict(program.headers)
    assert {"forward.cu", "forward_rows.cuh", "ptx.cuh", "wgmma.cuh"} <= names.keys()
    assert "wgmma_scores_start" in names["wgmma.cuh"]
    assert "#define ENTRY_forward 1\n" in program.source
    assert "static_assert(__INTADDR__(&((ForwardParams*)0)->out) == 384);" in program.source


def test_a_cubins_name_depends_on_headers(monkeypatch):
    monkeypatch.setattr(nvrtc, "nvrtc", lambda: None)
    monkeypatch.setattr(nvrtc, "version", lambda lib: (13, 0))
    programs = [nvrtc.Program("source", (("a.cuh", text),)) for text in ("one", "two", "one")]
    first, second, third = map(nvrtc._path, programs)
    assert first == third != second


def test_an_unbounded_window_is_that_of_the_kernels():
    text = (structs.SOURCES / "ptx.cuh").read_text()
    assert f"UNBOUNDED = 1 << {kernel_plan.UNBOUNDED.bit_length() - 1};" in text
