"""Locks in a process that has been forked while another thread, which is not there, held them."""

import os
from functools import partial


def renew(lock) -> None:
    """In the child: frees a lock that nobody will release."""
    if lock.acquire(blocking=False):
        lock.release()
    else:
        lock._at_fork_reinit()


def free_in_children(lock):
    """The lock, which lives as long as the process."""
    os.register_at_fork(after_in_child=partial(renew, lock))
    return lock
