"""Put on PYTHONPATH, refuses every connection off this machine, and notes it where $STEMMA_TEST_CONNECTIONS says."""

import ipaddress
import os
import socket

FORK_SAFE = True  # a forked process has it from the server that it was forked from

# Of the network namespaces that tests make (tests/support/services/namespaces.py), which lead nowhere else.
_HOSTS = ipaddress.ip_network("10.77.0.0/24")
_connect = socket.socket.connect
_resolve = socket.getaddrinfo


def _refuse(target):
    with open(os.environ.get("STEMMA_TEST_CONNECTIONS", os.devnull), "a", encoding="utf8") as notes:
        notes.write(f"{target}\n")
    raise ConnectionRefusedError(f"this test lets nobody out: {target}")


def _is_local(host):
    if host in ("", "localhost", None):
        return True
    try:
        address = ipaddress.ip_address(host)
        # 0.0.0.0 is where a server listens, and as a target this machine.
        return address.is_loopback or address.is_unspecified or address in _HOSTS
    except ValueError:
        return False


def connect(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(address[0]):
        _refuse(address)
    return _connect(self, address)


def getaddrinfo(host, *arguments, **named):
    name = host.decode() if isinstance(host, bytes) else host
    if not _is_local(name) and name != socket.gethostname():
        _refuse(name)
    return _resolve(host, *arguments, **named)


socket.socket.connect = connect
socket.getaddrinfo = getaddrinfo
