"""OutputGradients: hooks that scan the gradient that reaches each output of a module."""

from __future__ import annotations

from typing import Any, cast

import torch

from nanscan import _C
from nanscan._collect.scanner import Scanner, children
from nanscan._data.places import Node
from nanscan._data.site import Kind


class OutputGradients:
    """Puts hooks on tensors, not on modules: full backward hooks make in-place layers raise.

    Args:
        calls: makes the hooks, and says whether the output at hand is to have one.
        scanner: scans gradients that are new.
    """

    def __init__(self, calls: _C.Calls, scanner: Scanner) -> None:
        self._calls = calls
        self._scanner = scanner
        self._nodes: list[Node] = []  # of gradients, by the number that their hooks have
        scanner.on_output = self.watch

    def watch(self, x: torch.Tensor, node: Node) -> None:
        """Scans the gradient that will reach a tensor.

        Args:
            x: an output that requires a gradient.
            node: the output's.
        """
        if not self._calls.wants_gradients or x.is_leaf:  # a leaf would keep the hook
            return
        node = node.first_time()
        if node.hooked is None:
            self._make_hook(node)
        if x.output_nr == 0 and x._backward_hooks is None:  # noqa: SLF001 - as in csrc/calls.cpp
            cast("Any", x.grad_fn)._register_hook_dict(node.hooked)  # noqa: SLF001
        else:
            x.register_hook(node.hook)  # type: ignore[no-untyped-call]

    def watch_all(self, x: Any, node: Node, around: tuple[int, ...] = ()) -> None:
        """Scans the gradient that will reach each tensor in a value."""
        if isinstance(x, torch.Tensor):
            if x.requires_grad:
                self.watch(x, node)
            return
        for value, child, deeper in children(x, node, around):
            self.watch_all(value, child, deeper)

    def scan_new(self, number: int, gradient: Any, status: int) -> int:
        """A gradient that needs a row, went to another one, or is no plain tensor.

        Args:
            number: of the hook that it came to.
            gradient: the gradient.
            status: what `table.visit` returned.

        Returns:
            The gradient's own row, or -1.
        """
        node = self._nodes[number]
        if status >= 0:
            node.add_source(status)
        else:
            self._scanner.visit_new(gradient, node, status)
        return node.row

    def _make_hook(self, node: Node) -> None:
        node.gradient = Node(node.place, Kind.GRAD_OUTPUT, node.path)
        node.hook = self._calls.gradient_hook(len(self._nodes))
        self._nodes.append(node.gradient)
        with torch.inference_mode(mode=False):
            hooked: Any = torch.empty(0, device="cpu")
        hooked._backward_hooks = {0: node.hook}  # noqa: SLF001 - the dict is all that it is for
        node.hooked = hooked
