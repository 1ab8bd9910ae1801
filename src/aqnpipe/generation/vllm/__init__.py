"""vLLM as a generation backend, with noise that is put and measured inside its worker processes."""
