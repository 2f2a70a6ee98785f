"""Classifies a program's kernels by the part of the model that they belong to, and lists the longest ones.

In XLA's text of a compiled program, the `op_name` of each instruction is the path of its named scopes. The kernel
of a fusion has the name of the instruction. The name of a Pallas kernel is the second to last element of the path.
"""

import collections
import re
from collections.abc import Sequence
from typing import Any

from dsv4_jax.nn import SCOPES


REST = "rest"
ALL_REDUCE = "all_reduce"
# Kinds of kernels, in the order in which they are printed: named scopes of the model, and all-reduces. All other
# kernels are of the kind `REST`.
KINDS = tuple(scope for scope in SCOPES if scope != "norm") + (ALL_REDUCE,)
OUTSIDE = "embedding", "lm_head", "sampling"  # kinds of kernels outside the layers
LONGEST = 24  # number of kernels that are listed by name

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = .* (fusion|custom-call)\(.*op_name="([^"]*)"')
_CALLED = re.compile(r"(?:body|to_apply|calls|computations?)=\{?((?:%[\w.-]+(?:, )?)+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_PALLAS = re.compile(r"_mosaic_gpu_kernel(_\d+)?$")
# Kernels of libraries such as cuBLAS are not named after an instruction. Their kind follows from their name.
_LIBRARIES = {
    "projections": re.compile("gemm|gemv|nvjet|cutlass|cublas|splitk", re.IGNORECASE),
    ALL_REDUCE: re.compile("nccl", re.IGNORECASE),
}


def kernel_report(launches: Sequence[tuple[str, float]], text: str, calls: int) -> dict[str, Any]:
    """Returns the mean times of the kernels in a call of a program.

    Args:
      launches: name and milliseconds of each launch, in order. If a program has several copies of a kernel, their names
        differ in a final number.
      text: XLA's text of the program.
      calls: number of calls of the program that launched these kernels.

    Returns:
      {"kernel_milliseconds": {kind: milliseconds a call}, "longest_kernels": [{"name", "kind", "launches",
      "milliseconds"}], "launches": number of launches a call}. A kernel's values are per call, too.
    """
    kinds_of = kinds_by_name(text)
    counts = collections.Counter()
    by_kind = dict.fromkeys([*KINDS, REST], 0.0)
    by_name = {}  # {(name that copies of a kernel share, kind): milliseconds a call of each launch}
    for name, milliseconds in launches:
        name_in_text = _PALLAS.sub("", name)
        if launch_kinds := kinds_of.get(name_in_text):
            # A kernel may run in several scopes. Its launches are in the order of the instructions.
            kind = launch_kinds[counts[name_in_text] % len(launch_kinds)]
        else:
            kind = next((kind for kind, pattern in _LIBRARIES.items() if pattern.search(name)), REST)
        counts[name_in_text] += 1
        by_kind[kind] += milliseconds / calls
        shared_name = re.sub(r"_\d+$", "", name)
        by_name.setdefault((shared_name, kind), []).append(milliseconds / calls)
    rows = [
        {"name": name, "kind": kind, "launches": len(times) / calls, "milliseconds": sum(times)}
        for (name, kind), times in by_name.items()
    ]
    return {
        "kernel_milliseconds": by_kind,
        "longest_kernels": sorted(rows, key=lambda row: -row["milliseconds"])[:LONGEST],
        "launches": len(launches) / calls,
    }


def kinds_by_name(text: str) -> dict[str, list[str]]:
    """Returns {name of a kernel: [kind of each launch, in order]} for one call of the program.

    Args:
      text: XLA's text of the program. The launches of a loop's body are listed once for each iteration, or only once if
        the text does not say the number of iterations.
    """
    computations = {}  # {name of a computation: its lines}
    entry = []  # lines of the computation that the program begins with
    lines = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header[2], [])
            entry = lines if header[1] else entry
        lines.append(line)
    kinds = {}

    def visit(lines: list[str]) -> None:
        """Adds the launches of a computation and of the computations that it calls to `kinds`."""
        for line in lines[1:]:
            match = _INSTRUCTION.match(line)
            called = re.findall(r"%([\w.-]+)", " ".join(_CALLED.findall(line)))
            # In a loop, XLA joins a Pallas kernel and the slices that it reads and writes into a fusion. Such a fusion
            # is no kernel itself.
            inner = [line for name in called for line in computations.get(name, [])]
            if match and not any(" custom-call(" in line for line in inner):
                instruction, opcode, path = match.groups()
                scopes = path.split("/")
                name = re.sub(r"[.-]", "_", instruction) if opcode == "fusion" else scopes[-2:][0]
                kinds.setdefault(name, []).append(_kind(scopes))
                continue
            trips = _TRIP_COUNT.search(line)
            for name in called * int(trips[1] if trips else 1):
                visit(computations[name])

    visit(entry)
    return kinds


def _kind(scopes):
    """Returns the kind of a kernel. `scopes` are the named scopes of its instruction, the outermost first."""
    if any(ALL_REDUCE in scope for scope in scopes):
        return ALL_REDUCE
    # Scopes are nested. The outermost one names the part of the model that an instruction belongs to.
    outermost = next((scope for scope in scopes if scope in SCOPES), REST)
    return outermost if outermost in KINDS else REST
