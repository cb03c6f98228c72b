"""The kernels' PTX: assembled by NVIDIA's ptxas where there is one, and its meaning shown without a GPU.

`Thread` runs one thread of a kernel as the PTX ISA describes its instructions, floats as exact fractions
that are rounded once. What it leaves in memory must be what gpukiln.probe.ptx expects of a GPU.
"""

import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from gpukiln.probe.cuda import BLOCK, ELEMENTS
from gpukiln.probe.ptx import PTX, ROUNDS, TILE, expected_result, hash_word

STEPS = 100_000  # of one thread, so that a wrong loop ends
BASE, OTHER = 0x7F00_0000_0000, 0x7F80_0000_0000


def nearest_f32(value: Fraction) -> int:
    """Bits of the 32-bit float nearest to a positive, normal value; of two equally near the even one."""
    exponent = 0
    while value >= 2:
        value, exponent = value / 2, exponent + 1
    while value < 1:
        value, exponent = value * 2, exponent - 1
    scaled = value * 2**23
    mantissa, rest = divmod(scaled.numerator, scaled.denominator)
    twice = 2 * rest
    mantissa += twice > scaled.denominator or (twice == scaled.denominator and mantissa % 2 == 1)
    return ((exponent + 127) << 23) + mantissa - (1 << 23)


def from_f32(bits: int) -> Fraction:
    sign, exponent, mantissa = bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF
    assert not sign, "the kernels only use positive floats"
    assert 0 < exponent < 255, "the kernels only use normal floats"
    return Fraction(mantissa + (1 << 23), 1 << 23) * Fraction(2) ** (exponent - 127)


COMPUTES: dict[str, Callable[[int, int, int], int]] = {
    "mov.u32": lambda a, _b, _c: a,
    "mov.b32": lambda a, _b, _c: a,
    "cvta.to.global.u64": lambda a, _b, _c: a,
    "add.u32": lambda a, b, _c: a + b,
    "add.u64": lambda a, b, _c: a + b,
    "sub.u32": lambda a, b, _c: a - b,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.wide.u32": lambda a, b, _c: a * b,
    "and.b32": lambda a, b, _c: a & b,
    "or.b32": lambda a, b, _c: a | b,
    "xor.b32": lambda a, b, _c: a ^ b,
    "shr.u32": lambda a, b, _c: a >> b,
    "setp.ge.u32": lambda a, b, _c: a >= b,
    "setp.eq.u32": lambda a, b, _c: a == b,
    "fma.rn.f32": lambda a, b, c: nearest_f32(from_f32(a) * from_f32(b) + from_f32(c)),
}


class Thread:
    """One thread of a kernel.

    Args:
        ptx: The module's text.
        entry: The kernel's name.
        args: Its arguments, in the order of its parameters.
        index: Index of the thread over all blocks of BLOCK threads.
        memory: Address to 32-bit word; written to.
    """

    def __init__(self, ptx: str, entry: str, args: list[int], index: int, memory: dict[int, int]) -> None:
        found = re.search(rf"\.entry {entry}\((.*?)\)\s*\{{(.*?)\n\}}", ptx, re.DOTALL)
        assert found is not None, f"no kernel {entry}"
        names = re.findall(r"\.param \.(u\d+) (\w+)", found[1])
        assert len(names) == len(args)
        self.params = {name: (kind, value) for (kind, name), value in zip(names, args, strict=True)}
        self.memory = memory
        self.values: dict[str, Any] = {
            "%ctaid.x": index // BLOCK,
            "%ntid.x": BLOCK,
            "%tid.x": index % BLOCK,
        }
        self.lines: list[str] = []
        self.labels: dict[str, int] = {}
        for line in filter(None, (text.strip() for text in found[2].splitlines())):
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.lines)
            elif not line.startswith(".reg"):
                self.lines.append(line)

    def value(self, text: str) -> int:
        return int(self.values[text]) if text.startswith("%") else int(text, 0)

    def run(self) -> None:
        at = 0
        for _ in range(STEPS):
            found = re.fullmatch(r"(?:@(%p\d+) )?([\w.]+)(?: (.*))?;", self.lines[at])
            assert found is not None, f"what is {self.lines[at]!r}"
            guard, name, rest = found.groups()
            at += 1
            if guard and not self.values[guard]:
                continue
            if name == "ret":
                return
            if name == "bra":
                at = self.labels[rest]
            else:
                self.step(name, [operand.strip() for operand in rest.split(",")])
        raise AssertionError(f"the thread does not end in {STEPS} steps")

    def step(self, name: str, operands: list[str]) -> None:
        to, *sources = operands
        if name == "st.global.u32":
            self.memory[self.value(to.strip("[]"))] = self.value(sources[0])
            return
        if name == "ld.global.u32":
            self.values[to] = self.memory[self.value(sources[0].strip("[]"))]
            return
        if name.startswith("ld.param."):
            kind, value = self.params[sources[0].strip("[]")]
            assert name == f"ld.param.{kind}"
            self.values[to] = value
            return
        a, b, c = ([self.value(s) for s in sources] + [0, 0])[:3]
        assert name in COMPUTES, f"{name} is not known to this test"
        result = COMPUTES[name](a, b, c)
        wide = name.endswith("64") or name == "mul.wide.u32"
        self.values[to] = result & (0xFFFF_FFFF_FFFF_FFFF if wide else 0xFFFF_FFFF)


@pytest.fixture(scope="module")
def expected() -> bytes:
    return expected_result(ELEMENTS // TILE)


INDEXES = [0, 1, 255, 256, 1023, 1024, 1_234_567, ELEMENTS // 2 + 77, ELEMENTS - 1]


@pytest.mark.parametrize("index", INDEXES)
def test_the_hash_kernel_means_what_the_host_expects(expected: bytes, index: int) -> None:
    memory: dict[int, int] = {}
    Thread(PTX, "gpukiln_hash", [BASE, ELEMENTS, ROUNDS], index, memory).run()
    assert memory == {BASE + 4 * index: struct.unpack_from("<I", expected, 4 * index)[0]}


@pytest.mark.parametrize("index", [1000, 1001, 1023])
def test_a_thread_behind_the_last_element_does_nothing(index: int) -> None:
    memory: dict[int, int] = {}
    Thread(PTX, "gpukiln_hash", [BASE, 1000, ROUNDS], index, memory).run()
    Thread(PTX, "gpukiln_add", [BASE, OTHER, 1000], index, memory).run()
    assert memory == {}


@pytest.mark.parametrize(("index", "mine", "other"), [(0, 1, 2), (700, 0xFFFFFFFF, 3), (999, 5, 0)])
def test_the_add_kernel_adds_to_its_own_element_alone(index: int, mine: int, other: int) -> None:
    memory = {BASE + 4 * index: mine, OTHER + 4 * index: other}
    Thread(PTX, "gpukiln_add", [BASE, OTHER, 1000], index, memory).run()
    assert memory == {BASE + 4 * index: (mine + other) & 0xFFFFFFFF, OTHER + 4 * index: other}


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("%f3, %f1, %f2, %f1", "%f3, %f1, %f2, %f2"),
        ("1664525", "1664527"),
        ("shr.u32 %r8, %r7, 16", "shr.u32 %r8, %r7, 15"),
        ("0x7fffff", "0x7ffffe"),
        ("and.b32 %r7, %r4, 1023", "and.b32 %r7, %r4, 1022"),
        ("shr.u32 %r12, %r4, 10", "shr.u32 %r12, %r4, 11"),
        ("mul.wide.u32 %rd3, %r4, 4", "mul.wide.u32 %rd3, %r4, 8"),
        ("sub.u32 %r6, %r6, 1", "sub.u32 %r6, %r6, 2"),
    ],
)
def test_another_kernel_would_be_noticed(expected: bytes, text: str, other: str) -> None:
    assert text in PTX
    memory: dict[int, int] = {}
    Thread(PTX.replace(text, other, 1), "gpukiln_hash", [BASE, ELEMENTS, ROUNDS], 123_459, memory).run()
    assert memory != {BASE + 4 * 123_459: struct.unpack_from("<I", expected, 4 * 123_459)[0]}


def test_every_element_has_the_hash_of_its_own_index(expected: bytes) -> None:
    assert len(expected) == 4 * ELEMENTS
    for index in [*INDEXES, *range(5, ELEMENTS, 1_000_003)]:
        found = struct.unpack_from("<I", expected, 4 * index)[0]
        assert found == hash_word(index % TILE) ^ index // TILE
    first = struct.unpack(f"<{TILE}I", expected[: 4 * TILE])
    assert len(set(first)) > TILE - 4, "starts that end alike would hide a thread that took another's"


def test_the_hash_needs_floats_and_every_round() -> None:
    assert len({hash_word(7, rounds) for rounds in range(ROUNDS + 1)}) == ROUNDS + 1


# --- ptxas, which comes with the CUDA toolkit -----------------------------------------------------------


def assemble(ptx: str, arch: str, folder: Path) -> subprocess.CompletedProcess[str]:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("ptxas is not on PATH; it comes with the CUDA toolkit")
    (folder / "kernels.ptx").write_text(ptx)
    done = subprocess.run(
        [ptxas, "-v", "-arch", arch, "-o", str(folder / "kernels.cubin"), str(folder / "kernels.ptx")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "is not defined for option" in done.stderr:
        pytest.skip(f"this ptxas does not know {arch}")
    return done


@pytest.mark.parametrize(
    "arch", ["sm_52", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
)
def test_ptxas_takes_the_kernels(arch: str, tmp_path: Path) -> None:
    done = assemble(PTX, arch, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"Compiling entry function '(\w+)'", done.stderr).count("gpukiln_hash") == 1
    assert "gpukiln_add" in done.stderr
    assert "0 bytes spill" in done.stderr


def test_ptxas_can_refuse(tmp_path: Path) -> None:
    done = assemble(PTX.replace("fma.rn.f32 %f3", "fma.rn.f32 %rd3", 1), "sm_80", tmp_path)
    assert done.returncode != 0
    assert "mismatch" in done.stderr
