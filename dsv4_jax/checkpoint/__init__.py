"""DeepSeek-V4 checkpoints: safetensors files, the table of tensor names, loading into the model, and saving."""

from dsv4_jax.checkpoint.adapters import load_adapters, save_adapter
from dsv4_jax.checkpoint.convert import convert_checkpoint
from dsv4_jax.checkpoint.fake_quant import fake_quantize
from dsv4_jax.checkpoint.load import load_checkpoint
from dsv4_jax.checkpoint.reader import StoredTensor, read_checkpoint, read_file, weights_fingerprint
from dsv4_jax.checkpoint.rounding_loss import RoundingLoss
from dsv4_jax.checkpoint.save import save_release
from dsv4_jax.checkpoint.tokenizer import TextStream, TokenBytes, read_tokenizer
