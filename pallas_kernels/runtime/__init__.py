"""Everything about a kernel but its body: argument checks, launching, interpretation, lowering, and hardware facts."""
