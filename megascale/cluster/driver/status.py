"""The job as people see it."""

from __future__ import annotations

from dataclasses import asdict

from megascale.cluster.driver.desk import Desk
from megascale.cluster.job import natural
from megascale.cluster.people import IncidentStatus, NodeStatus, ReadoptedStatus, Status


def status_of(desk: Desk, run_dir: str, job_s: float) -> Status:
    """From the newest decided state; may be called from any thread."""
    job = desk.job
    silences = desk.silences(desk.clock())
    nodes = []
    for node in sorted(job.nodes.values(), key=lambda one: natural(one.name)):
        ranks = job.ranks_of(node)
        nodes.append(
            NodeStatus(
                node=node.name,
                state=node.state,
                host=node.host,
                switch=node.switch,
                node_rank=node.node_rank,
                ranks=(ranks.start, ranks.stop - 1) if ranks else None,
                silence_s=max(0.0, silences.get(node.name, 0.0)),
            )
        )
    incidents = [
        IncidentStatus(
            number=one.number,
            cause=one.cause,
            opened_s=one.opened_s,
            nodes=list(one.nodes),
            ranks=list(one.ranks),
            step=one.step,
            text=one.text,
        )
        for one in job.open
    ]
    return Status(
        phase=job.phase,
        epoch=job.epoch,
        run_dir=run_dir,
        job_s=job_s,
        newest_step=job.newest_step,
        epoch_step=job.epoch_step,
        world_size=job.world_size,
        nodes=nodes,
        incidents=incidents,
        restarts={cause or "start": count for cause, count in job.restarts.items()},
        blocked=list(job.blocked),
        ledger_s=job.ledger.seconds(),
        ettr=job.ledger.ettr,
        refused=dict(desk.refusals.counts),
        drivers=job.num_drivers,
        readopted=None if job.readopted is None else ReadoptedStatus(**asdict(job.readopted)),
        report=job.report,
    )
