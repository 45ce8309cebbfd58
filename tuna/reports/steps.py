"""Queries for the attempts at a session's steps: devices, their peaks and how busy they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa

from tuna.configs.values import DataType
from tuna.db.models import DeviceRow, Job, StepResultRow
from tuna.reports.report_data import DeviceFigures

#: Operations of an NVIDIA multiprocessor's tensor cores in a cycle, for one of its fp32 cores, on
#: sm_80 and sm_90 (NVIDIA, "H100 Tensor Core GPU Architecture", table of throughputs).
_MATRIX_UNITS: Mapping[DataType | None, int] = {
    **dict.fromkeys((DataType.FP16, DataType.BF16), 16),
    **dict.fromkeys((DataType.INT8, DataType.FP8_E4M3, DataType.FP8_E5M2), 32),
}


@dataclass(frozen=True)
class Steps:
    """Devices and times of the accepted attempts."""

    first: datetime | None
    last: datetime | None
    devices: tuple[DeviceFigures, ...]
    device_of_job: Mapping[int, str]

    def peak_gflops(self, job_id: int, data_type: DataType | None) -> float | None:
        """Return the peak of the device that measured the job, in the job's data type.

        It is measured in fp32; that of a GPU's matrix units is a multiple of it.
        """
        name = self.device_of_job.get(job_id, "")
        device = next((one for one in self.devices if one.name == name), None)
        if device is None or device.peak_gflops is None:
            return None
        times = _MATRIX_UNITS if device.peak_source == "device" else {}
        factor = {DataType.FP32: 1, **times}.get(data_type)
        return factor * device.peak_gflops if factor else None


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
