"""Queries for the attempts at a session's steps: devices, their peaks and how busy they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuna.db.models import DeviceRow, Job, StepResultRow
from tuna.reports.report_data import DeviceFigures


@dataclass(frozen=True)
class Steps:
    """Devices and times of the accepted attempts."""

    first: datetime | None
    last: datetime | None
    devices: tuple[DeviceFigures, ...]
    device_of_job: Mapping[int, str]

    def peak_gflops(self, job_id: int) -> float | None:
        """Return the peak of the device that measured the job."""
        name = self.device_of_job.get(job_id, "")
        return next((device.peak_gflops for device in self.devices if device.name == name), None)


def read_steps(connection: sa.Connection, session_id: int, environment_id: int) -> Steps:
    """Read the accepted attempts of the session's jobs."""
    by_name = sa.select(DeviceRow.name, DeviceRow.peak_gflops, DeviceRow.peak_source).where(
        DeviceRow.environment_id == environment_id
    )
    peaks = {name: (gflops, source) for name, gflops, source in connection.execute(by_name)}
    of_session = sa.select(Job.id).where(Job.session_id == session_id)
    first, last = connection.execute(
        sa.select(sa.func.min(StepResultRow.started_at), sa.func.max(StepResultRow.ended_at)).where(
            StepResultRow.job_id.in_(of_session)
        )
    ).one()
    # Only a step that runs on a device names one.
    on_device = (StepResultRow.job_id.in_(of_session), StepResultRow.device != "")
    query = (
        sa.select(
            StepResultRow.device,
            sa.func.count(),
            sa.func.sum(StepResultRow.busy_s),
            sa.func.min(StepResultRow.started_at),
            sa.func.max(StepResultRow.ended_at),
        )
        .where(*on_device)
        .group_by(StepResultRow.device)
        .order_by(StepResultRow.device)
    )
    devices = tuple(
        DeviceFigures(
            name=name,
            peak_gflops=peaks.get(name, (None, ""))[0],
            steps=count,
            busy_s=busy or 0.0,
            span_s=(end - start).total_seconds() if start and end else 0.0,
            peak_source=peaks.get(name, (None, ""))[1],
        )
        for name, count, busy, start, end in connection.execute(query)
    )
    pairs = (
        sa.select(StepResultRow.job_id, StepResultRow.device)
        .where(*on_device)
        .order_by(StepResultRow.id)
    )
    return Steps(first, last, devices, {row[0]: row[1] for row in connection.execute(pairs)})
