"""Times calls of an op in a loop on the device, comparable to CUDA graphs of other projects' kernels."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax import lax

from dsv4_jax.bench.cases import Case
from dsv4_jax.bench.op_times import chosen_cases
from dsv4_jax.bench.reports import write_report
from dsv4_jax.config import DSV4Config


def loop_times(
    names: tuple[str, ...],
    only: tuple[str, ...] = (),
    config: Literal["v4_flash", "v4_pro", "v41_flash"] = "v4_flash",
    calls: int = 16,
    passes: int = 128,
    report: Path | None = None,
) -> None:
    """Prints the time of a call of each case of `dsv4-jax bench ops`. A kernel may start while the preceding one ends.

    With XLA_FLAGS=--xla_gpu_command_buffer_scheduling_mode=SERIALIZE, the kernels of a pass form a single chain.

    Args:
      names: names of ops, as for `dsv4-jax bench ops`.
      only: texts; only cases whose op or shape contains one of them are timed. Default: all cases.
      config: the model whose shapes are used.
      calls: number of calls in a pass, each with its own inputs.
      passes: number of passes of the loop; with 16, times below 3 us were up to 0.5 us apart.
      report: JSON file to write the times to.
    """
    model = getattr(DSV4Config, config)()
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "shapes": config.removeprefix("v4_"),
        "cache_format": model.kv_format,
        "clock": "loop on the device, median",
        "loops": [],
    }
    implementation = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    for case in chosen_cases(model, model.kv_format, names, only):
        microseconds = 1e6 * seconds_a_call(case, implementation, calls, passes)
        result["loops"].append({"op": case.op, "shape": case.shape, "microseconds": round(microseconds, 3)})
        print(f"{case.op:24s} {case.shape:30s} {microseconds:8.2f} us", flush=True)
    if report is not None:
        write_report(report, result)


def seconds_a_call(case: Case, implementation: str, calls: int, passes: int, times: int = 5) -> float:
    """Returns the seconds of a call: the median of `times` measurements.

    A measurement is half of the difference between the time of three loops and of one loop, divided by the number of
    calls in a loop. The difference leaves out the time to start and to wait.
    """
    layers, inputs = case.make(calls)

    def run_calls(layers, inputs):
        """Calls the op with each of the inputs, on the layers in turn.

        Returns:
          (layers, with their states after the calls; results of the calls if the op does not update a state).
        """
        layers = list(layers)
        results = []
        for i, arrays in enumerate(inputs):
            layer = i % len(layers)
            result = case.call(*layers[layer], *arrays, implementation=implementation)
            if case.updates:
                layers[layer] = (result, *layers[layer][1:])
            else:
                results.append(result)
        return layers, results

    def one_pass(inputs, carry):
        layers, _, number = carry
        # Makes calls depend on the pass. Otherwise, XLA would move them out of the loop.
        layers, varied, number = lax.optimization_barrier((layers, inputs, number))
        return *run_calls(layers, varied), number * number

    structs = jax.eval_shape(run_calls, layers, inputs)[1]
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), structs)

    def run(inputs, *carry):
        return lax.fori_loop(0, passes, lambda _, carry: one_pass(inputs, carry), carry)

    loop = jax.jit(run, donate_argnums=(1, 2))
    carry = loop(inputs, layers, results, jnp.int32(0))

    def seconds(executions: int) -> float:
        nonlocal carry
        start = time.perf_counter()
        for _ in range(executions):
            carry = loop(inputs, *carry)
        jax.block_until_ready(carry)
        return time.perf_counter() - start

    seconds(2)
    return statistics.median((seconds(3) - seconds(1)) / 2 for _ in range(times)) / (calls * passes)


def main(args: Sequence[str] | None = None) -> None:
    tyro.cli(loop_times, args=args)


if __name__ == "__main__":
    main()
