"""The waterfall of a training step: where every millisecond goes, from peak to achieved.

A step of a rank is cut into classes: GEMMs (at the device's peak, and what they take above it),
attention, elementwise work, exposed communication of each axis, pipeline bubble, optimizer, host,
and a residual that nobody claims. `probe.py` marks where each operator begins and ends, in forward
and in backward; it is attached where `telemetry.waterfall` is set, and a run without it has not one
node or event more. `alone.py` times the same GEMMs without their communication, `account.py` is
the arithmetic, a pure function of the events, and `bubble.py` what a schedule alone leaves idle.

Times are those of the recorder's clock, on the compute stream; nothing here waits for a device
while a step runs.
"""
