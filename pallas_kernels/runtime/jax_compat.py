"""Patches of JAX's lowering of kernels for GPUs. `apply_patches` is called when the first kernel is made for a GPU.

versions        patch
JAX 0.11        Two functions of Mosaic's search for register layouts are replaced by those of JAX 0.12. This halves the
                time to lower the kernels of a decode step. The lowered modules stay the same, byte for byte.
PDL_VERSIONS    The call of a kernel with programmatic dependent launch gets the attribute `uses_pdl`. Without the
                attribute, CUDA graphs do not overlap consecutive kernels.
"""

import functools
import logging

import jax
from jax.experimental.mosaic.gpu import constraints, core
from jaxlib.mlir import ir


# Versions of JAX with which the attribute `uses_pdl` was verified on a GPU.
PDL_VERSIONS = ((0, 11, 2), (0, 12, 0))
logger = logging.getLogger("pallas_kernels")


@functools.cache
def apply_patches() -> None:
    """Applies the patches for the installed version of JAX, once. Warns if the version is not in `PDL_VERSIONS`."""
    version = jax.__version_info__[:3]
    if version[:2] == (0, 11):
        constraints.compute_transitively_equal_vars = equal_variables
        constraints.ConstraintSystem.__and__ = join_systems
    if version in PDL_VERSIONS:
        core._mosaic_gpu_lowering_rule = _marks_dependent_launches(core._mosaic_gpu_lowering_rule)
    else:
        logger.warning("JAX %s: CUDA graphs do not overlap kernels; the patch for it is unverified", jax.__version__)


def equal_variables(system: constraints.ConstraintSystem) -> dict[constraints.Variable, list[constraints.Variable]]:
    """Returns {variable: all other variables that equal it}, for each variable in an equation of two variables.

    Equality is transitive. The function of JAX 0.11, which this function replaces, sorts the variables by the text of
    their operations, and printing an operation takes 3 ms. This function does not sort.
    """
    groups: dict[constraints.Variable, list[constraints.Variable]] = {}
    for constraint in system.constraints:
        match constraint:
            case constraints.Equals(lhs=constraints.Variable() as lhs, rhs=constraints.Variable() as rhs):
                left = groups.setdefault(lhs, [lhs])
                right = groups.setdefault(rhs, [rhs])
                if left is not right:
                    left += right
                    groups |= dict.fromkeys(right, left)
    return {variable: [other for other in group if other != variable] for variable, group in groups.items()}


def join_systems(
    self: constraints.ConstraintSystem, other: constraints.ConstraintSystem | constraints.Unsatisfiable
) -> constraints.ConstraintSystem | constraints.Unsatisfiable:
    """Returns the constraints of both systems, or Unsatisfiable if they assign different layouts to a variable.

    The function of JAX 0.11 looks up all assignments of `self`, and their number grows with every operation of a
    kernel. This function looks up the assignments of the system that has fewer.
    """
    if isinstance(other, constraints.Unsatisfiable):
        return other
    few, many = sorted((self.assignments, other.assignments), key=len)
    if any(variable in many and many[variable] != value for variable, value in few.items()):
        return constraints.Unsatisfiable()
    return constraints.ConstraintSystem(
        assignments=self.assignments | other.assignments, constraints=[*self.constraints, *other.constraints]
    )


def _marks_dependent_launches(lower):
    """Wraps `lower`, JAX's lowering rule for kernels, so that XLA's custom call also gets the attribute `uses_pdl`.

    JAX sets the attribute only on the MLIR module of the kernel.
    """

    @functools.wraps(lower)
    def lower_kernel(*args, module, **options):
        results = lower(*args, module=module, **options)
        if "mosaic_gpu.uses_pdl" in module.operation.attributes:
            attributes = results[0].owner.attributes
            config = {attribute.name: attribute.attr for attribute in attributes["mhlo.backend_config"]}
            attributes["mhlo.backend_config"] = ir.DictAttr.get({**config, "uses_pdl": ir.BoolAttr.get(True)})
        return results

    return lower_kernel
