"""Everything about kernels except their bodies: argument checks, launches, interpretation, lowering, hardware facts."""
