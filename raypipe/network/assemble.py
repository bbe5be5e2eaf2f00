"""Makes a `ClusterTopology` of measurements."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence

from raypipe.artifacts.topology import ClusterTopology, Link, Node, NodeLink, Overheads, SharedLink
from raypipe.errors import RunError
from raypipe.network.fit import LinkFit
from raypipe.network.rounds import Pair
from raypipe.network.sharing import Bottleneck

_ALIKE = 0.05  # relative difference below which two figures are written as one
_LIMITS = 0.95  # A shared link with more than this share of its members' summed bandwidth is left out


def assemble(
    *,
    name: str,
    nodes: Sequence[Node],
    fits: Mapping[Pair, LinkFit],
    shared: Sequence[Bottleneck] = (),
    classes: Sequence[Hashable] = (),
    missing: Collection[Pair] = (),
    overheads: Overheads | None = None,
) -> ClusterTopology:
    """Return the topology of measured nodes, or raise `RunError` if no link was measured.

    Other pairs get the median of the links between their two classes of nodes, as the default link or as one of their own; `missing`
    pairs, lower number first, get none. A default link would give them one: where some are missing, all others have links of their own.
    """
    num_nodes = len(nodes)
    pairs = [(a, b) for a in range(num_nodes) for b in range(num_nodes) if a != b and (min(a, b), max(a, b)) not in missing]
    default: NodeLink | None = None
    figures = {pair: (fit.latency_s, fit.bandwidth_bytes_per_s) for pair, fit in fits.items()}
    if len(figures) < len(pairs):
        of_classes = _of_classes(fits, classes)
        everywhere = tuple(map(statistics.median, zip(*figures.values(), strict=True)))
        if not everywhere:
            raise RunError("no link between two nodes was measured; probe again with a larger budget")
        if not missing:
            default = NodeLink(latency_s=everywhere[0], bandwidth_bytes_per_s=everywhere[1])
        for a, b in pairs:
            like = of_classes.get((classes[a], classes[b]), everywhere)
            if (a, b) not in figures and (missing or not all(map(_alike, like, everywhere))):
                figures[a, b] = (like[0], like[1])
    return ClusterTopology(
        name=name,
        nodes=tuple(nodes),
        links=tuple(_links(nodes, figures)),
        shared_links=tuple(_shared_links(nodes, shared, figures)),
        default_link=default,
        overheads=overheads,
    )


def _of_classes(fits: Mapping[Pair, LinkFit], classes: Sequence[Hashable]) -> dict[tuple[Hashable, Hashable], tuple[float, ...]]:
    seen: dict[tuple[Hashable, Hashable], list[tuple[float, float]]] = {}
    for (a, b), fit in fits.items():
        seen.setdefault((classes[a], classes[b]), []).append((fit.latency_s, fit.bandwidth_bytes_per_s))
    return {ends: tuple(map(statistics.median, zip(*figures, strict=True))) for ends, figures in seen.items()}


def _alike(a: float, b: float) -> bool:
    return abs(a - b) <= _ALIKE * max(a, b)


def _links(nodes: Sequence[Node], figures: Mapping[Pair, tuple[float, float]]) -> list[Link]:
    links: list[Link] = []
    for (a, b), figure in sorted(figures.items()):
        back = figures.get((b, a))
        both = back is not None and _alike(figure[1], back[1])
        if both and a > b:
            continue  # it stands with the other direction
        latency_s, bandwidth = ((there + other) / 2 for there, other in zip(figure, back if both and back else figure, strict=True))
        links.append(
            Link(source=nodes[a].name, target=nodes[b].name, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s, one_way=not both)
        )
    return links


def _shared_links(nodes: Sequence[Node], shared: Sequence[Bottleneck], figures: Mapping[Pair, tuple[float, float]]) -> list[SharedLink]:
    links: list[SharedLink] = []
    for bottleneck in sorted(shared, key=lambda one: (not one.crosses, sorted(one.members))):
        alone = sum(figures[pair][1] for pair in bottleneck.members if pair in figures)
        if len(bottleneck.members) < 2 or bottleneck.bandwidth_bytes_per_s > _LIMITS * alone:
            continue
        links.append(
            SharedLink(
                name=_name(nodes, bottleneck, number=len(links) + 1),
                bandwidth_bytes_per_s=bottleneck.bandwidth_bytes_per_s,
                members=tuple((nodes[a].name, nodes[b].name) for a, b in sorted(bottleneck.members)),
            )
        )
    return links


def _name(nodes: Sequence[Node], shared: Bottleneck, *, number: int) -> str:
    sources, targets = {a for a, _ in shared.members}, {b for _, b in shared.members}
    if len(shared.members) == len(nodes) - 1:
        if len(sources) == 1:
            return f"{nodes[sources.pop()].name}-egress"
        if len(targets) == 1:
            return f"{nodes[targets.pop()].name}-ingress"
    return f"shared-{number}"
