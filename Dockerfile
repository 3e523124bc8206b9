# The GPU image: NVIDIA's CUDA 13 base, InfiniBand's libraries, and everything else from the package index.
# A first version: it has not been built on the project's own machines, which have no container engine.
#   docker build -t megatron-gptoss .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD/runs:/workspace/runs" megatron-gptoss gptoss plan configs/20b.toml
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04

ENV DEBIAN_FRONTEND=noninteractive \
    PIP_NO_CACHE_DIR=1 \
    VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    HF_HUB_OFFLINE=1 \
    VLLM_NO_USAGE_STATS=1 \
    # saves a kernel build of 100 s at the first start of an engine
    VLLM_USE_FLASHINFER_SAMPLER=0

RUN apt-get update && apt-get install -y --no-install-recommends \
        python3.12 python3.12-venv python3.12-dev build-essential git ca-certificates libnuma1 bubblewrap \
        rdma-core libibverbs1 ibverbs-providers openssh-client \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv

WORKDIR /workspace

# Dependencies first, so that a change of the code does not fetch them again.
COPY pyproject.toml README.md ./
COPY megatron_gptoss/__init__.py megatron_gptoss/__init__.py
# transformer-engine builds its torch extension against the installed torch, so torch comes first and the build is not isolated.
RUN pip install "setuptools>=77" wheel ninja torch==2.11.0 \
    && MAX_JOBS=16 pip install --no-build-isolation ".[gpu]"

COPY . .
RUN pip install --no-deps --no-build-isolation -e . && gptoss --version

CMD ["gptoss", "--help"]
