"""Routed experts whose weights lie partly in host memory, for models that are larger than their GPU."""

from dsv4_jax.expert_pages.cuda_memory import CudaMemory as CudaMemory
from dsv4_jax.expert_pages.expert_memory import ExpertMemory as ExpertMemory, program_bytes as program_bytes
from dsv4_jax.expert_pages.migration import ExpertMetrics as ExpertMetrics, ExpertMigration as ExpertMigration
from dsv4_jax.expert_pages.paged_experts import (
    ExpertPages as ExpertPages,
    ExpertStack as ExpertStack,
    Mover as Mover,
)
from dsv4_jax.expert_pages.policy import PlacementPolicy as PlacementPolicy
from dsv4_jax.expert_pages.token_cost import TokenCost as TokenCost, selection_shares as selection_shares
