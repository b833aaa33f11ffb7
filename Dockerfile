# syntax=docker/dockerfile:1
# CPU:  docker build -t echelon .
# GPU:  docker build -t echelon --build-arg TORCH_INDEX=https://pypi.org/simple .
#       (that torch brings its CUDA libraries; the host needs the driver and the NVIDIA container toolkit)
# or on a CUDA image, for code that needs its compilers and libraries:
#       docker build -t echelon --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 --build-arg TORCH_INDEX=... .
ARG BASE=python:3.12-slim
FROM ${BASE}

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PATH=/opt/echelon/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1

# A CUDA image has no Python; one of Python needs nothing here.
RUN command -v python3 >/dev/null \
    || { apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/echelon \
    && useradd --uid 1000 --create-home --non-unique echelon \
    && install --directory --owner=1000 --group=1000 /work

# The libraries first, each held to its hash, and torch for this machine: a change of the code leaves this layer as it is.
WORKDIR /opt/source
COPY constraints.txt ./
COPY locks/core.txt locks/
RUN pip install --no-deps --require-hashes --requirement locks/core.txt \
    && pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch

COPY pyproject.toml README.md LICENSE ./
COPY echelon ./echelon
RUN pip install --no-deps .

# Scripts and logs live here; mount or copy yours.
USER 1000:1000
WORKDIR /work
ENTRYPOINT ["echelon"]
CMD ["--help"]
