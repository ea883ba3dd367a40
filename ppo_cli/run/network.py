"""The network that NCCL uses between nodes, according to its variables, devices and plugins.

NCCL silently falls back to TCP if a device exists but its plugin, or the access to it, is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

from ppo_cli.config.schema.finding import Finding

AMAZON = "0x1d0f"  # vendor of EFA devices
READ_IT = "NCCL_DEBUG=INFO writes NET/IB, NET/OFI or NET/Socket into logs/learner-0.log"
OFF = ("1", "true", "yes", "on")


def find_network(environ: Mapping[str, str], root: Path = Path("/")) -> Finding:
    """Return the network that NCCL would use on this node.

    A slow one is a remark; one with which NCCL would not start is "missing".
    """
    # Variables come first: they may rule out every interface, or choose TCP.
    interfaces = sorted(path.name for path in (root / "sys/class/net").glob("*"))
    named = environ.get("NCCL_SOCKET_IFNAME", "")
    usable = [name for name in interfaces if name != "lo" and _matches_interface(name, named)]
    if named and not usable:
        problem = (
            f"NCCL_SOCKET_IFNAME={named} names no interface of this node: {_join_names(interfaces)}"
        )
        return Finding((), problem, "missing", "unset NCCL_SOCKET_IFNAME")
    if environ.get("NCCL_NET", "").lower() == "socket":
        return _slow(f"NCCL_NET=Socket: TCP by {_join_names(usable)}", "unset NCCL_NET")
    return (
        _find_cloud_network(environ, root, interfaces)
        or _find_infiniband(environ, root)
        or _slow(
            f"no InfiniBand, RoCE or EFA: TCP by {_join_names(usable)}",
            "expected without such a network; actor.fsdp_config.fsdp_size=N, with the GPUs of a "
            f"node, then sends least between nodes. {READ_IT}",
        )
    )


def _find_cloud_network(
    environ: Mapping[str, str], root: Path, interfaces: list[str]
) -> Finding | None:
    """Return the network of Amazon's EFA or Google's gVNIC; None without such devices.

    NCCL needs a plugin for them. If it is not found, the network has the problem and the advice.
    """
    # Amazon's EFA and Google's gVNIC.
    efa = [d.name for d in _devices(root) if _first_line(d / "device/vendor") == AMAZON]
    net = root / "sys/class/net"
    gvnic = [n for n in interfaces if (net / n / "device/driver").resolve().name == "gve"]
    if not efa and not gvnic:
        return None
    kind = f"EFA ({_join_names(efa)})" if efa else f"gVNIC ({_join_names(gvnic)})"
    if (plugin := _find_plugin(environ)) is not None:
        return Finding((), f"{kind} by the plugin {plugin}", "ok")
    package = (
        "install aws-ofi-nccl, and put the folder of its libnccl-net.so into LD_LIBRARY_PATH"
        if efa
        else "install Google's NCCL plugin (gIB, FasTrak or Fast Socket) for this kind of machine"
    )
    problem = f"{kind}, and NCCL's plugin for it (libnccl-net.so) is not found: TCP"
    return _slow(problem, f"{package}. {READ_IT}")


def _find_infiniband(environ: Mapping[str, str], root: Path) -> Finding | None:
    """Return the InfiniBand or RoCE network, with advice if NCCL cannot use it; None if absent."""
    devices = [device.name for device in _devices(root)]
    if not devices:
        return None
    # RoCE devices are InfiniBand devices with an Ethernet link.
    layer = _first_line(_devices(root)[0] / "ports/1/link_layer")
    kind = f"{'RoCE' if layer == 'Ethernet' else 'InfiniBand'} ({_join_names(devices)})"
    if environ.get("NCCL_IB_DISABLE", "").lower() in OFF:
        return _slow(f"{kind}, turned off by NCCL_IB_DISABLE: TCP", "unset NCCL_IB_DISABLE")
    if not (root / "dev/infiniband").exists():
        return _slow(
            f"{kind}, and this container has no /dev/infiniband: TCP",
            f"docker run --device /dev/infiniband --ulimit memlock=-1 …. {READ_IT}",
        )
    return Finding((), kind, "ok")


def _slow(text: str, advice: str) -> Finding:
    return Finding((), text, "remark", advice)


def _devices(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").glob("*"))


def _matches_interface(interface: str, named: str) -> bool:
    """Match NCCL_SOCKET_IFNAME: a list of prefixes; after `=` of names, after `^` of exclusions."""
    # NCCL's syntax: `=eth0,eth1`, `^docker`, `eth`.
    sign = named[:1] if named[:1] in ("=", "^") else ""
    patterns = named.removeprefix(sign).split(",")
    if sign == "=":
        return interface in patterns
    return any(map(interface.startswith, patterns)) != (sign == "^")


def _find_plugin(environ: Mapping[str, str]) -> str | None:
    name = environ.get("NCCL_NET_PLUGIN", "")
    names = [name, f"libnccl-net-{name}.so"] if name else ["libnccl-net.so"]
    for folder in environ.get("LD_LIBRARY_PATH", "").split(":"):
        for file in names:
            if (path := Path(folder) / file).is_file():
                return str(path)
    return find_library(f"nccl-net-{name}" if name else "nccl-net")


def _first_line(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _join_names(names: list[str]) -> str:
    return ", ".join(names) or "none"
