"""Plants faults in the scan kernels, one at a time, and shows which build of the tests catches it.

    python tests/simt/mutants.py [part of a name ...]

Prints the table of README.md. Exits with 1 if a fault gets past all builds, or cannot be planted
any more because the kernels have changed. All of them take about 15 minutes on two cores.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
COMMON = HERE.parent.parent / "build" / "simt"  # objects that do not depend on the kernels

RUNS = {
    "plain": [],
    "asan": ["--stories", "150"],
    "tsan": ["--small", "--stories", "100"],
}
TIMEOUT = 600  # seconds; the longest run of sound kernels takes about 20

# What a run says when it has caught something, and how the table calls it.
SIGNS = {
    r"^FAIL": "wrong row",
    r"^simt: ": "stopped",
    r"AddressSanitizer: ([\w-]+)": None,
    r"runtime error: .*(misaligned address)": None,
    r"runtime error": "undefined behaviour",
    r"ThreadSanitizer: ([\w -]+?) \(": None,
}


class Mutant(NamedTuple):
    fault: str
    old: str  # occurs exactly once
    new: str
    policy: int = 1  # NANSCAN_PACKED_MINMAX


BARRIER = "  __syncthreads();\n  if (threadIdx.x != 0) return;\n"
SHARED_WRITE = (
    "  if (threadIdx.x % 32 == 0) memcpy(warps.of[threadIdx.x / 32], &found, sizeof found);\n"
)
FENCE_BEFORE = (
    "  if (found.first || call.mirrored) __threadfence();  // before this block is counted out\n"
)
BLOCK_MAX = "  if (found.first) atomic_max(&row->call_first_bad, found.first);\n"
COUNT_IN = "change += call.blocks * kOneBlock + kOneOpenCall + 1"
SYSTEM_FENCE = (
    "  __threadfence_system();  // before the host may use the row again, on any stream\n"
)
ARRIVED = "  mirror[kArrivedWord] = 1;\n"
RESET = "  *row = empty;\n"
TAIL = "    if (threadIdx.x >= 32) place = behind + threadIdx.x - 32;\n"
HEAD = "  uint64_t head = skew == 0 ? 0 : (kLoadBytes - skew) / sizeof(Int);\n"

MUTANTS = [
    # Threads of a block
    Mutant("no barrier after the shared write", BARRIER, "  if (threadIdx.x != 0) return;\n"),
    Mutant(
        "a barrier in a divergent branch",
        BARRIER,
        "  if (threadIdx.x < 32) __syncthreads();\n  if (threadIdx.x != 0) return;\n",
    ),
    Mutant(
        "an early return before the barrier",
        BARRIER,
        "  if (threadIdx.x % 32 != 0) return;\n" + BARRIER,
    ),
    Mutant("the shared array is one too small", "of[kWarps][sizeof", "of[kWarps - 1][sizeof"),
    Mutant(
        "a shared slot is read that nobody wrote",
        SHARED_WRITE,
        SHARED_WRITE.replace("threadIdx.x % 32 == 0", "threadIdx.x % 32 == 0 && threadIdx.x != 96"),
    ),
    Mutant(
        "shared memory is cleared with no barrier before its use",
        "  found.merge_warp();\n",
        "  warps.of[threadIdx.x / 32][threadIdx.x % 32] = 0;\n  found.merge_warp();\n",
    ),
    Mutant("half a shuffle mask", "kAllLanes = 0xffffffffu", "kAllLanes = 0x0000ffffu"),
    Mutant(
        "only lane 0 shuffles",
        "  found.merge_warp();\n",
        "  if (threadIdx.x % 32 == 0) found.merge_warp();\n",
    ),
    Mutant(
        "lanes shuffle counts if they themselves have some",
        "__any_sync(kAllLanes, (nan | posinf | neginf) != 0)",
        "(nan | posinf | neginf) != 0",
    ),
    Mutant("the shuffle tree starts too low", "distance = 16", "distance = 8"),
    # Blocks of a grid
    Mutant("no fence before a block is counted out", FENCE_BEFORE, ""),
    Mutant(
        "no fence before a bad block is counted out",
        FENCE_BEFORE,
        FENCE_BEFORE.replace("found.first || ", ""),
    ),
    Mutant(
        "no fence before a block with a mirror is counted out",
        FENCE_BEFORE,
        FENCE_BEFORE.replace(" || call.mirrored", ""),
    ),
    Mutant("the fence comes too early", BLOCK_MAX + FENCE_BEFORE, FENCE_BEFORE + BLOCK_MAX),
    Mutant(
        "no fence before the last block reads",
        "  __threadfence();  // what the others wrote\n",
        "",
    ),
    Mutant(
        "a plain store for an atomic max",
        "  atomicMax(reinterpret_cast<unsigned long long*>(p), "
        "static_cast<unsigned long long>(value));\n",
        "  if (*p < value) *p = value;\n",
    ),
    Mutant(
        "a count of blocks is off by one",
        COUNT_IN,
        COUNT_IN.replace("call.blocks", "(call.blocks - 1)"),
    ),
    Mutant(
        "every block counts a call",
        "uint64_t change = 0 - kOneBlock;",
        "uint64_t change = (call.block != 0) - kOneBlock;",
    ),
    Mutant(
        "call_first_bad is left behind",
        "first_bad = atomic_exchange(&row->call_first_bad, 0);",
        "first_bad = row->call_first_bad;",
    ),
    Mutant("calls of several streams are taken for one", " && after / kOneOpenCall == 1", ""),
    Mutant(
        "open calls are closed in a second step",
        "const bool only_call = close_calls(row, after) && after",
        "atomic_add(calls_and_pending(row), 0 - after / kOneOpenCall * kOneOpenCall);\n"
        "  const bool only_call = after",
    ),
    Mutant(
        "a ticket is taken twice",
        "if (first_bad == 0 || has_ticket(row)) return;",
        "if (first_bad == 0) return;",
    ),
    Mutant("ticket 0 is given out", "if (ticket == 0) ticket = ", "if (false) ticket = "),
    Mutant(
        "the result arrives before it is complete", SYSTEM_FENCE + ARRIVED, ARRIVED + SYSTEM_FENCE
    ),
    Mutant(
        "the row begins anew after the result arrived",
        RESET + SYSTEM_FENCE + ARRIVED,
        SYSTEM_FENCE + ARRIVED + RESET,
    ),
    Mutant("a system fence is missing", SYSTEM_FENCE, ""),
    # Memory
    Mutant(
        "a read past the end",
        "uint64_t left = (count - head) / kPerVector;",
        "uint64_t left = (count - head + kPerVector - 1) / kPerVector;",
    ),
    Mutant("a vector past the end", "i + valid * step < left", "i + valid * step <= left"),
    Mutant("a misaligned vector load", HEAD, "  (void)skew;\n  uint64_t head = 0;\n"),
    Mutant("a load that is left out counts", "v[j] = j < valid ? v[j] : v[0];", ";"),
    Mutant("no tail", TAIL, ""),
    Mutant("the head is one too long", "threadIdx.x < head", "threadIdx.x <= head"),
    Mutant(
        "the end of a run is taken twice",
        "if (valid == kLoads || begin",
        "if (begin",
    ),
    Mutant("the wrong tensor of many", "first_block <= blockIdx.x", "first_block < blockIdx.x"),
    # Values
    Mutant(
        "the order of -0 and +0 is lost",
        "const Key key = Format::key(static_cast<Int>(max_word));",
        "const Key key = Format::key(static_cast<Int>(max_word == kSign ? 0 : max_word));",
    ),
    Mutant("an Inf counts as NaN", "totals.posinf += positive;", "totals.nan += positive;"),
    Mutant(
        "a count in too few bits", "found.nan * call.repeat", "(found.nan & 0x3fff) * call.repeat"
    ),
    Mutant("repeat is not multiplied", "found.neginf * call.repeat", "found.neginf"),
    Mutant(
        "the index mapping takes the wrong weight",
        "divide(place, dims[d].size) * dims[d].weight",
        "divide(place, dims[d].size) * dims[d - 1].weight",
    ),
    Mutant(
        "the last bad element in the place of the first",
        "complement > totals.first ? complement : totals.first",
        "complement",
    ),
    Mutant(
        "-Inf does not show",
        "((((min_word & ~kSign) + kToSign) | ((max_word & ~kSign) + kToSign)) & kSign) != 0",
        "(((max_word & ~kSign) + kToSign) & kSign) != 0",
    ),
    Mutant(
        "-Inf and negative NaNs do not show",
        "max_key() > Format::kMaxFinite || min_key() < Format::kMinFinite",
        "max_key() > Format::kMaxFinite",
        policy=0,
    ),
    Mutant("every other byte is left out", "      pair.fold_word(word << 8);\n", ""),
    Mutant(
        "the byte below makes a NaN of a finite fnuz byte",
        "pair.fold_word(word & 0xff00ff00u);",
        "pair.fold_word(word);",
    ),
    Mutant("a NaN of fnuz does not show", "(nan_signs & 0x80808080u) != 0", "false"),
    Mutant(
        "the byte below orders negative extremes",
        "~(bits & 0x7fff)) >> 8",
        "-(bits & 0x7fff)) >> 8",
    ),
    Mutant(
        "extremes of no finite element",
        "if (Format::is_finite_key(static_cast<Int>(max)))",
        "if (max != Format::kLowest)",
    ),
]


def run(command: list[str | Path]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, "timeout"
    return done.returncode, done.stdout + done.stderr


def sign_of(output: str) -> str:
    for pattern, name in SIGNS.items():
        if match := re.search(pattern, output, re.MULTILINE):
            return name or match.group(1)
    return output.strip().splitlines()[-1] if output.strip() else "died"


def try_mutant(mutant: Mutant) -> dict[str, str]:
    """How each kind of build catches it; kinds that do not are left out."""
    caught = {}
    with tempfile.TemporaryDirectory() as folder:
        csrc = Path(folder, "csrc")
        shutil.copytree(CSRC, csrc)
        source = csrc / "cuda" / "scan_kernels.cuh"
        text = source.read_text()
        if text.count(mutant.old) != 1:
            raise SystemExit(f"{mutant.fault}: its text occurs {text.count(mutant.old)} times")
        source.write_text(text.replace(mutant.old, mutant.new))
        for kind, arguments in RUNS.items():
            test = Path(folder, f"test_kernels-{kind}-{mutant.policy}")
            place = [f"CSRC={csrc}", f"BUILD={folder}", f"COMMON={COMMON}"]
            code, output = run(["make", *place, test])
            if code != 0:
                raise SystemExit(f"{mutant.fault}: does not compile\n{output}")
            code, output = run([test, *arguments])
            if code != 0:
                caught[kind] = sign_of(output)
    print(mutant.fault, caught, file=sys.stderr, flush=True)
    return caught


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of faults; none: all")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    wanted = [m for m in MUTANTS if not options.names or any(n in m.fault for n in options.names)]
    objects = [COMMON / "simt.o", *(COMMON / f"test_kernels-{kind}.o" for kind in RUNS)]
    code, output = run(["make", f"BUILD={COMMON}", *objects])
    if code != 0:
        raise SystemExit(output)
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(try_mutant, wanted))
    print("| fault | plain | asan, ubsan | tsan |\n|---|---|---|---|")
    for mutant, caught in zip(wanted, results, strict=True):
        print(f"| {mutant.fault} |", " | ".join(caught.get(kind, "") for kind in RUNS), "|")
    missed = [m.fault for m, caught in zip(wanted, results, strict=True) if not caught]
    for fault in missed:
        print(f"not caught: {fault}", file=sys.stderr)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
