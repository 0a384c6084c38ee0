"""Which process may still append to metrics.jsonl and timings.jsonl, so that an attempt knows what it may do to them.

Nothing stops a process that was stopped in the middle of a write: when it wakes, the write happens, in the file that it
has open. So an attempt may only truncate these files, and append to them, if no other process can have them open for
writing; otherwise it puts copies in their place. Whoever opens them announces itself here before it changes a byte, and
withdraws that once it has closed them. All announcements are behind the fence, in this order:

1. open the files (or copies, which take their names), without changing them;
2. `announce`, which fails if a newer attempt has acquired the lease;
3. truncate and append;
4. close, `withdraw`.

A process stopped between 1 and 2 fails there when it wakes, having changed nothing. One stopped later is found here by
its successor. What a process did before that, an older one than the last, does not matter: the last one would have put
copies in their place, had it not been over.
"""

from __future__ import annotations

from contextlib import suppress

from runner.rundir.paths import RunDir
from runner.system import files, processes


def nobody_appends(run: RunDir) -> bool:
    """Whether it is certain, without any heartbeat or clock, that no process can change the records any more.

    Either the last one has closed them; or it was killed on this machine, in this boot. Of one that was killed on
    another machine nobody can tell for certain; and what it wrote may still be on its way to a network file system.

    Raises:
        OSError: the announcement cannot be read.
    """
    if run.guard is None:  # there is no lease, by which it could be told
        return False
    last, own = files.read_object(run.appender), processes.this_process()
    if last.get("open") is False:
        return True
    here = all(last.get(key) == own[key] is not None for key in ("host", "pid_namespace", "boot_id"))
    if not here or own["start_time"] is None or not isinstance(last.get("pid"), int):
        return False
    return processes.is_over(processes.state_of(last["pid"]), last.get("start_time"))


def announce(run: RunDir) -> None:
    """From here on this process may change the records, until it withdraws.

    Raises:
        SupersededError: a newer attempt holds the lease; the records must not be touched.
        OSError: the file system refused.
    """
    _write(run, is_open=True, durable=True)


def withdraw(run: RunDir) -> None:
    """This process has closed the records; or it has just made them, and never had them open.

    Raises:
        SupersededError: a newer attempt holds the lease.
        OSError: the file system refused: the next attempt makes copies, as it does if a power loss undoes this.
    """
    _write(run, is_open=False, durable=False)


def detach(run: RunDir) -> None:
    """Put copies in the place of the records if another process may have them open, such as one that is stopped.

    Whoever moves or packs a run leaves its records closed, as an attempt does that ends: a process that wakes up writes
    to files without a name.

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
        run.make_dirs(run.appender.parent)  # of a branch that was never started there is none yet
        files.write_json(run.appender, content, durable=durable, guard=run.guard)
