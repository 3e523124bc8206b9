# The cluster image: a base with CUDA, cuDNN and NCCL, InfiniBand's libraries, and an environment of our own with the pinned packages.
#   docker build -t megatron-gptoss .
#   docker build -t megatron-gptoss --build-arg BASE=NGC_PYTORCH_IMAGE .      # NVIDIA's image, from its catalog
# docs/cluster.md says how it is pushed and run, and which of these steps were tried where.
# Whatever torch a base brings is left alone and unused: vLLM's wheel is built against torch 2.11.0 and no other. Apex is not needed; the
# optimizer is this project's own.
ARG BASE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
# hadolint ignore=DL3006
FROM ${BASE}

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG PYTHON=3.12
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    # saves a kernel build of 100 s at the first start of an engine
    VLLM_USE_FLASHINFER_SAMPLER=0

# iproute2 and procps are for people; the job's scripts need bash, getent and hostname, which every base has.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        "python${PYTHON}" "python${PYTHON}-venv" "python${PYTHON}-dev" build-essential git bubblewrap ca-certificates hostname libnuma1 \
        rdma-core libibverbs1 ibverbs-providers iproute2 procps \
    && rm -rf /var/lib/apt/lists/*

# Not root: a job runs as whoever submitted it, so nothing here may need more than reading. The folder is open to any user id.
RUN useradd --create-home --uid 10001 gptoss \
    && mkdir -p /workspace && chmod 0777 /workspace \
    && install -d -o gptoss -g gptoss /opt/venv
USER 10001
WORKDIR /workspace

# Dependencies first, so that a change of the code does not fetch them again. transformer-engine builds its torch extension against the
# installed torch, so torch is a layer before it and the build is not isolated. Versions are pyproject.toml's.
RUN "python${PYTHON}" -m venv /opt/venv \
    && pip install "setuptools==80.9.0" "wheel==0.45.1" "ninja==1.13.0" "torch==2.11.0"
COPY --chown=gptoss pyproject.toml README.md /opt/gptoss/
COPY --chown=gptoss megatron_gptoss/__init__.py /opt/gptoss/megatron_gptoss/__init__.py
RUN MAX_JOBS=16 pip install --no-build-isolation "/opt/gptoss[gpu]"

COPY --chown=gptoss . /opt/gptoss/
RUN pip install --no-deps --no-build-isolation -e /opt/gptoss
ENV GPTOSS_HOME=/opt/gptoss

# The last step is the first test: every pinned package is there, and this image's torch computes. No GPU is needed.
RUN gptoss check /opt/gptoss/configs/20b.toml --software

CMD ["gptoss", "--help"]
