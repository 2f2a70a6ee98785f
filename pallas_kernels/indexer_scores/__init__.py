"""Kernels of the lightning indexer, which scores compressed keys. Attention reads the entries with the best scores."""

from pallas_kernels.indexer_scores.indexer_scores import indexer_scores
from pallas_kernels.indexer_scores.key_tiles import IndexerKeys
from pallas_kernels.indexer_scores.round_index_query import round_index_query
