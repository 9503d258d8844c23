"""A shard with standbys: a model of servers that replicate, are promoted, and return; nothing happens by itself.

A standby that is not cut off has all that the primary has written, at every moment, if their histories allow that. Each
server has slots of its own, and so the chain an archive of each. `fleet.toml` lists the server `0` as the primary.
"""

from __future__ import annotations

from cutline.wal.segments.segments import COMMIT
from tests.simulation.failover_model import FailoverWorld, Server
from tests.simulation.fleet_records import ROWS_PER_NODE, Part

PRIMARY = "0"


class PromotionWorld(FailoverWorld):
    """One shard with standbys.

    `listed` is the server that accepts writes, by its id in fleet.toml, `standbys` are its running standbys, and `away`
    the servers that are down. `rival` is one that accepts writes as well.
    """

    def __init__(self, standbys: int) -> None:
        super().__init__(lambda size: 0)
        self._agenda.clear()
        self.nodes, self.servers = self.nodes[:1], self.servers[:1]
        self.listed = PRIMARY
        self.standbys = {f"{PRIMARY}-b{number}": Server() for number in range(1, standbys + 1)}
        self.standbys_of = dict.fromkeys(self.standbys, PRIMARY)
        self.cut_off: set[str] = set()
        self.away: dict[str, Server] = {}
        self.rival = ""

    def server(self, node: str) -> Server | None:
        """The server that has the role: that of the primary and of a promoted standby are exchanged."""
        if node == PRIMARY:
            return self.servers[0]
        return self.standbys.get(PRIMARY if node == self.listed else node)

    def commit(self) -> None:
        """Commit a transaction of one row on the primary."""
        one = self._new_transaction(None)
        part = Part(len(self.parts), one, 0, writes=(len(self.parts) % ROWS_PER_NODE,))
        one.parts.append(part)
        self.parts.append(part)
        self._commit(part, None)
        one.fate = "committed"
        self.replicate()

    def replicate(self) -> None:
        """Let all standbys that are not cut off have what the primary has written."""
        leader = self.servers[0]
        for name, standby in self.standbys.items():
            if name not in self.cut_off and follows(standby, leader):
                standby.records, standby.end = list(leader.records), leader.end
                standby.timeline, standby.switches = leader.timeline, dict(leader.switches)

    def promote(self, name: str) -> None:
        """The primary dies, and the standby takes its place with what it has."""
        self.away[self.listed] = self.servers[0]
        standby = self.standbys.pop(name)
        standby.switches = {**standby.switches, standby.timeline: standby.end}
        standby.timeline += 1
        self.listed = name
        self.cut_off.discard(name)
        self._become(0, standby)
        self.replicate()

    def switch_over(self, name: str) -> None:
        """The primary is shut down when the standby has all of its WAL; then it follows, and has kept its slots."""
        self.cut_off.discard(name)
        self.replicate()
        before = self.listed
        self.promote(name)
        self.standbys[before] = self.away.pop(before)
        self.replicate()

    def rebuild(self) -> None:
        """Every server that is down or can't follow becomes a standby by a copy of the primary, without slots."""
        leader = self.servers[0]
        lost = [name for name, standby in self.standbys.items() if not follows(standby, leader)]
        for name in (*self.away, *lost):
            self.standbys[name] = Server(list(leader.records), leader.end, leader.timeline, dict(leader.switches))
            self.cut_off.discard(name)
        self.away.clear()

    def take_back(self, name: str) -> None:
        """The primary goes down, and a server that is down accepts writes in its place, as it did before."""
        former = self.away.pop(name)
        self.away[self.listed] = self.servers[0]
        self.listed = name
        self._become(0, former)
        self.replicate()


def follows(standby: Server, leader: Server) -> bool:
    """Whether the standby can follow: the leader has all of its WAL, on the same timelines."""
    count = len(standby.records)
    if any(one is not other for one, other in zip(standby.records, leader.records[:count], strict=False)):
        return False
    if standby.timeline == leader.timeline:
        return count <= len(leader.records) and standby.end <= leader.end and standby.switches == leader.switches
    return count <= len(leader.records) and standby.end <= leader.switches.get(standby.timeline, -1)


def committed(server: Server) -> frozenset[int]:
    """The parts that a server has: all transactions here are local."""
    return frozenset(record.xid for record in server.records if record.op == COMMIT)
