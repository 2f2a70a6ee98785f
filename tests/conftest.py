"""Settings for every test: strict promotion finds silent casts and broadcasts; oracle data lies in tests/data."""

import gc
import os


# The kernel interpreter blocks a thread of XLA's for each simulated one that waits: on a machine with two cores, where
# XLA would make two, it can wait for ever. Tests simulate up to 32. Read when the backend starts, so before JAX.
os.environ.setdefault("NPROC", "64")
# Nearly all of the time goes into compiling programs that run once or twice: compile them quickly rather than well.
# Products have the same bits on every CPU, as on the command line; .ci/run also runs some tests without this.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_enable_platform_dependent_math=false " + os.environ.get("XLA_FLAGS", "")
)
# Command lines that tests run keep no programs. These processes do, see tests/programs.py.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

from tests import programs  # noqa: E402
from tests.races import race_checked  # noqa: E402
from tests.type_checks import checked  # noqa: E402


gc.set_threshold(100_000, 20, 100)  # tracing makes many objects and few cycles: a quarter of its time
jaxtyping.jaxtyped = checked  # the import hook's code looks it up there

# A machine with eight devices: arrays of one of them keep their kernels, and tests of meshes use more.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Programs without the lines of Python that made them: a tenth of the time that lowering and compilation take.
jax.config.update("jax_traceback_in_locations_limit", 0)


SHARING = ("tests/decode/", "tests/engine/", "tests/serve/")  # folders whose files share a model, and so its programs


def pytest_report_header(config):
    if config.option.markexpr == "not gpu and not slow and not aot":
        return "about fourteen minutes on two cores, the next time eight; -m full runs every test that needs no GPU"


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        programs.remove_if_many()
    programs.keep()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if not item.get_closest_marker("gpu"):
            item.add_marker("full")


@pytest.fixture(autouse=True, scope="session")
def few_programs_draw_parameters():
    from tests.draws import draw_in_few_programs  # imports the package, whose annotations are to be checked

    draw_in_few_programs()


@pytest.fixture(autouse=True, scope="module")
def forget_programs(request):
    """Other files share few programs: without this a worker grows to several GB, and slows down."""
    yield
    if not request.node.nodeid.startswith(SHARING):
        jax.clear_caches()


@pytest.fixture(autouse=True)
def interpreted_kernels_do_not_race():
    """Every kernel that a test interprets is checked for races."""
    with race_checked():
        yield


@pytest.fixture
def untyped():
    """Calls are as a user's, whose arguments' types nothing checks but the functions themselves."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
