"""vLLM as a generation backend; its worker processes apply and measure the noise."""
