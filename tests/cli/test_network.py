"""By what NCCL would reach other nodes, from folders as Linux has them in /sys and /dev."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_cli.run.network import find_network


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("lo", "eth0", "ib0"):
        (tmp_path / "sys/class/net" / name).mkdir(parents=True)
    return tmp_path


def add_device(root: Path, name: str, *, vendor: str = "0x15b3", layer: str = "InfiniBand") -> None:
    device = root / "sys/class/infiniband" / name
    (device / "ports/1").mkdir(parents=True)
    (device / "ports/1/link_layer").write_text(f"{layer}\n")
    (device / "device").mkdir()
    (device / "device/vendor").write_text(f"{vendor}\n")


def test_ethernet_alone_is_tcp(root: Path) -> None:
    network = find_network({}, root)
    assert network.text == "no InfiniBand, RoCE or EFA: TCP by eth0, ib0"
    assert "NCCL_DEBUG=INFO" in network.advice and network.kind == "remark"


@pytest.mark.parametrize(
    ("named", "usable"),
    [
        ("eth", "eth0"), ("eth0,ib", "eth0, ib0"), ("=eth0", "eth0"), ("^eth", "ib0"),
        ("=eth", None), ("ens5", None), ("^eth,ib", None),
    ],
)  # fmt: skip
def test_interfaces_are_matched_as_nccl_does(root: Path, named: str, usable: str | None) -> None:
    network = find_network({"NCCL_SOCKET_IFNAME": named}, root)
    assert (network.kind == "missing") == (usable is None)
    if usable is None:
        assert "names no interface of this node: eth0, ib0, lo" in network.text
    else:
        assert network.text.endswith(f"TCP by {usable}")


@pytest.mark.parametrize(("layer", "kind"), [("InfiniBand", "InfiniBand"), ("Ethernet", "RoCE")])
def test_infiniband_is_taken_unless_something_forbids_it(root: Path, layer: str, kind: str) -> None:
    add_device(root, "mlx5_0", layer=layer)
    network = find_network({}, root)
    assert network.text == f"{kind} (mlx5_0), and this container has no /dev/infiniband: TCP"
    assert "--device /dev/infiniband" in network.advice
    (root / "dev/infiniband").mkdir(parents=True)
    assert (find_network({}, root).text, find_network({}, root).advice) == (
        f"{kind} (mlx5_0)",
        "",
    )
    off = find_network({"NCCL_IB_DISABLE": "1"}, root)
    assert off.text.endswith(": TCP") and off.advice == "unset NCCL_IB_DISABLE"
    assert find_network({"NCCL_IB_DISABLE": "0"}, root).advice == ""
    assert find_network({"NCCL_NET": "Socket"}, root).advice == "unset NCCL_NET"


def test_networks_of_clouds_need_their_plugin(root: Path, tmp_path: Path) -> None:
    add_device(root, "rdmap16s27", vendor="0x1d0f")
    (root / "dev/infiniband").mkdir(parents=True)
    without = find_network({}, root)
    assert without.text.startswith("EFA (rdmap16s27), and NCCL's plugin for it (libnccl-net.so)")
    assert "aws-ofi-nccl" in without.advice
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libnccl-net.so").touch()
    (folder / "libnccl-net-ofi.so").touch()
    path = {"LD_LIBRARY_PATH": f"/nowhere:{folder}"}
    assert find_network(path, root).text == (
        f"EFA (rdmap16s27) by the plugin {folder}/libnccl-net.so"
    )
    ofi = find_network(path | {"NCCL_NET_PLUGIN": "ofi"}, root)
    assert ofi.text.endswith("libnccl-net-ofi.so") and ofi.advice == ""
    assert find_network(path | {"NCCL_NET_PLUGIN": "other"}, root).advice != ""


def test_google_s_network_is_known_by_its_driver(root: Path) -> None:
    driver = root / "sys/bus/pci/drivers/gve"
    driver.mkdir(parents=True)
    (root / "sys/class/net/eth0/device").mkdir()
    (root / "sys/class/net/eth0/device/driver").symlink_to(driver)
    network = find_network({}, root)
    assert network.text.startswith("gVNIC (eth0), and NCCL's plugin") and "Google" in network.advice
