"""The Hopper kernel that appends to caches without a GPU: registers, wide accesses, no spills."""

import re

import pytest

pytest.importorskip("nvidia.cu13", reason="NVRTC compiles this kernel")
pytest.importorskip("triton", reason="its wheel carries the disassembler")

from fa_ops.backends.hopper.runtime import nvrtc  # noqa: E402
from tests.compile_only.configurations import DTYPES, _append  # noqa: E402
from tests.compile_only.sass import disassembled  # noqa: E402

CONFIGURATIONS = [c for word, dtype in DTYPES.items() for c in _append(word, dtype)]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda c: c.name)
def test_append(configuration, tmp_path):
    _, kind, (entry,), defines = configuration
    program = nvrtc.program(kind, entry, defines)
    cubin, log = nvrtc.compile_source(program, "--ptxas-options=-v")
    assert "0 bytes spill stores" in log and "0 bytes stack frame" in log
    (registers,) = re.findall(r"Used (\d+) registers", log)
    assert int(registers) <= 64  # eight CTAs of 128 threads on a multiprocessor
    sass = disassembled(cubin, tmp_path)
    assert re.search(r"LDG\.E\.128", sass)
    assert re.search(r"STG\.E\.64" if defines["IS_E4M3"] else r"STG\.E\.128", sass)
    waits = sass.index("ACQBULK"), sass.index("PREEXIT")
    accesses = [m.start() for m in re.finditer(r"\b(LDG|STG)\.", sass)]
    assert max(waits) < min(accesses)  # nothing is read or written before the prior grid's end
    assert not re.search(r"LDG\S*\.CONSTANT", sass)  # nor through a cache that may be stale
