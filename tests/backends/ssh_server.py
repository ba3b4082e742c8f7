"""A loopback sshd that stands for a board: a plain process with throw-away keys, its own config and a free port."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


@dataclass(frozen=True)
class SshServer:
    """A running sshd. `address` is for `@ssh=`; `ssh` is the client's command line with the keys, for EQUIVCHECK_SSH."""

    address: str
    ssh: str
    known_hosts: Path
    key: Path


def why_not() -> str | None:
    """Why no sshd can run here, or None."""
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        return "no sshd here: apt-get install openssh-server"
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd drops its privileges
    return None


@contextlib.contextmanager
def ssh_server(folder: Path, environment: Mapping[str, str]) -> Iterator[SshServer]:
    """Run sshd in `folder`; what it starts has `environment` besides its own. Stopped on leaving."""
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    port = _free_port()
    known_hosts = folder / "known_hosts"
    known_hosts.write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    config = folder / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized_keys\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        f"PermitRootLogin yes\nSetEnv {' '.join(f'{key}={value}' for key, value in environment.items())}\n"
    )
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=log, start_new_session=True)
    try:
        _wait_for(port, server, folder / "log")
        options = f"-F none -o IdentitiesOnly=yes -o GlobalKnownHostsFile=none -o UserKnownHostsFile={known_hosts}"
        ssh = f"ssh {options} -i {folder}/user"
        yield SshServer(f"{getpass.getuser()}@127.0.0.1:{port}", ssh, known_hosts, folder / "user")
    finally:
        server.kill()
        server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if server.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"sshd did not start: {log.read_text(errors='replace')}")
