# What `dsv4_jax` offers and where it is defined: read by editors, by type checkers and, at run time, by lazy_loader.

from . import (
    bench as bench,
    cache as cache,
    checkpoint as checkpoint,
    cli as cli,
    config as config,
    data as data,
    decode as decode,
    engine as engine,
    host as host,
    nn as nn,
    ops as ops,
    quant as quant,
)
from .cache import (
    Batch as Batch,
    CacheSchema as CacheSchema,
    KVCache as KVCache,
    LayerCacheHandle as LayerCacheHandle,
    compute_block_budget as compute_block_budget,
    init_cache as init_cache,
)
from .checkpoint import load_checkpoint as load_checkpoint, save_release as save_release
from .common.xla_flags import set_xla_flags as set_xla_flags
from .config import DSV4Config as DSV4Config, EngramConfig as EngramConfig
from .decode import (
    CompiledModel as CompiledModel,
    LogitsProcessor as LogitsProcessor,
    SamplingParams as SamplingParams,
    decode_loop as decode_loop,
    decode_step as decode_step,
    forward as forward,
)
from .engine import (
    Engine as Engine,
    PromptLookup as PromptLookup,
    beam_search as beam_search,
    generate as generate,
    n_best as n_best,
    stream as stream,
)
from .host import (
    CacheFullError as CacheFullError,
    KVCacheManager as KVCacheManager,
    PrefixCache as PrefixCache,
    PrefixFiles as PrefixFiles,
    load_request as load_request,
    offload as offload,
    resume as resume,
    save_request as save_request,
)
from .nn import DeepseekV4ForCausalLM as DeepseekV4ForCausalLM
from .quant import kv_format as kv_format

__version__: str
