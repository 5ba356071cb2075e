"""A process that is forked while another thread of its parent predicts."""

import os
import threading
import time
import traceback

import pytest
from test_interrupts import BATCHES, Bare, X
from torch import nn

import bnuq_ext as bnuq
from bnuq_ext import bank, forks, model_cache, restore, untraced

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
    pytest.mark.usefixtures("on_one_thread"),  # OpenMP waits for its others, which a child has not
]


def predicted(model):
    return bnuq.predict(model, X, likelihood="gaussian", num_samples=4, seed=0).mean


def status_of(child, seconds=20.0):
    """The exit status of `child()` in a forked process, or None where it does not end."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(child())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    for _ in range(int(seconds / 0.01)):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return None


def test_a_child_waits_for_no_thread_that_it_has_not():
    model, tried = (bnuq.convert(Bare()).eval() for _ in range(2))
    for each in (model, tried):
        bnuq.collect(each, BATCHES, progress=False)
    expected = predicted(tried)
    planning = model_cache._CACHES[tried].planning
    locks = [untraced.ONE_MODE, model_cache._LOCK, restore._EVAL_LOCK, bank._LOCK, planning]
    held, done = threading.Event(), threading.Event()

    def hold():
        for lock in locks:
            lock.acquire()
        held.set()
        done.wait()
        for lock in reversed(locks):
            lock.release()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()

    def child():
        tried.add_module("unused", nn.Identity())  # another model than that which was tried
        return int(not (predicted(model).isfinite().all() and predicted(tried).equal(expected)))

    try:
        assert status_of(child) == 0
        assert all(not lock.acquire(blocking=False) for lock in locks)
    finally:
        done.set()
        holder.join()


def test_a_lock_that_the_forking_thread_holds_stays_held():
    lock = threading.RLock()
    with lock:
        assert status_of(lambda: forks.renew(lock) or lock.release() or 0) == 0
