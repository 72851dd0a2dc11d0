"""A process of a world: it joins the others, and ends with them.

Started by torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A process without them is a world of one.

A rank that fails leaves the others waiting in a collective for what it will not send, and their time-outs say nothing
about the cause. So every rank watches one key of the store by which they found each other: the first that fails puts
its message there, and all others end within a second, with that message. What kills a process outright leaves none;
the others then end when their connection to it breaks, or at the latest when a collective times out.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import InputError
from .apply import TIMEOUT, Mesh
from .collectives import CollectiveError
from .plan import Plan

_KEY, _SEEN = "failed", "failure seen"
_PERIOD = 0.3  # seconds between two looks at the store
_ENDING = threading.Lock()  # the watching thread and the failing one may both want to end: the first does


def variable(name: str, default: int, below: int = 2**31) -> int:
    """A whole number that torchrun set.

    Raises:
        InputError: another text, or a number that is not below `below`.
    """
    text = os.environ.get(name, str(default))
    if not (text.isdecimal() and int(text) < below):
        raise InputError(f"{name} is {text!r} in the environment, expected an integer from 0 to {below - 1}")
    return int(text)


def rank_and_size() -> tuple[int, int]:
    """Of this process, as torchrun set them.

    Raises:
        InputError: no numbers, or a rank that is not below the size.
    """
    size = max(variable("WORLD_SIZE", 1), 1)
    return variable("RANK", 0, size), size


@contextmanager
def world(plan: Plan, device_type: str = "cpu", timeout: timedelta = TIMEOUT) -> Iterator[Mesh]:
    """This process's place in a world of `plan`: gloo on CPUs, NCCL on GPUs.

    An exception within ends all ranks. This process then does not return from here: it exits with status 2 for an
    InputError and 1 for any other.

    Raises:
        InputError: before the ranks have met: where they should is not said, or they do not within the timeout.
    """
    rank, size = rank_and_size()
    if size == 1:
        yield Mesh.join(plan, device_type, timeout)
        return
    store, rank, size = _meet(timeout)
    store.set_timeout(timeout)
    watch = _Watch(store.clone(), rank, size)
    watch.start()
    try:
        backend = "nccl" if device_type == "cuda" else "gloo"
        joined = dist.PrefixStore("world", store)
        dist.init_process_group(backend, store=joined, rank=rank, world_size=size, timeout=timeout)
        yield Mesh.join(plan, device_type, timeout)
        dist.barrier()
    except BaseException as error:
        watch.report(error)
    watch.stopped.set()
    dist.barrier()  # the store goes with the rank that holds it: nobody may still be looking
    dist.destroy_process_group()


def _meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
    host, port = os.environ.get("MASTER_ADDR"), variable("MASTER_PORT", 0, 2**16)
    if not (host and port):
        raise InputError("MASTER_ADDR or MASTER_PORT is missing in the environment, expected a start by torchrun")
    try:
        if variable("RANK", 0):
            _await(host, port, timeout)
        return next(dist.rendezvous("env://", timeout=timeout))
    except (dist.DistError, OSError) as error:
        why = str(error).splitlines()[0]
        raise InputError(f"MASTER_ADDR {host}, MASTER_PORT {port}: expected all ranks to meet there: {why}") from None


def _await(host: str, port: int, timeout: timedelta) -> None:
    """Until rank 0 listens: of one that never does torch would say so with pages of its own stack."""
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), max(end - time.monotonic(), _PERIOD)).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(_PERIOD)


class _Watch(threading.Thread):
    """Looks for another rank's failure, and reports one of this rank."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(daemon=True)
        self.store, self.rank, self.size = store, rank, size
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(_PERIOD):
            try:
                failed = self.store.check([_KEY])
            except RuntimeError:
                failed = None
            if self.stopped.is_set():
                return
            if failed is None:
                _ENDING.acquire()
                _end("the store is gone: the rank that holds it has ended", 1)
            if failed:
                _ENDING.acquire()
                self._follow()

    def _follow(self) -> None:
        message = self.store.get(_KEY).decode()
        self.store.add(_SEEN, 1)
        self._outlast()
        _end(message, 1)

    def _outlast(self) -> None:
        """The store may live in rank 0: it lets the others read the message, but does not wait long for dead ones."""
        if self.rank > 0:
            return
        end = time.monotonic() + 20 * _PERIOD
        with suppress(RuntimeError):
            while time.monotonic() < end and self.store.add(_SEEN, 0) < self.size - 1:
                time.sleep(_PERIOD / 3)

    def report(self, error: BaseException) -> None:
        """End this process, and by the store all others."""
        self.stopped.set()
        _ENDING.acquire()
        if isinstance(error, CollectiveError):  # a consequence, most likely: let the cause speak first
            with suppress(RuntimeError):
                self.store.wait([_KEY], timedelta(seconds=10 * _PERIOD))
                self._follow()
        message = f"rank {self.rank}: {error or type(error).__name__}"
        if not isinstance(error, (InputError, CollectiveError)):
            traceback.print_exception(error)
            message = f"rank {self.rank}: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # a store that is gone can no longer be asked
            first = self.store.compare_set(_KEY, "", message).decode() == message
            if not first:
                self._follow()
        self._outlast()
        _end(message, 2 if isinstance(error, InputError) else 1)


def _end(message: str, status: int) -> None:
    """At once: a thread that waits in a collective cannot be interrupted otherwise."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
