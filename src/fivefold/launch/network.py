"""Where this machine listens: on one named interface, at one address, never on all by accident.

PyTorch's TCP store listens on every interface, unless it is given a socket that listens already. gloo and NCCL listen
on the interface that GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names, or on one that they choose.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

from fivefold.errors import BusyError, UserError, system_error

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def own_address(host: str) -> str:
    """The address of this machine on the way to a host. It sends nothing.

    Raises:
        BusyError: there is no such host yet, or no way to it.
    """
    try:
        kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as way:
            way.connect(where)
            return way.getsockname()[0]
    except OSError as error:
        raise BusyError(f"no way to the host {host}: {error.strerror or error}") from None


def addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, by its name, without loopback (Linux)."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                said = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(said[20:24])
    return {name: address for name, address in found.items() if not is_loopback(address)}


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_of(address: str) -> str:
    """The interface with this address; "" if it is the loopback interface, or cannot be found."""
    if sys.platform != "linux" or is_loopback(address):
        return ""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        with suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                raw, *_, name = line.split()
                if ipaddress.ip_address(bytes.fromhex(raw)) == wanted:
                    return name
        return ""
    return next((name for name, its in addresses().items() if its == str(wanted)), "")


def only_here(host: str, backend: str) -> bool:
    """True if all ranks must be on this machine: rank 0's host is "localhost" or a loopback address, or the user has
    named the loopback interface. A host's own name may stand for one, too, and other hosts still reach it."""
    own = host.partition(".")[0] == socket.gethostname().partition(".")[0] != "localhost"
    named = os.environ.get(_variable(backend), "").lstrip("=").split(",")
    return any(name in named for name in _loopbacks()) or (not own and is_loopback(_address(host)))


def _loopbacks() -> list[str]:
    """Names of the loopback interface."""
    return [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]


def reachable(host: str, backend: str) -> str:
    """`host`, as this machine has to call it. On Debian a host's own name is 127.0.1.1 on itself, where no other host
    could reach it: then this is the address of its only interface, or of the one that is named.

    Raises:
        UserError: it has several, and none or several of them are named.
    """
    own = host.partition(".")[0] == socket.gethostname().partition(".")[0] != "localhost"
    if not own or only_here(host, backend) or not is_loopback(own_address(host)):
        return host
    found = addresses()
    if is_named(backend):
        found = {name: address for name, address in found.items() if _names(backend, name)}
    if len(found) != 1:
        count = "several other interfaces have addresses" if found else "no other interface has an address"
        raise UserError(
            f"{host} stands for the loopback interface on its own host, and {count} there.{interfaces(backend)}"
        )
    return next(iter(found.values()))


def _names(backend: str, interface: str) -> bool:
    """True if the user has named this interface. NCCL takes `^` as "not", and names as beginnings of names unless `=`
    is before them."""
    setting = os.environ[_variable(backend)]
    words = setting.lstrip("^=").split(",")
    exact = backend == "gloo" or "=" in setting[:2]
    named = any(interface == word or (not exact and interface.startswith(word)) for word in words if word)
    return named != setting.startswith("^")


def _variable(backend: str) -> str:
    return f"{backend.upper()}_SOCKET_IFNAME"


def is_named(backend: str) -> bool:
    """True if the user or the launcher has named the interface."""
    return bool(os.environ.get(_variable(backend)))


def name_interface(backend: str, host: str, one_machine: bool = False) -> None:
    """Lets the ranks of several launches listen on the interface that leads to rank 0's host, and on no other.
    one_machine: all ranks are on this one, so it may be the loopback interface.

    Raises:
        UserError: none leads there. The message lists the interfaces.
    """
    address = own_address(host)
    name = interface_of(address)
    if not name and (one_machine or only_here(host, backend)):
        name = next(iter(_loopbacks()), "")
    if not name:
        raise UserError(
            f"ranks on several hosts need a network interface to listen on. This host would reach {host} from "
            f"{address}, which no other host can reach.{interfaces(backend)}"
        )
    # NCCL takes names as beginnings of names
    os.environ[_variable(backend)] = f"={name}" if backend == "nccl" else name


def interfaces(backend: str) -> str:
    """What to do about the network: the sentence that ends an error."""
    names = ", ".join(addresses())
    return f" Set {_variable(backend)} to the network interface between the hosts (here: {names or 'none'})"


def wait_for(host: str, port: int, wait_s: float) -> None:
    """Returns once somebody listens there. PyTorch's store waits, too, but lets no handler of a signal run meanwhile.

    Raises:
        RuntimeError: nobody does so in time.
    """
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection((host, port), max(1.0, wait_s / 10)):
            return
        time.sleep(0.05)
    raise RuntimeError(f"nobody listens at {host}, port {port}, after {wait_s:g} s")


def listening(host: str, port: int, alone: bool = False) -> int:
    """A socket that listens at one address of this machine: that of `host`, or, if that is a gateway's, the one on the
    way to it. Returns its descriptor, which the caller owns. alone: other hosts need not reach it.

    Raises:
        BusyError: the address is taken.
        UserError: it is the loopback interface's though other hosts must reach it.
    """
    address = _address(host)
    if is_loopback(address) and not alone:
        raise UserError(
            f"{host} stands for the loopback interface ({address}) on its own host, where no other host can reach "
            "it. Give the address of that host instead of its name"
        )
    try:
        return _listen(address, port)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL and (own := own_address(host)) != address:
            with suppress(OSError):
                return _listen(own, port)
        raise system_error(f"cannot listen at {address}, port {port}: {error.strerror}", error) from None


def _address(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, 9, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise BusyError(f"there is no host {host}: {error.strerror or error}") from None


def _listen(address: str, port: int) -> int:
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(kind, socket.SOCK_STREAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((address, port))
        found.listen(2048)
        return found.detach()
