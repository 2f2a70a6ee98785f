"""Kernels of the lightning indexer: it scores compressed keys, of which attention reads the best."""

from pallas_kernels.indexer_scores.indexer_scores import indexer_scores
from pallas_kernels.indexer_scores.key_tiles import IndexerKeys
from pallas_kernels.indexer_scores.round_index_query import round_index_query
