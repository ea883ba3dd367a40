"""Proxies of the environment: which one leads to an address, and how an httpx client is told.

Judges and served reward models use this. An httpx client refuses to start where the environment
names a SOCKS proxy and socksio is missing, even if NO_PROXY exempts the only address it will call.
"""

from __future__ import annotations

import ipaddress
import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

if TYPE_CHECKING:
    import ssl

_PORTS = {"http": 80, "https": 443}


def proxy_for(url: str) -> str | None:
    """Return the proxy for an address, or None where there is none or NO_PROXY exempts it."""
    # The proxy of the scheme wins over that of ALL_PROXY.
    proxies, parts = getproxies(), urlsplit(url)
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or any(_exempts(entry, parts) for entry in proxies.get("no", "").split(",")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def is_socks(proxy: str | None) -> bool:
    """Whether a proxy speaks SOCKS, which aiohttp does not."""
    return proxy is not None and proxy.startswith("socks")


def client_settings(url: str) -> dict[str, Any]:
    """Return the arguments with which an httpx client calls an address: certificates, and a proxy.

    Without a proxy where all of the environment are HTTP ones: httpx reads those correctly itself.
    """
    # httpx reads these two variables.
    certificates = _certificates(*map(os.environ.get, ("SSL_CERT_FILE", "SSL_CERT_DIR")))
    if all(re.match("https?://|(?!.*://)", proxy, re.I) for proxy in getproxies().values()):
        return {"verify": certificates}
    return {"verify": certificates, "proxy": proxy_for(url), "trust_env": False}


@cache
def _certificates(file: str | None, folder: str | None) -> ssl.SSLContext:
    """Return the trusted certificates; reading them takes longer than many a request."""
    import httpx

    return httpx.create_ssl_context()


def _exempts(entry: str, address: SplitResult) -> bool:
    """Whether one entry of NO_PROXY names the host: `*`, a host or suffix, a network, a port."""
    entry = entry.strip().lower()
    scheme, separator, rest = entry.rpartition("://")
    if separator and scheme not in ("all", address.scheme):
        return False
    host = (address.hostname or "").lower()
    # An address or a network, such as 10.0.0.0/8.
    if (network := _network(rest)) is not None:
        # Networks of different versions cannot be compared.
        inner = _network(host)
        return inner is not None and inner.version == network.version and inner[0] in network
    try:
        parts = urlsplit(f"//{rest}")
        name, port = parts.hostname or "", parts.port
    except ValueError:  # no port at all: curl, Go and httpx ignore such an entry
        return False
    if port is not None and port != (address.port or _PORTS.get(address.scheme)):
        return False
    # Names: a wildcard, a suffix, or the host and its subdomains.
    if name == "*":
        return True
    if name.startswith(("*.", ".")):
        return host.endswith(name.removeprefix("*"))
    return bool(name) and (host == name or host.endswith(f".{name}"))


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def _network(text: str) -> _Network | None:
    """An address or a range of addresses; None for a name."""
    try:
        return ipaddress.ip_network(text.strip("[]"), strict=False)
    except ValueError:
        return None
