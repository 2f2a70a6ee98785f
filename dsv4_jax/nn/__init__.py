"""DeepSeek-V4 as Flax NNX modules."""

from dsv4_jax.nn.attention import Attention, StepCarry
from dsv4_jax.nn.block import RECORDED, SCOPES, DecoderLayer
from dsv4_jax.nn.compressor import Compressor
from dsv4_jax.nn.draft_layers import DraftLayers
from dsv4_jax.nn.dspark import DSparkDrafts
from dsv4_jax.nn.engram import Engram, TokenMap
from dsv4_jax.nn.hyper_connection import HyperConnection, HyperHead, ResidualStreams, apply_post, sinkhorn
from dsv4_jax.nn.indexer import CSAIndexer
from dsv4_jax.nn.layer_stack import LayerLoop, LayerStack, Recorded, stack_modules
from dsv4_jax.nn.layers import Embedding, Linear, RMSNorm
from dsv4_jax.nn.lora import add_adapters, cast_adapters, merge_adapter
from dsv4_jax.nn.model import DeepseekV4ForCausalLM, DeepseekV4Model
from dsv4_jax.nn.moe import MLP, Experts, HashTable, MoE, Router
from dsv4_jax.nn.mtp import MTPDrafts
from dsv4_jax.nn.parameters import ParameterView, parameter_views
from dsv4_jax.nn.projections import FusedLinear, Projection
from dsv4_jax.nn.shardings import shardings
