"""Compiled for other processors that this one includes, with an empty cache: the same bits.

Each kind has its own lookup and compaction: AVX-512, AVX2, and neither. `warm_up` comes first, and then
nothing may be left to compile.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

X86 = os.uname().machine == "x86_64"
VECTORS_OF_8 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c",
}
# Numba then leaves out what this processor has: an instruction of it would abort the process.
AVX_FORBIDDEN = {"NUMBA_ENABLE_AVX": "0"}

CODES = """
import sys; sys.path.insert(0, sys.argv[1])
import numpy as np
import test_kernels as k, test_linear_kernels as l, test_selection as s, test_sparse_kernels as p
import test_blocks as b, test_one_pass as o, test_low_rank as r
from gradwire.compressors import CodeFormat, DenseFormat, warm_up
from gradwire.compressors.kernels import cpu

def codes_and_selection():
    for elements in (17, 40_003):
        s.test_add_and_select_leaves_the_saturating_sum(elements)
        s.test_median_is_the_lower_one_in_the_middle(elements)
    for elements in (1, 16, 17, 257, 8193):
        k.test_magnitudes(elements)
        k.test_encode_dense(DenseFormat.FLOAT16, elements)
    sizes = [5, 0, 4099, 1, 16, 17, 257, 8193, 300]
    for format in k.SIGNED:
        b.check_sums(format, sizes)
        for in_place in (False, True):
            o.check(format, o.gradients_of(sizes), o.residual_of(sum(sizes)), in_place=in_place)
    o.test_levels_each_double_the_next(0.04, 1.0)
    o.test_levels_each_double_the_next(0.04, 0.75)
    r.check_products([(67, 35), (3, 5)], 5)
    r.check_bases(3, 20)
"""
EVERYTHING = """
from numba.core import event
warm_up()
with event.install_recorder("numba:compile") as compiled:
    codes_and_selection()
    for format in k.SIGNED:
        cpu.has_forbidden_code(format, np.zeros(format.code_bytes(300), np.uint8))
    for format in DenseFormat:
        values, data = np.ones(300, np.float32), np.zeros(300 * format.element_bytes, np.uint8)
        if format is not DenseFormat.FLOAT32:
            cpu.encode_dense(format, values, values.copy(), data)
        cpu.add_dense(format, [data], values[:1], values.copy(), keep=False)
        cpu.decode_dense(format, data, values)
        cpu.all_finite(format, data)
    for score in s.Score:
        s.test_select_is_exact(s.SMALL + 1, score)
    s.test_at_least_includes_the_threshold(s.SMALL + 1)
    s.test_put()
    for elements in (1, 33, 2500):
        l.check_scales(elements, 96)
        l.test_side_sums(elements)
        for bits in l.BITS:
            for seed in (None, 1):
                l.check_quantize_linear(bits, 96, elements, seed)
            l.check_add_linear(bits, 96, elements)
            l.linear.has_forbidden_linear(bits, 64, l.raw(8 * bits))
        l.check_binary(elements)
        l.check_ternary(elements, 1.0)
    for bits in (1, 3, 4, 8):
        l.test_many_tensors_have_the_bits_and_the_checks_of_each_alone(bits)
    p.test_gaps(5000, 50, 6)
    p.test_drawn_indices(5000, 50)
    for keep in (False, True):
        p.test_sums(5000, keep)
assert not compiled.buffer, compiled.buffer
"""


def run(script: str, cache: Path, processor: dict[str, str]) -> None:
    environ = os.environ | {"NUMBA_CACHE_DIR": str(cache)} | processor
    subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent)], env=environ, check=True, timeout=280
    )


def test_bits_are_the_same_and_warm_up_leaves_nothing_to_compile(tmp_path: Path) -> None:
    run(CODES + EVERYTHING, tmp_path, VECTORS_OF_8 if X86 else {})


@pytest.mark.skipif(not X86, reason="names what x86 processors have")
def test_without_avx_the_bits_are_the_same(tmp_path: Path) -> None:
    run(CODES + "codes_and_selection()", tmp_path, AVX_FORBIDDEN)
