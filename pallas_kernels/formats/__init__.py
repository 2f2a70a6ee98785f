"""The stored bytes of quantized KV rows and index keys: layouts, encoders, and arithmetic with reproducible bits."""
