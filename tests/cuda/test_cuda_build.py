"""What nvcc makes of the kernels: registers, spills, and the machine code of the clean loop.

The kernels' speed rests on these, and no GPU is needed to hold them. `pytest -rP` shows figures.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.paths import ROOT
from nanscan import _C
from nanscan._scan import cuda

SOURCES = ("cuda/scan_kernels.cuh", "cuda/scan_args.h", "float_format.h", "row.h")
FLAGS = ("-std=c++17", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v")  # of csrc/CMakeLists.txt
ARCHITECTURES = (120, 100, 90, 80, 75)  # the slowest to compile first
LOOKED_INTO = (80, 90, 100)

DTYPES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
FLAT = {f"nanscan_flat_{dtype}" for dtype in DTYPES}
OTHERS = {
    *(f"nanscan_strided_{dtype}" for dtype in DTYPES),
    *(f"nanscan_strided_moments_{dtype}" for dtype in DTYPES),
    *("nanscan_many", "nanscan_many_moments"),
}
KERNELS = FLAT | OTHERS

# For a load of 16 bytes: on sm_80, and on later ones. At full bandwidth an H200 has room for 99, a
# B200 for 70.
MOST_INSTRUCTIONS = {
    **dict.fromkeys(("float16", "bfloat16"), (15, 12)),
    "float32": (16, 16),
    "float64": (30, 30),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), (28, 20)),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz"), (48, 40)),
}
LEAST_IN_FLIGHT = 4  # loads


# -- what nvcc makes -----------------------------------------------------------------------------


class Compiled(NamedTuple):
    cubin: Path
    ptx: str
    log: str  # of ptxas


@pytest.fixture(scope="session")
def compiled() -> dict[int, Compiled]:
    """Each architecture, compiled once for as long as sources and compiler stay the same."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if not nvcc or not shutil.which(nvcc):
        pytest.skip("nvcc is not there")
    if not (ROOT / "csrc").exists():
        pytest.skip("needs nanscan's source tree beside the tests")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join((version, *FLAGS)).encode())
    for name in SOURCES:
        digest.update((ROOT / "csrc" / name).read_bytes())
    folder = ROOT / "build" / "cuda" / digest.hexdigest()[:16]
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                for made in [
                    threads.submit(compile_for, nvcc, architecture, Path(scratch) / "made")
                    for architecture in ARCHITECTURES
                ]:
                    made.result()
            if not folder.exists():
                (Path(scratch) / "made").rename(folder)  # whole or not at all
        for old in folder.parent.iterdir():
            if old != folder and not old.name.startswith("making-"):
                shutil.rmtree(old)
    return {
        architecture: Compiled(
            folder / f"{architecture}.cubin",
            (folder / f"{architecture}.ptx").read_text(),
            (folder / f"{architecture}.log").read_text(),
        )
        for architecture in ARCHITECTURES
    }


def compile_for(nvcc: str, architecture: int, to: Path) -> None:
    kept = to.parent / f"{architecture}"
    kept.mkdir()
    cubin = kept / "scan_kernels.cubin"
    result = subprocess.run(
        [
            *(nvcc, *FLAGS, f"-arch=sm_{architecture}", "-cubin", "-o", cubin),
            *("--keep", "--keep-dir", kept, "-x", "cu", ROOT / "csrc" / SOURCES[0]),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    to.mkdir(exist_ok=True)
    cubin.rename(to / f"{architecture}.cubin")
    (ptx,) = kept.glob("*.ptx")
    ptx.rename(to / f"{architecture}.ptx")
    (to / f"{architecture}.log").write_text(result.stdout)


class Resources(NamedTuple):
    registers: int
    stack: int
    spilled: int  # bytes stored and loaded


def resources(log: str) -> dict[str, Resources]:
    """What ptxas -v says of each function."""
    pattern = (
        r"Function properties for (\S+)\n\s+(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*\bUsed (\d+) registers"
    )
    return {
        name: Resources(int(registers), int(stack), int(stores) + int(loads))
        for name, stack, stores, loads, registers in re.findall(pattern, log)
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_there_and_nothing_spills(compiled, architecture):
    log = compiled[architecture].log
    found = resources(log)
    assert set(found) == KERNELS
    assert log.count("bytes stack frame") == len(KERNELS)  # none passed by the pattern
    assert {name: used for name, used in found.items() if used.stack or used.spilled} == {}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_leave_room_for_the_blocks_that_the_launch_counts_on(
    compiled, architecture, record_property
):
    found = resources(compiled[architecture].log)
    # 65,536 registers hold 5 blocks of 256 threads of flat kernels, 4 on sm_75, and 3 of others.
    for kernels, most in ((FLAT, 64 if architecture == 75 else 48), (OTHERS, 80)):
        used = {name: found[name].registers for name in kernels}
        assert {name: count for name, count in used.items() if count > most} == {}
    flat = {dtype: found[f"nanscan_flat_{dtype}"].registers for dtype in DTYPES}
    record_property("registers", flat)
    print(
        f"sm_{architecture} registers:",
        *(f"{dtype} {count}," for dtype, count in flat.items()),
        f"others up to {max(found[name].registers for name in OTHERS)}",
    )


def test_the_launch_counts_on_what_is_held_here():
    constants = (ROOT / "csrc" / SOURCES[1]).read_text()
    for constant in ("kThreads = 256", "kFlatBlocksPerSm = 5", "kOtherBlocksPerSm = 3"):
        assert f"constexpr int {constant};" in constants


# -- machine code --------------------------------------------------------------------------------


def tool(name: str) -> Path:
    """A tool of the CUDA toolkit, as PyPI has it or as it is on PATH."""
    for folder in map(Path, sys.path):
        for found in folder.glob(f"nvidia/cu*/bin/{name}"):
            return found
    if found := shutil.which(name):
        return Path(found)
    pytest.skip(f"{name} is not there: pip install nvidia-cuda-{name}")


def cuobjdump(*arguments) -> str:
    path = os.pathsep.join(
        [str(tool("cuobjdump").parent), str(tool("nvdisasm").parent), os.environ["PATH"]]
    )
    result = subprocess.run(
        [tool("cuobjdump"), *arguments],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class Instruction(NamedTuple):
    address: int
    guard: str  # the predicate that it runs under, or ""
    opcode: str
    operands: str


def functions(listing: str) -> dict[str, list[Instruction]]:
    """The instructions of each function in a listing of cuobjdump -sass."""
    line = re.compile(
        r"^\s*Function : (?P<name>\S+)|"
        r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)"
        r"(?P<operands>[^;]*);",
        re.MULTILINE,
    )
    found: dict[str, list[Instruction]] = {}
    for match in line.finditer(listing):
        if name := match["name"]:
            code = found.setdefault(name, [])
            continue
        code.append(
            Instruction(
                int(match["address"], 16),
                match["guard"] or "",
                match["opcode"],
                match["operands"].strip(),
            )
        )
    return found


@pytest.fixture(scope="session")
def code(compiled) -> dict[int, dict[str, list[Instruction]]]:
    tool("cuobjdump"), tool("nvdisasm")
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        listings = threads.map(
            lambda architecture: cuobjdump("-sass", compiled[architecture].cubin), ARCHITECTURES
        )
        return dict(zip(ARCHITECTURES, map(functions, listings), strict=True))


class Block(NamedTuple):
    instructions: list[Instruction]
    successors: list[int]  # addresses of blocks


def ends_block(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] in ("BRA", "EXIT", "RET")


def target(branch: Instruction) -> int:
    return int(branch.operands.split()[-1], 16)


def blocks(code: list[Instruction]) -> dict[int, Block]:
    """Basic blocks, by address. BSYNC goes on with the next instruction, as its BSSY says."""
    unknown = {i.opcode for i in code if re.match(r"BRX|JMP|JMX|BRXU|JMXU|BREAK", i.opcode)}
    assert not unknown, f"cannot follow {unknown}"
    branches = [i for i in code if i.opcode.split(".")[0] == "BRA"]
    starts = {code[0].address, *map(target, branches)}
    starts |= {code[k + 1].address for k, i in enumerate(code[:-1]) if ends_block(i)}
    found: dict[int, Block] = {}
    for instruction, following in zip(code, [*code[1:], None], strict=True):
        if instruction.address in starts:
            block = found[instruction.address] = Block([], [])
        block.instructions.append(instruction)
        if following and not ends_block(instruction) and following.address not in starts:
            continue
        if instruction.opcode.startswith("BRA"):
            block.successors.append(target(instruction))
        # Both "@P0 BRA 0x10" and "BRA P0, 0x10" may fall through.
        certain = not instruction.guard and "," not in instruction.operands
        if following and not (ends_block(instruction) and certain):
            block.successors.append(following.address)
    return found


def is_load(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] in ("LDG", "LD")


def is_vector_load(instruction: Instruction) -> bool:
    return is_load(instruction) and "128" in instruction.opcode.split(".")


def loads_single_elements(block: Block) -> bool:
    """Level 2 does."""
    return any(map(is_load, block.instructions)) and not any(
        map(is_vector_load, block.instructions)
    )


def cycles(graph: dict[int, Block], start: int) -> list[list[int]]:
    """All simple paths from a block back to itself."""
    returning = {start}
    while more := {
        address
        for address, block in graph.items()
        if address not in returning and not returning.isdisjoint(block.successors)
    }:
        returning |= more
    found, paths = [], [[start]]
    while paths:
        path = paths.pop()
        for successor in graph[path[-1]].successors:
            if successor == start:
                found.append(path)
            elif successor in returning and successor not in path:
                paths.append([*path, successor])
    return found


class CleanLoop(NamedTuple):
    instructions: list[Instruction]  # of one turn, from its first load on
    has_level_2: bool

    @property
    def loads(self) -> list[Instruction]:
        return [i for i in self.instructions if is_load(i)]

    @property
    def instructions_per_load(self) -> float:
        executed = [i for i in self.instructions if i.opcode != "NOP"]
        return len(executed) / len(self.loads)

    @property
    def in_flight(self) -> int:
        """Loads issued before an instruction names a register that one of them fills."""
        issued, filled = 0, set()
        for instruction in self.instructions:
            if registers(instruction) & filled:
                break
            if is_load(instruction):
                issued += 1
                filled |= filled_by(instruction)
        return issued


def registers(instruction: Instruction) -> set[int]:
    """All that an instruction reads, and the first that it writes: each waits for a load."""
    named: set[int] = set()
    for number, wide in re.findall(r"(?<![\w.])R(\d+)(?:\.reuse)?(\.64)?", instruction.operands):
        named |= {int(number), int(number) + bool(wide)}
    return named


def filled_by(load: Instruction) -> set[int]:
    first = int(re.match(r"R(\d+)", load.operands)[1])
    bits = max((int(part) for part in load.opcode.split(".") if part.isdigit()), default=32)
    return set(range(first, first + bits // 32))


def clean_loop(code: list[Instruction]) -> CleanLoop:
    """The path that a clean tile takes through the main loop.

    The first load of a flat kernel is the main loop's. Level 2 reads single elements, and nothing
    else in the loop does: without the blocks that load without loading 16 bytes, the ways from the
    first load's block back to it are those of a clean tile. The longest counts.
    """
    graph = blocks(code)
    first = next((address for address, b in graph.items() if any(map(is_load, b.instructions))), 0)
    clean = {a: b for a, b in graph.items() if a == first or not loads_single_elements(b)}
    ways = cycles(clean, first)
    assert ways, "no loop around the first load"
    way = max(ways, key=lambda way: sum(len(graph[address].instructions) for address in way))
    turn = [instruction for address in way for instruction in graph[address].instructions]
    start = next(k for k, instruction in enumerate(turn) if is_load(instruction))
    has_level_2 = any(
        loads_single_elements(graph[address]) for way in cycles(graph, first) for address in way
    )
    return CleanLoop(turn[start:] + turn[:start], has_level_2)


def hold(loop: CleanLoop, most_instructions: float = 16) -> None:
    assert loop.has_level_2, "the loop never looks at single elements"
    narrow = [i.opcode for i in loop.loads if not is_vector_load(i)]
    assert not narrow, f"loads of less than 16 bytes: {narrow}"
    assert loop.instructions_per_load <= most_instructions, "too many instructions"
    assert loop.in_flight >= LEAST_IN_FLIGHT, "too few loads in flight"


@pytest.mark.parametrize("architecture", LOOKED_INTO)
@pytest.mark.parametrize("dtype", MOST_INSTRUCTIONS)
def test_a_clean_tile_is_cheap(code, architecture, dtype, record_property):
    loop = clean_loop(code[architecture][f"nanscan_flat_{dtype}"])
    record_property("instructions per load", loop.instructions_per_load)
    record_property("loads in flight", loop.in_flight)
    print(
        f"sm_{architecture} {dtype}: {loop.instructions_per_load:.2f} instructions a load of 16 "
        f"bytes, {len(loop.loads)} loads a turn, {loop.in_flight} in flight"
    )
    hold(loop, MOST_INSTRUCTIONS[dtype][architecture > 80])


FORBIDDEN = {
    "machine code": re.compile(r"^BPT|^KILL"),
    "PTX": re.compile(r"\b(?:trap|brkpt|vprintf|__assert_?fail|malloc|free)\b|\.extern\b"),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_traps_asserts_prints_or_allocates(compiled, code, architecture):
    found = code[architecture]
    assert set(found) >= KERNELS
    assert all(map(found.get, KERNELS))
    opcodes = {instruction.opcode for name in found for instruction in found[name]}
    assert {"EXIT", "ATOMG.E.ADD.64.STRONG.GPU"} <= opcodes
    assert not [opcode for opcode in opcodes if FORBIDDEN["machine code"].search(opcode)]
    assert set(re.findall(r"\.entry (\w+)\(", compiled[architecture].ptx)) == KERNELS
    assert not FORBIDDEN["PTX"].findall(compiled[architecture].ptx)


# -- what is shipped -----------------------------------------------------------------------------


def test_the_shipped_image_is_for_the_architectures_that_it_says():
    if not _C.CUDA_TOOLKIT:
        pytest.skip("nanscan was built without nvcc")
    toolkit = tuple(map(int, _C.CUDA_TOOLKIT.split(".")))
    expected = {"sm_75", "sm_80", "compute_80"}
    if toolkit >= (11, 8):
        expected.add("sm_90")
    if toolkit >= (12, 8):
        expected |= {"sm_100", "sm_120"}
    said = {
        ("sm_" if kind == "real" else "compute_") + number
        for number, kind in (part.split("-") for part in _C.CUDA_ARCHITECTURES.split(","))
    }
    assert said == expected
    listed = cuobjdump("--list-elf", "--list-ptx", cuda.FATBIN)
    elf = re.findall(r"ELF file .*\.(sm_\w+)\.cubin", listed)
    ptx = re.findall(r"PTX file .*\.sm_(\w+)\.ptx", listed)
    assert sorted(elf + [f"compute_{number}" for number in ptx]) == sorted(expected)


def test_the_shipped_image_holds_every_kernel():
    if not _C.CUDA_TOOLKIT:
        pytest.skip("nanscan was built without nvcc")
    images = cuobjdump("-symbols", cuda.FATBIN).split("Fatbin elf code:")[1:]
    assert len(images) == _C.CUDA_ARCHITECTURES.count("real")
    for image in images:
        assert set(re.findall(r"^FUNC .* ENTRY +(\w+)$", image, re.MULTILINE)) == KERNELS


# -- that these tests can fail -------------------------------------------------------------------

LISTING = """
        Function : doctored
    .headerflags    @"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
        /*0000*/                   MOV R1, c[0x0][0x28] ;          /* 0x000078ff00ff75a7 */
                                                                   /* 0x000fe400078e00ff */
        /*0010*/              @!P0 BRA 0x1190 ;
        /*0020*/                   LDG.E.NA.128 R8, desc[UR6][R28.64] ;
        /*0030*/                   LDG.E.NA.128 R12, desc[UR6][R28.64+0x1000] ;
        /*0040*/                   LDG.E.NA.128 R16, desc[UR6][R28.64+0x2000] ;
        /*0050*/                   LDG.E.NA.128 R20, desc[UR6][R28.64+0x3000] ;
        /*0060*/                   BSSY B0, 0x1160 ;
        /*0070*/                   VHMNMX.NAN R36, R8.reuse, R13.reuse, R18.reuse, !PT ;
        /*1080*/                   LOP3.LUT P1, RZ, R23, 0x80008000, R9, 0xc8, !PT ;
        /*1090*/              @!P1 BRA 0x1140 ;
        /*10a0*/                   IMAD.WIDE R10, R15, 0x2, R10 ;
        /*10b0*/                   LDG.E.U16 R17, desc[UR6][R10.64] ;
        /*10c0*/               @P4 BRA 0x10b0 ;
        /*10d0*/                   BRA 0x1150 ;
        /*1140*/                   HMNMX2.NAN R35, R35, R10, PT ;
        /*1150*/                   BSYNC B0 ;
        /*1160*/                   IMAD.WIDE.U32 R28, R37, 0x4000, R28 ;
        /*1170*/               @P0 BRA P2, 0x20 ;
        /*1180*/                   LDG.E.NA.128 R8, desc[UR6][R28.64] ;
        /*1190*/                   EXIT ;
        /*11a0*/                   BRA 0x11a0;
        /*11b0*/                   NOP;
"""


def held(listing: str) -> None:
    hold(clean_loop(functions(listing)["doctored"]))


def test_the_clean_loop_is_read_right():
    loop = clean_loop(functions(LISTING)["doctored"])
    assert [i.address for i in loop.instructions] == [
        *range(0x20, 0x80, 0x10),
        *(0x1080, 0x1090, 0x1140, 0x1150, 0x1160, 0x1170),
    ]
    assert len(loop.loads) == loop.in_flight == 4
    assert loop.instructions_per_load == 3.0
    hold(loop)


def longer(instructions: int) -> str:
    """With this many instructions in the clean loop, in place of 12."""
    more = "".join(
        f"        /*{0x100 + k:04x}*/                   IADD3 R40, R40, 0x1, RZ ;\n"
        for k in range(instructions - 12)
    )
    before, after = LISTING.split("        /*1080*/")
    return f"{before}{more}        /*1080*/{after}"


def test_17_instructions_a_load_are_found_out():
    held(longer(4 * 16))
    for too_many in (4 * 16 + 1, 4 * 17):
        with pytest.raises(AssertionError, match="too many instructions"):
            held(longer(too_many))


@pytest.mark.parametrize("narrow", ["LDG.E.NA.64", "LDG.E.NA", "LDG.E.U16"])
@pytest.mark.parametrize("which", range(4))
def test_a_narrow_load_is_found_out(narrow, which):
    parts = LISTING.split("LDG.E.NA.128", 4)
    doctored = "".join(
        part + ("" if k == 4 else narrow if k == which else "LDG.E.NA.128")
        for k, part in enumerate(parts)
    )
    with pytest.raises(AssertionError, match=f"loads of less than 16 bytes: .*{narrow}"):
        held(doctored)


def test_narrow_loads_only_are_found_out():
    with pytest.raises(AssertionError, match="loads of less than 16 bytes"):
        held(LISTING.replace("LDG.E.NA.128", "LDG.E.NA.64"))


@pytest.mark.parametrize(
    "early",
    [
        "HMNMX2.NAN R36, R36, R11, PT ;",
        "HMNMX2.NAN R36, R36, R8.reuse, PT ;",
        "MOV R9, RZ ;",
        "DADD R40, R40, R10.64 ;",
    ],
)
def test_loads_that_wait_for_each_other_are_found_out(early):
    fourth = "        /*0050*/"
    doctored = LISTING.replace(fourth, f"        /*0048*/                   {early}\n{fourth}")
    with pytest.raises(AssertionError, match="too few loads in flight"):
        held(doctored)


def test_an_address_that_a_load_fills_is_found_out():
    with pytest.raises(AssertionError, match="too few loads in flight"):
        held(LISTING.replace("[R28.64+0x3000]", "[R12.64+0x3000]"))


@pytest.mark.parametrize(
    "doctored",
    [
        LISTING.replace("@P0 BRA P2, 0x20 ;", "NOP ;"),
        LISTING.replace("@P0 BRA P2, 0x20 ;", "@P0 BRA P2, 0x1180 ;"),
        re.sub(r"LDG\S+", "LDS", LISTING),
    ],
    ids=["no branch", "a branch elsewhere", "no loads"],
)
def test_no_loop_is_found_out(doctored):
    assert doctored != LISTING
    with pytest.raises(AssertionError, match="no loop around the first load"):
        held(doctored)


def test_a_loop_without_level_2_is_found_out():
    with pytest.raises(AssertionError, match="never looks at single elements"):
        held(LISTING.replace("@!P1 BRA 0x1140", "BRA 0x1140"))


def test_a_branch_that_cannot_be_followed_is_found_out():
    with pytest.raises(AssertionError, match="cannot follow"):
        held(LISTING.replace("BSYNC B0 ;", "BRX R4 -0x30 ;"))


def test_spills_and_stack_are_read_right():
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90'\n"
        "ptxas info    : Function properties for a\n"
        "    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 48 registers, used 1 barriers, 24 bytes cumulative stack size\n"
        "ptxas info    : Compile time = 864.361 ms\n"
    )
    assert resources(log) == {"a": Resources(48, 24, 24)}


@pytest.mark.parametrize("opcode", ["BPT.TRAP", "BPT.INT", "BPT.DRAIN"])
def test_a_trap_in_machine_code_is_found_out(opcode):
    assert FORBIDDEN["machine code"].search(opcode)


@pytest.mark.parametrize(
    "line",
    [
        "\ttrap;",
        "\t@%p1 trap;",
        "\tbrkpt;",
        "\tcall.uni (retval0), vprintf, (param0, param1);",
        ".extern .func __assertfail",
        "\tcall.uni (retval0), malloc, (param0);",
    ],
)
def test_a_trap_in_ptx_is_found_out(line):
    assert FORBIDDEN["PTX"].search(line)
