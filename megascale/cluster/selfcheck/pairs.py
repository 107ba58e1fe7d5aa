"""Which nodes meet for an all-reduce, and which of them failed meetings accuse. Pure.

A meeting that fails has two suspects, one that succeeds clears both. So every node meets several
others: neighbours in the given order first (they hang on one switch), then swapped neighbours,
then others. With `most_faults` bad nodes a good one needs `most_faults + 1` partners, so that one
of them is good; more rounds tell nothing that the accusation uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megascale.errors import ConfigError

Pair = tuple[str, str]
PORTS = range(20_000, 30_000)


@dataclass(frozen=True)
class Meeting:
    """One side of a pair: with whom, where, and as which rank (0 listens at host:port).

    As text, for the command line and `RunSelfCheck.peers`: PEER@HOST:PORT/RANK.
    """

    peer: str
    host: str
    port: int
    rank: int

    def __str__(self) -> str:
        return f"{self.peer}@{self.host}:{self.port}/{self.rank}"


def parse_meeting(text: str) -> Meeting:
    """ConfigError for what is not PEER@HOST:PORT/RANK."""
    found = re.fullmatch(r"([^@\s]+)@([^@\s]+):(\d+)/([01])", text)
    if not found or not 0 < int(found[3]) < 1 << 16:
        raise ConfigError(
            f"peer {text!r}; expected PEER@HOST:PORT/RANK, such as node7@10.0.0.7:21000/1, where "
            "rank 0 listens at HOST:PORT and rank 1 comes to it"
        )
    return Meeting(found[1], found[2], int(found[3]), int(found[4]))


def rounds(nodes: Sequence[str], most_faults: int = 1) -> list[list[Pair]]:
    """Rounds of disjoint pairs; over all of them each node has `most_faults + 1` partners or more.

    Round 0 is (0, 1), (2, 3), ...; round 1 (1, 2), (3, 4), ... and around; of an odd number, one
    sits out in each. Fewer partners where there are not so many nodes.
    Raises ValueError for a name that is there twice.
    """
    if len(set(nodes)) != len(nodes):
        raise ValueError(f"a node is named twice in {list(nodes)}")
    even = [*nodes, None] if len(nodes) % 2 else list(nodes)
    wanted = min(most_faults + 1, len(nodes) - 1)
    found: list[list[Pair]] = []
    partners = dict.fromkeys(nodes, 0)
    for matching in _matchings(len(even)):
        if min(partners.values(), default=0) >= wanted:
            break
        pairs = []
        for low, high in matching:
            first, second = even[low], even[high]
            if first is not None and second is not None:
                pairs.append((first, second))
                partners[first] += 1
                partners[second] += 1
        found.append(pairs)
    return found


def _matchings(count: int) -> list[list[tuple[int, int]]]:
    """The `count` - 1 perfect matchings of an even `count` in which every two meet once.

    The circle method: in round r, i and j meet where i + j = r modulo count - 1, and the last one
    meets him who would meet himself. Rounds 0 and 1 together are one ring; numbering the places
    along it makes those two the neighbours and the swapped neighbours.
    """
    if count < 2:
        return []
    odd = count - 1

    def partner(place: int, number: int) -> int:
        if place == odd:
            return number * (odd + 1) // 2 % odd
        other = (number - place) % odd
        return odd if other == place else other

    ring = [0]
    while len(ring) < count:
        ring.append(partner(ring[-1], (len(ring) - 1) % 2))
    number_of = {place: number for number, place in enumerate(ring)}
    return [
        sorted(
            (number_of[place], number_of[partner(place, r)])
            for place in range(count)
            if number_of[place] < number_of[partner(place, r)]
        )
        for r in range(odd)
    ]


def meetings(
    planned: Sequence[Sequence[Pair]], addresses: Mapping[str, str], first_port: int = 21_000
) -> dict[str, list[Meeting]]:
    """Each node's meetings, in the order of the rounds; the first of a pair listens.

    A port a round, so that a node which listens late in one is not met in the next.
    """
    found: dict[str, list[Meeting]] = {
        node: [] for pairs in planned for pair in pairs for node in pair
    }
    for number, pairs in enumerate(planned):
        port = first_port + number
        for first, second in pairs:
            found[first].append(Meeting(second, addresses[first], port, 0))
            found[second].append(Meeting(first, addresses[first], port, 1))
    return found


def accuse(results: Mapping[Pair, bool]) -> set[str]:
    """Nodes that failed in every meeting they had. The order inside a pair does not matter.

    Right for up to `most_faults` bad nodes if every meeting of a bad node fails, every other one
    succeeds, and the meetings are those of `rounds(nodes, most_faults)`. With too few meetings to
    tell (two nodes, one meeting) both are accused.
    """
    cleared = {node for pair, right in results.items() if right for node in pair}
    return {node for pair, right in results.items() if not right for node in pair} - cleared


def unexplained(results: Mapping[Pair, bool]) -> set[Pair]:
    """Failed meetings of two nodes that both succeeded elsewhere: the path between them is bad."""
    accused = accuse(results)
    return {pair for pair, right in results.items() if not right and not accused.intersection(pair)}
