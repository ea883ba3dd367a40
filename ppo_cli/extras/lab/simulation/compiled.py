"""Compiled layers on the simulated device: the kernels that are left, and what autograd keeps.

torch.compile traces each block, and its partitioner decides what the backward pass keeps, as in a
run. No code is generated: graphs run operation by operation, and what Inductor would fuse counts as
one kernel, whose inner tensors take no memory. Private parts of torch, tried with 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import _disable_current_modes

from ppo_cli.engine.models import compiled
from ppo_cli.engine.models.attention import attend_by_rows
from ppo_cli.extras.lab.simulation.counters import OperationCounter, Watch, is_product


@contextmanager
def compiling(watch: Watch, operations: OperationCounter) -> Iterator[None]:
    """Context in which compiled blocks run in `watch`, and count their fused kernels."""

    def resume(work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with watch.resumed():
                return work(*args, **kwargs)

        return watched

    def build(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        fused = FusedGraph(graph, watch, operations)
        run = resume(fused.boxed_run)
        run._boxed_call = True  # type: ignore[attr-defined] # takes a list, which it empties
        return run

    compile_graph: Any = torch.compile
    backend = aot_autograd(
        fw_compiler=build, bw_compiler=build, partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )  # fmt: skip

    def compile_watched(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        traced = compile_graph(forward, backend=backend, **options)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():  # torch compiles nothing inside a mode
                return traced(*args, **kwargs)

        return run

    with (
        patch.object(torch, "compile", compile_watched),
        patch.object(compiled, "attend_by_rows", resume(attend_by_rows)),
    ):
        yield


class FusedGraph(fx.Interpreter):
    """Runs a graph; operations between products that depend on each other are one kernel."""

    def __init__(self, graph: fx.GraphModule, watch: Watch, operations: OperationCounter) -> None:
        super().__init__(graph)
        self._watch, self._operations = watch, operations
        self._kernels = find_kernels(graph.graph)
        self._read: dict[fx.Node, set[fx.Node]] = {}

    def boxed_run(self, args: list[Any]) -> Any:
        """Run the graph; arguments are freed after their last use, and results are not kept."""
        self._read.clear()
        try:
            return super().boxed_run(args)
        finally:
            self.env = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run an operation; one in a kernel counts for what it reads and writes outside of it."""
        kernel = self._kernels.get(n)
        if kernel is None:
            return super().run_node(n)
        escapes = any(self._kernels.get(user) is not kernel for user in n.users)
        with self._watch.muted(memory=not escapes):
            result = super().run_node(n)
        if kernel not in self._read:
            self._read[kernel] = set()
            self._operations.launches += 1
        inputs = {node for node in n.all_input_nodes if self._kernels.get(node) is not kernel}
        values = [self.env[node] for node in inputs - self._read[kernel]]
        self._read[kernel] |= inputs
        self._operations.count_bytes([values, result if escapes and not _is_view(n) else None])
        return result


def find_kernels(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each operation that is fused to the first one of its kernel.

    An operation joins those that it reads from, unless a product is between them. A kernel that
    only makes views is none.
    """
    level: dict[fx.Node, int] = {}
    first: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while first[node] is not node:
            node = first[node]
        return node

    for node in graph.nodes:
        level[node] = max(
            (level[source] + _is_product(source) for source in node.all_input_nodes), default=0
        )
        if not isinstance(node.target, torch._ops.OpOverload) or _is_product(node):
            continue
        first[node] = node
        for source in node.all_input_nodes:
            if source in first and level[source] == level[node]:
                first[find(source)] = node
    kernels = {node: find(node) for node in first}
    real = {kernel for node, kernel in kernels.items() if not _is_view(node)}
    return {node: kernel for node, kernel in kernels.items() if kernel in real}


def _is_product(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and is_product(node.target)


def _is_view(node: fx.Node) -> bool:
    return bool(node.target.is_view)  # type: ignore[union-attr]
