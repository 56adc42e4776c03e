"""Two hosts that are two addresses of this machine, reached by an sshd with keys and settings of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.dist.ranks import free_port
from tests.slurm import find

HOSTS = ("127.0.0.1", "127.0.0.2")
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "pdsh")


@contextmanager
def reachable(folder: Path) -> Iterator[dict[str, str]]:
    """Start sshd on both addresses; yields an environment whose ``ssh`` and ``pdsh`` reach them without a password."""
    port = free_port()
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    (folder / "sshd_config").write_text(
        "".join(f"ListenAddress {host}:{port}\n" for host in HOSTS)
        + f"HostKey {folder / 'host'}\nAuthorizedKeysFile {folder / 'user.pub'}\nPidFile none\n"
        "StrictModes no\nUsePAM no\nPasswordAuthentication no\nPermitRootLogin yes\nSetEnv OMP_NUM_THREADS=1\n"
    )
    options = (
        f"-F none -p {port} -i {folder / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        "-o LogLevel=ERROR -o BatchMode=yes"
    )
    programs = folder / "bin"
    programs.mkdir()
    ssh = find("ssh")
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {ssh} {options} "$@"\n')
    (programs / "ssh").chmod(0o755)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    daemon_path = find("sshd")
    assert daemon_path is not None
    command = [daemon_path, "-D", "-e", "-f", str(folder / "sshd_config")]
    with (folder / "sshd.log").open("ab") as log:
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        for host in HOSTS:
            _wait(host, port, folder)
        yield {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PDSH_SSH_ARGS": f"{options} -l%u %h"}
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(10)


def _wait(host: str, port: int, folder: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection((host, port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, (folder / "sshd.log").read_text()
            time.sleep(0.1)


def children(pid: int, word: str) -> list[psutil.Process]:
    """The processes that a process has started whose command line has the word in it."""
    return [child for child in psutil.Process(pid).children() if any(word in part for part in child.cmdline())]
