"""The one collective of a transition: pieces of coarse rectangles to and from every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ds_vcycle.parallel import Mesh

Pieces = Sequence[Tensor]


@dataclass(kw_only=True)
class Exchange:
    """An all-to-all of pieces. ``sent_bytes`` counts what this rank handed to other ranks."""

    mesh: Mesh
    sent_bytes: int = field(default=0)

    def __call__(
        self, outgoing: Sequence[Pieces], incoming: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[Pieces]:
        """Send pieces to each peer and return each peer's pieces, on the mesh's device; one's own are not copied.

        Args:
            outgoing: by peer, the pieces for it, of any shape.
            incoming: by peer, the number of elements of each piece it sends.
            dtype: of all pieces.

        Returns:
            By peer, its pieces in the order in which it sends them; those of other ranks are flat.
        """
        rank, device = self.mesh.rank, self.mesh.device
        received: list[Pieces] = [[] for _ in outgoing]
        received[rank] = [piece.to(device) for piece in outgoing[rank]]
        if self.mesh.world_size == 1:
            return received
        others = [[] if peer == rank else list(pieces) for peer, pieces in enumerate(outgoing)]
        wanted = [[] if peer == rank else list(counts) for peer, counts in enumerate(incoming)]
        parts = [piece.to(device).reshape(-1) for pieces in others for piece in pieces]
        send = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
        arrived = torch.empty(sum(map(sum, wanted)), dtype=dtype, device=device)
        dist.all_to_all_single(
            arrived, send, [sum(counts) for counts in wanted], [sum(p.numel() for p in pieces) for pieces in others]
        )
        self.sent_bytes += send.numel() * send.element_size()
        split = iter(torch.split(arrived, [count for counts in wanted for count in counts]))
        for peer, counts in enumerate(wanted):
            if peer != rank:
                received[peer] = [next(split) for _ in counts]
        return received
