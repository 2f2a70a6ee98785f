"""The base classes of benchmarks, with the options that they share and the code that runs them."""

import importlib.util
import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from dsv4_jax.bench.reports import write_report
from dsv4_jax.cli import options, startup
from dsv4_jax.parallel.mesh import make_mesh


Config = Annotated[
    str,
    tyro.conf.arg(
        metavar=options.MODELS,
        help="the model whose shapes are used: a released one, of which those with a date and v41_flash draft with "
        "DSpark, or a folder with a config.json. On a CPU, a tiny model replaces the releases of V4.",
    ),
]
Numbers = Annotated[tuple[int, ...] | None, options.optional("N ...")]
PlotFile = Annotated[Path | None, options.optional("FILE.png")]
Rows = Iterable[dict[str, Any]]  # the results of a report; each is measured when it is asked for


class Benchmark(options.Command):
    """The options that all benchmarks have, and the code that runs a benchmark.

    The method `_results` of a subclass yields the results. A subclass with the option `plot` has the attribute `_plot`,
    the name of a function in `bench.plots`. `_sizes` is {option: (default sizes on a GPU, default sizes on a CPU)}.

    Attributes:
      json: also write the results to this file.
    """

    _plot: ClassVar[str]
    _sizes: ClassVar[dict[str, Any]] = {}
    json: Annotated[Path | None, options.optional("FILE.json")] = None

    def run(self) -> None:
        """Runs the benchmark and writes its files. Raises ValueError if an option is wrong."""
        sizes = self.mesh_sizes()
        plot = vars(self).get("plot")
        if plot is not None:
            if importlib.util.find_spec("matplotlib") is None:
                raise ValueError("--plot needs matplotlib: pip install 'dsv4-jax[notebooks]'")
            if plot.suffix != ".png":
                raise ValueError(f"--plot {plot} must end in .png")
        # Check that the files can be written before the run, which takes minutes.
        options.check_file("json", self.json, "written")
        options.check_file("plot", plot, "written")
        if self.expert_bytes() is not None:
            startup.show_log()
        # XLA leaves a quarter of a GPU's memory unused by default.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        startup.notify("Starting JAX ...")
        import jax

        report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        report |= {"mesh": sizes} if sizes else {}
        results = []
        for row in self._results(report, make_mesh(sizes) if sizes else None):
            results.append(row)
            if self.json is not None:
                write_report(self.json, report | {"results": results})
        if plot is not None:
            from dsv4_jax.bench import plots

            getattr(plots, self._plot)(report | {"results": results}, plot)

    def _options(self, kind, mesh, **values):
        """Makes the options object of a measurement, such as `StepOptions`, from the options of this command.

        Args:
          kind: class of the object. Its parameters decide which options are passed to it.
          mesh: the devices. Default batch sizes that the mesh's axis "data" does not divide are left out.
          **values: values of further parameters.
        """
        import jax

        shards = 1 if mesh is None else mesh.shape.get("data", 1)
        for name, (on_gpu, on_cpu) in self._sizes.items():
            sizes = on_gpu if jax.default_backend() == "gpu" else on_cpu
            values[name] = tuple(size for size in sizes if name != "batches" or size % shards == 0)
        values |= {name: value for name, value in vars(self).items() if value is not None}
        values |= {"mesh": mesh, "expert_memory": self.expert_bytes()}
        return kind(**{name: values[name] for name in inspect.signature(kind).parameters if name in values})

    def _results(self, report, mesh) -> Rows:
        raise NotImplementedError


class ModelBenchmark(Benchmark):
    """The options of benchmarks with the shapes of a released model.

    Attributes:
      cache_format: format of the cache's rows. Default: the format of the model's release.
    """

    config: Config = "v4_flash"
    cache_format: Literal["v4", "v41", "per_entry"] | None = None

    def _model(self, report):
        """Returns the model's configuration. Adds the names of the model and of the cache's format to the report."""
        config = options.named_config(self.config, "--config", mtp=vars(self).get("drafts", 0) > 0)
        report["shapes"] = self.config.removeprefix("v4_")
        report["cache_format"] = self.cache_format or config.kv_format
        return config
