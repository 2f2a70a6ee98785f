"""The bytes of quantized rows and index keys: their layouts, their encoders, and arithmetic with reproducible bits."""
