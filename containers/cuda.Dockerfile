# aqnpipe with vLLM on NVIDIA GPUs (driver 580 or newer): docker build --file containers/cuda.Dockerfile --tag aqnpipe:cuda .
# For `snakemake --software-deployment-method apptainer`: docs/how-to/containers.md
# CUDA's libraries come with torch's wheels, the driver from the host. The image has no nvcc: vLLM runs the kernels that it was
# built with.
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/aqnpipe

# Triton compiles the launchers of its kernels when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints-cuda.txt README.md LICENSE ./
COPY src ./src
# src/aqnpipe/shipped links to these, which `aqnpipe init` and `aqnpipe run` need.
COPY Snakefile ./
COPY workflow ./workflow
COPY config ./config
COPY profiles ./profiles
RUN pip install --constraint constraints-cuda.txt '.[slurm,vllm,lm-eval,check]'

WORKDIR /work
ENTRYPOINT ["aqnpipe"]
CMD ["--help"]
