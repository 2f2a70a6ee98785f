"""Classifies a program's kernels by the part of the model that they belong to, and lists the longest ones.

In XLA's text of a compiled program, each instruction has the path of its `jax.named_scope`s. The kernel of a fusion is
named after the instruction. The name of a Pallas kernel is the last but one element of the path.
"""

import collections
import re
from collections.abc import Sequence
from typing import Any

from dsv4_jax.nn import SCOPES


REST = "rest"
ALL_REDUCE = "all_reduce"
# Kinds of kernels, in the order in which they are printed; other scopes count as the rest.
KINDS = tuple(scope for scope in SCOPES if scope != "norm") + (ALL_REDUCE,)
OUTSIDE = "embedding", "lm_head", "sampling"  # kinds of kernels that are of no layer
LONGEST = 24  # kernels listed by name

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .* (fusion|custom-call)\(.*op_name="([^"]*)"')
_CALLED = re.compile(r"(?:body|to_apply|calls|computations?)=\{?((?:%[\w.-]+(?:, )?)+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PALLAS = re.compile(r"(.*)_mosaic_gpu_kernel(?:_\d+)?")
# Kernels of libraries are not named after an instruction.
_LIBRARIES = {
    "projections": re.compile("gemm|gemv|nvjet|cutlass|cublas|splitk", re.IGNORECASE),
    ALL_REDUCE: re.compile("nccl", re.IGNORECASE),
}


def kernel_report(launches: Sequence[tuple[str, float]], text: str, calls: int) -> dict[str, Any]:
    """Returns the times a call of a program's kernels, by kind, and those of the longest kernels by name.

    Args:
      launches: name and milliseconds of each launch, in order. Names of copies of a kernel end in a number.
      text: XLA's text of the program.
      calls: number of calls that launched these kernels.
    """
    kinds = kinds_by_name(text)
    counts = collections.Counter()
    by_kind = dict.fromkeys([*KINDS, REST], 0.0)
    by_name: dict[tuple[str, str], list[float]] = {}
    for name, milliseconds in launches:
        pallas = _PALLAS.fullmatch(name)
        key = pallas[1] if pallas else name
        if scopes := kinds.get(key):
            # One kernel may run in several scopes: its launches follow the order of the instructions.
            kind = scopes[counts[key] % len(scopes)]
        else:
            kind = next((kind for kind, pattern in _LIBRARIES.items() if pattern.search(name)), REST)
        counts[key] += 1
        by_kind[kind] += milliseconds / calls
        by_name.setdefault((re.sub(r"_\d+$", "", name), kind), []).append(milliseconds / calls)
    rows = [
        {"name": name, "kind": kind, "launches": len(times) / calls, "milliseconds": round(sum(times), 4)}
        for (name, kind), times in by_name.items()
    ]
    return {
        "kernel_milliseconds": {kind: round(milliseconds, 4) for kind, milliseconds in by_kind.items()},
        "longest_kernels": sorted(rows, key=lambda row: -row["milliseconds"])[:LONGEST],
        "launches": len(launches) / calls,
    }


def kinds_by_name(text: str) -> dict[str, list[str]]:
    """Returns the kinds of each kernel's launches in a call of a program, in order, by the kernel's name.

    Loops of known length are unrolled.
    """
    computations: dict[str, list[str]] = {}
    entry: list[str] = []
    lines: list[str] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header[2], [])
            entry = lines if header[1] else entry
        lines.append(line)
    kinds: dict[str, list[str]] = {}

    def visit(lines: list[str]) -> None:
        for line in lines[1:]:
            if match := _INSTRUCTION.match(line):
                instruction, opcode, path = match.groups()
                scopes = path.split("/")
                name = re.sub(r"[.-]", "_", instruction) if opcode == "fusion" else scopes[-2:][0]
                kinds.setdefault(name, []).append(_kind(scopes))
            elif called := _CALLED.findall(line):
                trips = _TRIP_COUNT.search(line)
                for name in int(trips[1] if trips else 1) * re.findall(r"%([\w.-]+)", " ".join(called)):
                    visit(computations[name])

    visit(entry)
    return kinds


def _kind(scopes):
    if any(ALL_REDUCE in scope for scope in scopes):
        return ALL_REDUCE
    # The outermost scope says which part of the model an instruction belongs to.
    outermost = next((scope for scope in scopes if scope in SCOPES), REST)
    return outermost if outermost in KINDS else REST
