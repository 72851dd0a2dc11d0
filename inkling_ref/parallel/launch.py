"""A process of a world: it joins the others, and ends with them.

Started by torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A process without them is a world of one.

A rank that fails leaves the others waiting in a collective for what it will not send, and their time-outs say nothing
about the cause. So a thread of every rank tells the store, by which they found each other, what the rank has come to,
and reads what the others tell:

- a rank that fails leaves its message there;
- a rank that tells nothing for some seconds is gone: killed, or stuck where no thread of Python can run;
- a rank for which others wait in a collective, while it waits for none, is late: after the timeout it has failed.

The first to know says so there, and all ranks end within a second, with that message, which names the rank.
"""

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ..decode_step import GRAPHS
from ..errors import InputError
from .apply import TIMEOUT, Mesh
from .collectives import ENTERED, CollectiveError, entering
from .plan import Plan

_KEY, _SEEN = "failed", "failure seen"
_PERIOD = 0.3  # seconds between two looks at the store
_SILENT, _SUSPECT = 40, 16  # looks without a new word from a rank that is gone; where something else has failed already
_LATER = timedelta(seconds=10)  # torch's own timeout follows, in case: it does not know which rank is late
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
def world(
    plan: Plan, device_type: str = "cpu", timeout: timedelta = TIMEOUT, asked: dict[str, object] | None = None
) -> Iterator[Mesh]:
    """This process's place in a world of `plan`: gloo on CPUs, NCCL on GPUs.

    An exception within ends all ranks. This process then does not return from here: it exits with status 2 for an
    InputError and 1 for any other. `timeout` is that of every collective. Ranks that were `asked` for different things
    end at once: their collectives would not fit together, or wait for each other. CUDA graphs (a step's `capture`) end
    with the world, whoever still holds them.
    """
    if rank_and_size()[1] == 1:
        yield Mesh.join(plan, device_type, timeout)
        return
    store, rank, size = _meet(timeout)
    store.set_timeout(timeout)
    everyone, later = tuple(range(size)), timeout + _LATER
    watch = _Watch(store.clone(), rank, size, timeout)
    watch.start()
    try:
        with entering(everyone, "the start"):
            _agree(store, {"the plan": plan, **(asked or {})})
            backend = "nccl" if device_type == "cuda" else "gloo"
            joined = dist.PrefixStore("world", store)
            dist.init_process_group(backend, store=joined, rank=rank, world_size=size, timeout=later)
            mesh = Mesh.join(plan, device_type, later)
        yield mesh
        with entering(everyone, "the end"):
            barrier()
    except BaseException as error:
        watch.report(error)
    watch.stop()
    barrier()  # the store goes with the rank that holds it: nobody may still be looking
    for graph in list(GRAPHS):  # NCCL would wait for one that holds collectives, and nobody watches any more
        graph.reset()
    dist.destroy_process_group()


def barrier() -> None:
    """All ranks of the world meet; NCCL is told where, and need not say that it guesses."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)


def _agree(store: dist.Store, asked: dict[str, object]) -> None:
    mine = {name: f"{value}" for name, value in asked.items()}
    first = json.loads(store.compare_set("asked", "", json.dumps(mine)))
    if others := [name for name in mine if mine[name] != first.get(name)]:
        raise InputError(f"{', '.join(others)}: not as on another rank, expected the same arguments on all")


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


class _Words(NamedTuple):
    """What a rank tells: a number that grows, whether it was asked to end, and its `ENTERED`."""

    number: int
    was_asked: bool
    entered: dict[tuple[int, ...], tuple[int, str]]

    def encode(self) -> str:
        return json.dumps([self.number, self.was_asked, list(self.entered.items())])

    @classmethod
    def decode(cls, text: bytes) -> "_Words":
        number, was_asked, entered = json.loads(text)
        return cls(number, was_asked, {tuple(ranks): tuple(last) for ranks, last in entered})


class _Watch(threading.Thread):
    """Tells what this rank does, and ends it when another has failed, is gone or is late."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(daemon=True)
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout.total_seconds()
        self.stopped = threading.Event()
        self.words = [_Words(0, False, {})] * size  # the last of every rank
        self.silent: Counter[int] = Counter()  # looks since a rank's last word
        self.late: dict[int, tuple[dict, float]] = {}  # rank that others wait for: what it had entered, since when
        self.patience = _SILENT
        self.asked: int | None = None  # by SIGTERM to end: the number of our word then
        self.ear, self.mouth = os.pipe()
        os.set_blocking(self.mouth, False)
        # torchrun ends the others when one rank ends. They shall say why, and a main thread that waits in a collective
        # would not hear a signal.
        self.before = signal.signal(signal.SIGTERM, lambda *_: None) or signal.SIG_DFL
        signal.set_wakeup_fd(self.mouth, warn_on_full_buffer=False)

    def stop(self) -> None:
        """All is well."""
        self.stopped.set()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, self.before)
        if self.is_alive():
            os.write(self.mouth, b"0")  # any byte ends its wait
            self.join()
        faulthandler.cancel_dump_traceback_later()
        os.close(self.ear)
        os.close(self.mouth)

    def run(self) -> None:
        while not self.stopped.is_set():
            message, status = None, 1
            try:
                message = self._look()
            except RuntimeError:
                holder = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
                message = f"{holder} is gone without a message, and with it the store by which ranks meet"
            if message is None and self.asked is not None:
                message, status = self._asked(), 128 + signal.SIGTERM
            if message is not None and not self.stopped.is_set():
                _ENDING.acquire()
                self._end(message, status)
            heard, _, _ = select.select([self.ear], [], [], _PERIOD)
            if heard and signal.SIGTERM in os.read(self.ear, 64):
                self.asked, self.patience = self.words[self.rank].number, _SUSPECT

    def _look(self) -> str | None:
        """Tell, listen, judge: the message of a failure, if there is one."""
        me = self.words[self.rank]
        me = _Words(me.number + 1, self.asked is not None, dict(ENTERED))
        self.store.set(f"rank {self.rank}", me.encode())
        # Should this thread itself no longer run, because something holds the interpreter: the process then ends too.
        faulthandler.dump_traceback_later(1.5 * _SILENT * _PERIOD, exit=True, file=2)
        if self.store.check([_KEY]):
            return self.store.get(_KEY).decode()
        known = [rank for rank in range(self.size) if self.words[rank].number or self.store.check([f"rank {rank}"])]
        for rank, text in zip(known, self.store.multi_get([f"rank {rank}" for rank in known]), strict=True):
            words = _Words.decode(text)
            self.silent[rank] = self.silent[rank] + 1 if words.number == self.words[rank].number else 0
            self.words[rank] = words
        if gone := self._gone():
            who = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} are"
            return f"{who} gone without a message: killed (out of memory?), or stuck"
        return self._late()

    def _gone(self) -> list[int]:
        return [rank for rank in range(self.size) if self.silent[rank] > self.patience]

    def _late(self) -> str | None:
        """Who has come to more collectives of a group than one of its ranks waits for that one, or soon will."""
        entered = [words.entered for words in self.words]
        waits = [
            (a, b, what)
            for a in range(self.size)
            for ranks, (count, what) in entered[a].items()
            for b in ranks
            if entered[b].get(ranks, (0, ""))[0] < count
        ]
        now, waiting = time.monotonic(), {a for a, _, _ in waits}
        before, self.late = self.late, {}
        for a, b, what in waits:
            if b in waiting:  # for another that is late
                continue
            unmoved, since = before.get(b, ({}, now))
            self.late[b] = entered[b], since if unmoved == entered[b] else now
            if now - self.late[b][1] > self.timeout:
                return f"rank {b} did not come to {what}, where rank {a} has waited for {self.timeout:g} s"
        return None

    def _asked(self) -> str | None:
        others = [words for rank, words in enumerate(self.words) if rank not in (self.rank, *self._gone())]
        if all(words.was_asked or not words.number for words in others):  # one that has told nothing yet cannot say so
            return "all ranks were asked to end (SIGTERM)"
        patient = self.words[self.rank].number < self.asked + 1.5 * _SUSPECT
        return None if patient else f"rank {self.rank} was asked to end (SIGTERM)"

    def report(self, error: BaseException) -> NoReturn:
        """End this process, and by the store all others."""
        message, status = f"rank {self.rank}: {error or type(error).__name__}", 1
        if isinstance(error, CollectiveError):  # a consequence, most likely: let the cause be found first
            self.patience = _SUSPECT
            time.sleep(1.5 * _SUSPECT * _PERIOD)
        elif isinstance(error, InputError):
            status = 2
        elif isinstance(error, OSError):  # of a file, as on the command line
            message, status = f"rank {self.rank}: {error.filename or 'system'}: {error.strerror or error}", 2
        elif isinstance(error, KeyboardInterrupt):
            message, status = "interrupted", 128 + signal.SIGINT
        else:
            message = f"rank {self.rank}: {type(error).__name__}: {error}"
            traceback.print_exception(error)
        _ENDING.acquire()
        self.stopped.set()
        self._end(message, status)

    def _end(self, message: str, status: int) -> NoReturn:
        """At once: a thread that waits in a collective cannot be interrupted otherwise."""
        with suppress(RuntimeError):  # a store that is gone can no longer be asked
            first = self.store.compare_set(_KEY, "", message).decode()
            message, status = first, status if first == message else 1
            # The store may live in rank 0: it lets the others read the message, but does not wait long for dead ones.
            self.patience, looks = _SUSPECT // 2, 20
            self.store.add(_SEEN, 1)
            while self.rank == 0 and looks and self.store.add(_SEEN, 0) < self.size - len(self._gone()):
                time.sleep(_PERIOD)
                looks -= 1
        print(f"error: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's own report then says it too
            with suppress(OSError):
                Path(file).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))
        os._exit(status)
