# aqnpipe on a CPU: docker build --file containers/cpu.Dockerfile --tag aqnpipe:cpu .
# For `snakemake --software-deployment-method apptainer`: docs/how-to/containers.md
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/aqnpipe

# A compiler for the parts of torch that are compiled when they are first used.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# src/aqnpipe/shipped links to these, which `aqnpipe init` and `aqnpipe run` need.
COPY Snakefile ./
COPY workflow ./workflow
COPY config ./config
COPY profiles ./profiles
# The CPU builds of torch, without the CUDA libraries that the builds on the package index need.
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu --constraint constraints.txt '.[slurm,check]'

WORKDIR /work
ENTRYPOINT ["aqnpipe"]
CMD ["--help"]
