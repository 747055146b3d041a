# An image with the commands of all families, for rented GPUs and clusters: docs/rented_gpus.md. The host needs NVIDIA's driver (580 or newer) and its
# container toolkit; CUDA's libraries come with torch.
FROM python:3.11-slim-bookworm

# A C compiler, because Triton compiles the launchers of its kernels. SSH, rsync and tmux, because that is how a rented GPU is used.
# An image must not contain host keys: everybody who has it could pose as its containers. serve_ssh.sh makes new ones.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev openssh-server rsync tmux \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

RUN pip install --no-cache-dir uv
WORKDIR /opt/ditkit
COPY . .
RUN uv sync --no-default-groups --no-cache --compile-bytecode
ENV PATH=/opt/ditkit/.venv/bin:$PATH

# Where providers mount the disk that outlives a container: runs, caches and downloaded models belong there.
ENV HF_HOME=/workspace/huggingface
WORKDIR /workspace
CMD ["bash"]
