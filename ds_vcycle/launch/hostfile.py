"""The deepspeed launcher's hostfile, checked before anything starts. Imports no torch.

``python -m ds_vcycle.launch.hostfile FILE`` is the check of a batch script: exit code 0, or 2 with what is wrong.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

from ds_vcycle.config import UserError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def read_hostfile(path: Path) -> dict[str, int]:
    """Hosts in order and the ranks of each, from lines of ``host slots=N``; ``#`` begins a comment.

    Raises:
        UserError: naming the line, and what it should be; or a host whose name does not resolve.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {path} cannot be read ({error}); give a file of lines `host slots=N`") from error
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        if not match or match[2] == "0":
            raise UserError(f"{path}:{number}: {text!r} is not `host slots=N` with N above 0")
        if match[1] in hosts:
            raise UserError(f"{path}:{number}: {match[1]} is there twice; give each host one line")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError(f"{path}: no hosts in it; give a line `host slots=N` for each")
    if len(set(hosts.values())) > 1:
        each = ", ".join(f"{host} {slots}" for host, slots in hosts.items())
        raise UserError(f"{path}: hosts have different numbers of slots ({each}); give all the same")
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise UserError(f"{path}: {host} cannot be found ({error}); correct its name") from error
    return hosts


def check_reachable(path: Path) -> None:
    """Try every host by ssh, all at once: a launcher that cannot reach one waits for it, or says only an exit code.

    Raises:
        UserError: naming the hosts that cannot be reached, and what ssh says.
    """
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
    tried = {
        host: subprocess.Popen(
            [*ssh, host, "true"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for host in read_hostfile(path)
    }  # fmt: skip
    said = {host: (process.communicate()[1], process.returncode) for host, process in tried.items()}
    bad = [f"{host} cannot be reached by ssh ({text.strip()})" for host, (text, code) in said.items() if code]
    if bad:
        raise UserError(f"{path}: {'; '.join(bad)}; correct the host, or let ssh in without a password")


if __name__ == "__main__":
    try:
        check_reachable(Path(sys.argv[1]))
    except UserError as problem:
        sys.stderr.write(f"ds-vcycle: error: {problem}\n")
        sys.exit(2)
