"""Routed experts whose weights lie partly in host memory, for models that are larger than their GPU."""

from dsv4_jax.expert_pages.cuda_memory import CudaMemory
from dsv4_jax.expert_pages.expert_memory import ExpertMemory, program_bytes
from dsv4_jax.expert_pages.host_tables import HostTables
from dsv4_jax.expert_pages.migration import ExpertMetrics, ExpertMigration
from dsv4_jax.expert_pages.paged_experts import ExpertPages, ExpertStack, Mover
from dsv4_jax.expert_pages.policy import PlacementPolicy
from dsv4_jax.expert_pages.token_cost import TokenCost, selection_shares
