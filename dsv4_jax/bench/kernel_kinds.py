"""What takes a program's time: its kernels by kind, and the longest of them."""

import re


# Kinds of kernels, by parts of their names. XLA's own matrix products are found in the text of the program.
KINDS = {
    "append + flush": ("append_swa", "flush"),
    "hyper-connections": ("hyper_connections",),
    "router": ("router",),
    "experts": ("experts", "grouped"),
    "indexer": ("round_index_query", "indexer_scores"),
    "top-k": ("indexer_topk",),
    "attention": ("sparse_attention", "combine", "gather_"),
    "projections": ("linear", "matmul", "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "dot"),
    "norm + rotation": ("norm_rope",),
    "collectives": ("all_reduce", "nccl"),
}
REST = "rest"
LONGEST = 24  # kernels listed by name


def by_kind(kernels: list[tuple[str, float]], text: str) -> dict[str, float]:
    """{kind: milliseconds} of (name, milliseconds) of the launches of a program, whose text XLA wrote."""
    products, kinds = _products(text), dict.fromkeys([*KINDS, REST], 0.0)
    for name, milliseconds in kernels:
        kinds[_kind(name, products)] += milliseconds
    return kinds


def longest(kernels: list[tuple[str, float]], calls: int) -> list[dict[str, str | float]]:
    """Names, launches and milliseconds a call of the longest kernels; numbered copies of a kernel count as one.

    `kernels` are (name, milliseconds, divided by `calls`) of the launches of so many calls.
    """
    found: dict[str, list[float]] = {}
    for name, milliseconds in kernels:
        found.setdefault(re.sub(r"_\d+$", "", name), []).append(milliseconds)
    rows = [
        dict(name=name, launches=len(times) / calls, milliseconds=round(sum(times), 4)) for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["milliseconds"])[:LONGEST]


def _products(text):
    """Names of XLA's fusions around a matrix product, as their kernels are called."""
    fused = re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    product = {name for name, body in fused if "dot_general" in body}
    calls = re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = .*calls=%?([\w.-]+)", text, re.MULTILINE)
    return {re.sub(r"[.-]", "_", name) for name, called in calls if called in product}


def _kind(name, products):
    for kind, words in KINDS.items():
        if any(word in name.lower() for word in words):
            return kind
    return "projections" if name in products else REST
