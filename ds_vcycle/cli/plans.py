"""What ``ds-vcycle plan`` prints: the plan of a run, on one cluster or on several sizes of it. Imports no torch."""

from __future__ import annotations

import json

from rich.console import Console

from ds_vcycle.config import RunConfig, UserError
from ds_vcycle.cycle.cluster import ClusterOverview, divided, on_cluster
from ds_vcycle.cycle.cluster import to_json as cluster_json
from ds_vcycle.cycle.gpu import Gpu, gpu_of, shares_of
from ds_vcycle.cycle.network import Nodes
from ds_vcycle.cycle.overview import overview, to_json
from ds_vcycle.cycle.render import render
from ds_vcycle.cycle.render_cluster import render_cluster, render_sizes


def print_plan(config: RunConfig, *, ranks: int | None, as_json: bool, console: Console) -> None:
    """Print the plan of a run, for ``ranks`` if they are given, as tables or as JSON."""
    found = overview(config, ranks=ranks)
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        render(found, console)


def print_cluster(
    config: RunConfig, *, nodes: str, gpus_per_node: int, ranks: int | None, gpu_memory: str | None, peak_flops: str,
    mfu: str, as_json: bool, console: Console,
) -> None:  # fmt: skip
    """Print the plan of a run and what it takes on a cluster; of several sizes, one row each.

    Raises:
        UserError: an option is no number, size or name, or contradicts another; or the run does not divide.
    """
    counts, gpu, shares = _counts(nodes), gpu_of(peak_flops, gpu_memory), shares_of(mfu)
    if ranks is not None and (len(counts) > 1 or ranks != counts[0] * gpus_per_node):
        raise UserError(f"--ranks {ranks} is not --nodes {nodes} times --gpus-per-node {gpus_per_node}; leave it out")
    if len(counts) > 1:
        _print_sizes(
            config, [Nodes(count=count, gpus=gpus_per_node) for count in counts], gpu, shares, as_json, console
        )
        return
    place = Nodes(count=counts[0], gpus=gpus_per_node)
    found = on_cluster(config, place, gpu, shares)
    plan = overview(config, ranks=place.ranks, traffic=False)
    if as_json:
        print(json.dumps({**to_json(plan), "cluster": cluster_json(found)}, indent=1))
        return
    render(plan, console)
    render_cluster(found, console)


def _print_sizes(
    config: RunConfig, sizes: list[Nodes], gpu: Gpu, shares: tuple[float, ...], as_json: bool, console: Console
) -> None:
    rows = [(place.ranks, _on(config, place, gpu, shares)) for place in sizes]
    if as_json:
        listed = [{"error": row} if isinstance(row, str) else cluster_json(row) for _, row in rows]
        print(json.dumps({"clusters": listed}, indent=1))
    else:
        render_sizes(rows, console)


def _on(config: RunConfig, place: Nodes, gpu: Gpu, shares: tuple[float, ...]) -> ClusterOverview | str:
    """The run on one size of the cluster, micro-batches lowered to divide the batch; or why it cannot be."""
    try:
        return on_cluster(divided(config, place), place, gpu, shares)
    except UserError as error:
        return str(error)


def _counts(nodes: str) -> list[int]:
    try:
        counts = [int(part) for part in nodes.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UserError(f"--nodes {nodes}: expected a number of nodes, or several: 1,4,16")
    return counts
