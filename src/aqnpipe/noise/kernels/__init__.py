"""Pure tensor functions for noise, truncation and quantization."""
