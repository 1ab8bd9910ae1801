"""Pure tensor functions: noise, truncation and quantization, by formula."""
