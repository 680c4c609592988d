"""Layouts of kernel parameters read from C declarations, and what a cubin's name depends on."""

import struct

import pytest

from fa_ops.backends.hopper import problem
from fa_ops.backends.hopper.runtime import nvrtc, structs

TEXT = """
  TensorMap q;       // a comment; with a semicolon
  const int *lens, *ends;
  int B, H;
  long long wide;
#if BIAS_BITS
  float last;
#endif
"""


def test_fields_are_laid_out_as_c_does():
    layout = structs.ParamsLayout(TEXT)
    offsets = {"q": 0, "lens": 128, "ends": 136, "B": 144, "H": 148, "wide": 152, "last": 160}
    assert {name: field.offset for name, field in layout.fields.items()} == offsets
    assert (layout.size, layout.alignment) == (192, 64)
    assert layout.packer("lens", "H").format == "<QQii"
    assert layout.packer(packed=("B:wide",)).format == "<128sQQ16sf28x"
    assert "last" not in layout.assertions("Params")
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
    assert f"UNBOUNDED = 1 << {problem.UNBOUNDED.bit_length() - 1};" in text
