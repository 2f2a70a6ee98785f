"""The bytes of quantised rows and index keys: their layouts, their encoders, and arithmetic with reproducible bits."""
