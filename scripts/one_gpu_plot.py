"""Plots a token's time against the experts in host memory: `python scripts/one_gpu_plot.py --help`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import matplotlib
import tyro

from dsv4_jax.config import DSV4Config
from dsv4_jax.expert_pages.token_cost import READ_RATES, TokenCost


EXPERT_BYTES = 12 << 20  # codes of an expert of V4-Flash
OTHER_BYTES = 6_820_000_000  # weights of V4-Flash's layers without their routed experts
SKEWS = 0.0, 0.6, 1.0


@dataclasses.dataclass(frozen=True)
class Plot:
    """Draws the time of a token of V4-Flash, one request, against the share of experts in host memory.

    A line is the estimate of `TokenCost` at one skew, which says how unequally tokens select experts. The steps of the
    reports are points.

    Attributes:
      reports: results of `dsv4-jax bench model --expert-memory ... --json`.
      out: the picture to write.
    """

    reports: tyro.conf.Positional[tuple[Path, ...]]
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.png")] = Path("benchmarks/one_gpu.png")

    def run(self) -> None:
        """Draws the picture."""
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        config = DSV4Config.v4_flash()
        gpus = {}
        layers = config.num_hidden_layers
        experts = config.n_routed_experts
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for (gpu, rate), style in zip(READ_RATES.items(), ("-", "--"), strict=True):
            cost = TokenCost(layers, experts, config.num_experts_per_tok, EXPERT_BYTES, OTHER_BYTES, rate)
            for color, skew in enumerate(SKEWS):
                times = [cost.milliseconds(on_host, skew) for on_host in range(experts + 1)]
                shares = [100 * on_host / experts for on_host in range(experts + 1)]
                axes.plot(shares, times, style, color=f"C{color}", label=f"{gpu.upper()}, skew {skew:g}")
        for path in self.reports:
            report = json.loads(path.read_text())
            share = report["host_bytes"] / EXPERT_BYTES / layers / experts
            for row in report["results"]:
                color = SKEWS.index(row["skew"])
                if row["requests"] == row["tokens"] == 1 and row["layers"] == layers:
                    gpus.setdefault(report["device"], "os^v"[len(gpus)])
                    axes.plot(100 * share, row["milliseconds"], gpus[report["device"]], color=f"C{color}", mec="black")
        for device, marker in gpus.items():
            axes.plot([], [], marker, color="white", mec="black", label=f"measured, {device}")
        axes.set(xlabel="% of the experts in host memory", ylabel="milliseconds a token", ylim=0)
        axes.set_title("V4-Flash, one request: estimated and measured")
        axes.legend(fontsize=8)
        figure.savefig(self.out, dpi=150)


if __name__ == "__main__":
    tyro.cli(Plot).run()
