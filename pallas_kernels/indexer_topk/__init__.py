"""The exact top-k of the indexer's scores."""

from pallas_kernels.indexer_topk.indexer_topk import indexer_topk
