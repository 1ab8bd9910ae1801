"""aqnpipe: declarative experiments on noise-robust post-training, with measured noise in every run."""

__version__ = "0.1.0"
