"""Failure detection: ranks that have ended, do not arrive or are out of step, and the error that other ranks raise.

torch does a part of this. A dead process closes its connections of gloo, which only its direct peers notice: `liveness`
tells all ranks. A store's timeout cannot watch for the failure of a rank at the same time, and a client of a stopped
server has none: `agreement` polls, and `monitor` is a thread that may be blocked. torch's watchdog ends the process
when an operation of NCCL is late, names no rank, and cannot be set after the group was created: `stream_watch` notices
the operation first, and `caller_error` raises in the thread that waits. The flight recorder writes files for people.
"""
