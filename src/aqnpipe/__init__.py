"""aqnpipe: declarative experiments on noise-robust post-training that prove what they did."""

__version__ = "0.1.0"
