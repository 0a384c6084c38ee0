"""All access to threads: start one, lock, wait for an event, pass things on; and which process and thread this is.

Call these through the module (`threads.Event()`), and when they are needed, not at import, so that a test can replace
them. Imports nothing of the project, so that all of the system layer can use it.
"""

from __future__ import annotations

import os
import queue
import threading

Thread = threading.Thread
"""A thread, to start with `start()`."""

Event = threading.Event
"""A flag that threads can wait for."""

Lock = threading.Lock
"""What one thread at a time holds."""

RLock = threading.RLock
"""The same; a thread that holds it may take it again."""

SimpleQueue = queue.SimpleQueue
"""A queue of any length between threads."""

Queue = queue.Queue
"""A queue between threads that can be full."""

Empty, Full = queue.Empty, queue.Full

current = threading.current_thread
"""The thread that calls this."""

ident = threading.get_ident
"""The number of the thread that calls this."""

own_pid = os.getpid
"""The number of this process. Code outside of the system layer asks `processes.own_pid`, which asks this."""
