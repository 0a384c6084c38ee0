"""Track which process may append to metrics.jsonl and timings.jsonl, so that a new attempt can safely truncate them.

A process that is suspended during a write completes the write when it wakes, in the file that it has open. So an
attempt may truncate these files and append to them only if no other process can have them open for writing. Otherwise
it replaces them with copies. A process that opens the files announces that here before it changes a byte, and withdraws
the announcement after it has closed them. Announcements are protected by the lease's fencing number. The order is:

1. open the files (or copies, which take their names), without changing them;
2. `announce`, which fails if a newer attempt has acquired the lease;
3. truncate and append;
4. close, `withdraw`.

A process suspended between 1 and 2 fails at 2 when it wakes, and has changed nothing. If a process is suspended later,
its successor finds the announcement. Only the last announcement matters: unless all earlier processes had ended, the
process that made it has replaced their files with copies.
"""

from __future__ import annotations

from contextlib import suppress

from runner.rundir.paths import RunDir
from runner.system import files, processes


def nobody_appends(run: RunDir) -> bool:
    """Return whether certainly no process can still change the records, without relying on heartbeats or clocks.

    It is certain if the last process has closed them, or was killed on this machine in this boot. The death of a
    process on a different machine is never certain, and its writes may still be in transit to a network file system.

    Raises:
        OSError: the announcement cannot be read.
    """
    if run.guard is None:  # without a lease this cannot be determined
        return False
    last, own = files.read_object(run.appender), processes.this_process()
    if last.get("open") is False:
        return True
    here = all(last.get(key) == own[key] is not None for key in ("host", "pid_namespace", "boot_id"))
    if not here or own["start_time"] is None or not isinstance(last.get("pid"), int):
        return False
    return processes.is_over(processes.state_of(last["pid"]), last.get("start_time"))


def announce(run: RunDir) -> None:
    """Announce that this process may change the records, until it calls `withdraw`.

    Raises:
        SupersededError: a newer attempt holds the lease; the records must not be touched.
        OSError: the file system refused.
    """
    _write(run, is_open=True, durable=True)


def withdraw(run: RunDir) -> None:
    """Record that this process has closed the records, or has created them without keeping them open.

    Raises:
        SupersededError: a newer attempt holds the lease.
        OSError: the file system refused. The next attempt then makes copies, as it does if a power loss undoes this.
    """
    _write(run, is_open=False, durable=False)


def detach(run: RunDir) -> None:
    """Replace the records with copies if another process may have them open, such as a suspended one.

    Commands that move or pack a run call this. A suspended process that wakes up then writes to unlinked files.

    Raises:
        SupersededError: a newer process holds the lease.
        OSError: the file system refused.
    """
    if nobody_appends(run):
        return
    for path in (run.metrics, run.timings):
        with suppress(FileNotFoundError), files.open_regular(path) as file:
            fd = file.fileno()
            files.close_fd(files.replace_by_part(path, fd, files.size_of(fd), guard=run.guard))
    withdraw(run)


def _write(run: RunDir, is_open: bool, durable: bool) -> None:
    if run.guard is not None:
        content = {"open": is_open, **processes.this_process()}
        run.make_dirs(run.appender.parent)  # missing in a branch that was never started
        files.write_json(run.appender, content, durable=durable, guard=run.guard)
