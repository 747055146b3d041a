#!/usr/bin/env bash
# The start command of a container on a rented GPU: lets in whoever has the key in PUBLIC_KEY, and nobody by password.
set -euo pipefail
: "${PUBLIC_KEY:?set PUBLIC_KEY to the line of your ~/.ssh/id_ed25519.pub}"
install -d -m 700 ~/.ssh
printf '%s\n' "$PUBLIC_KEY" >~/.ssh/authorized_keys
chmod 600 ~/.ssh/authorized_keys
ssh-keygen -A
mkdir -p /run/sshd
# A login does not get the container's environment: one file is for commands over SSH, the other for shells, whose profile sets PATH anew.
{
  printf 'PATH=%s\n' "$PATH"
  printf 'HF_HOME=%s\n' "${HF_HOME:-/workspace/huggingface}"
} >~/.ssh/environment
printf 'export PATH=%q HF_HOME=%q\n' "$PATH" "${HF_HOME:-/workspace/huggingface}" >/etc/profile.d/ditkit.sh
exec /usr/sbin/sshd -D -e -o PasswordAuthentication=no -o PermitRootLogin=prohibit-password -o PermitUserEnvironment=PATH,HF_HOME
