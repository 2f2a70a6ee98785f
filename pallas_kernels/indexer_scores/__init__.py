"""Kernels of the lightning indexer, which scores the keys of compressed entries. Attention reads the best entries."""

from pallas_kernels.indexer_scores.indexer_scores import indexer_scores
from pallas_kernels.indexer_scores.key_tiles import IndexerKeys
from pallas_kernels.indexer_scores.round_index_query import round_index_query
