# One file for CPUs and GPUs; docs/start/containers.md has the commands.
# torch's wheels bring the CUDA libraries along, so the base is plain Debian either way.
ARG BASE=debian:trixie-slim

# What does not change with the project; the devcontainer stops here.
FROM ${BASE} AS system
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates git make openssh-client python3 python3-venv shellcheck \
 && rm -rf /var/lib/apt/lists/*
# Mirrors of the package index may be named at build time; unnamed ones leave no variable behind.
ARG UV_DEFAULT_INDEX
ARG PIP_INDEX_URL
RUN python3 -m venv /opt/uv \
 && /opt/uv/bin/pip install --no-cache-dir "uv>=0.9" \
 && ln -s /opt/uv/bin/uv /opt/uv/bin/uvx /usr/local/bin/
# HOME and USER also serve an id without an account (--user).
RUN useradd --create-home --uid 1000 --shell /bin/bash yolo && chmod 1777 /home/yolo
ENV HOME=/home/yolo USER=yolo UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
USER yolo

# The packages: built again only when pyproject.toml or the pins change.
FROM system AS packages
USER root
WORKDIR /app
ARG UV_DEFAULT_INDEX
# cpu, cu130, rocm6.4 ..., see `uv pip install --help`; without it the index decides: CUDA on x86-64.
# Other wheels need other CUDA libraries than those that are pinned for the index's torch.
ARG UV_TORCH_BACKEND
ARG PACKAGES="--all-extras --group dev"
COPY pyproject.toml ./
COPY .ci/pyproject.toml .ci/constraints.txt .ci/
RUN --mount=type=cache,target=/tmp/uv \
    if [ -n "${UV_TORCH_BACKEND}" ]; then sed -Ei '/^(cuda|nvidia|triton)-?.*==/d' .ci/constraints.txt; fi \
 && uv venv --no-cache /opt/venv \
 && UV_CACHE_DIR=/tmp/uv uv pip install --python /opt/venv -r pyproject.toml -c .ci/constraints.txt ${PACKAGES}
ENV PATH=/opt/venv/bin:$PATH VIRTUAL_ENV=/opt/venv

# The project; what it writes may belong to any user (--user).
FROM packages AS run
ARG UV_DEFAULT_INDEX
COPY --chown=yolo:yolo . ./
RUN chmod -R a+rX . && install -d -m 1777 . runs datasets \
 && uv pip install --python /opt/venv --no-cache --no-deps .
# torchrun kills processes 30 s after it has told them to stop; what stops it has its own limit.
ENV TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
USER yolo
CMD ["hydra-yolov3-spp", "--help"]
