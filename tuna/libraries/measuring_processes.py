"""The processes that load and measure the candidates of one item after the other.

Candidates are foreign code: a process in which one has run cannot be trusted any more. So the
candidates of an item run in a process that ends with the item, and facts that a worker keeps beyond
it, such as the device's peak, come from another process.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from tuna.libraries.candidate_children import ChildKind, answer_to, call_child
from tuna.libraries.context import DeviceHandle, RunContext
from tuna.libraries.measurement import build_fault
from tuna.sandbox.box import Box
from tuna.sandbox.processes import Child, ChildFault, child_env

#: Seconds that a device has to answer a child that is started for it
_PROBE_S = 50.0


class MeasuringProcesses(ABC):
    """Calls of these processes, by what has run in the one that answers.

    `clean`, `shared` and `fresh` take the name of an operation, a limit in seconds and its
    arguments; they raise ChildFault, and DeviceGone for a device that vanished.
    """

    def __init__(self, kind: ChildKind) -> None:
        self.kind = kind
        self.finals = False  #: true if the current item is one of finals
        self._item: RunContext | None = None  #: context of the current item

    @property
    def simulated(self) -> bool:
        """Whether the device only pretends to measure."""
        return False

    @contextlib.contextmanager
    def chunk(self, context: RunContext, limit_s: float) -> Iterator[None]:
        """Measure the items of a chunk, which take up to `limit_s`, in this block."""
        yield

    def begin_item(self, context: RunContext, *, finals: bool) -> None:
        """Start what the item needs: that is not part of its own time. `finals`: of a config.

        Raises DeviceGone.
        """
        self._item, self.finals = context, finals
        with contextlib.suppress(ChildFault):  # the first call that needs it reports it
            self._prepare()

    def _prepare(self) -> None:
        self.clean("prepare", self.kind.start_timeout_s)

    @abstractmethod
    def clean(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call a process in which no candidate has ever run."""

    @abstractmethod
    def shared(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call the process in which the candidates of the item run, one after the other."""

    @abstractmethod
    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call a process in which nothing was measured before."""

    @abstractmethod
    def end_item(self) -> None:
        """End the process in which the item's candidates ran: it could report wrong times for those
        of the next item."""

    @abstractmethod
    def warm_up(self, context: RunContext) -> None:
        """Start what is kept from item to item; raises ChildFault."""

    @abstractmethod
    def close(self) -> None:
        """End all processes."""

    def own_device(self) -> DeviceHandle | None:
        """Return the device that they measure on, unless it belongs to this machine."""
        return None

    def probe(self, device: DeviceHandle) -> str:
        """Whether a new process can load the library and ask the device for its peak: empty, or why
        not. Cores are not asked."""
        if device.cores_only:
            return ""
        env = child_env({**self.kind.variables(1), **device.variables})
        child = Child(self.kind.module, env=env, box=Box(gpus=True))
        try:
            request = {"op": "probe", "loader": self.kind.used}
            child.call(request, _PROBE_S, check=answer_to(request))
        except ChildFault as error:
            return str(build_fault(error)["output_tail"]).splitlines()[-1]
        finally:
            child.close()
        return ""

    @property
    def context(self) -> RunContext:
        """That of the current item."""
        assert self._item is not None, "begin_item comes first"
        return self._item

    def new_child(self, context: RunContext) -> Child:
        """A process that can measure, and has not started."""
        return self.kind.new(context, len(context.cpus) or 1)

    def call(self, child: Child, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call one of them."""
        facts = {"loader": self.kind.used, **arguments}
        return call_child(child, self.context, op, timeout_s, **facts)


class ForkedProcesses(MeasuringProcesses):
    """Forks of one process that has imported the loader and loads no candidate itself."""

    def __init__(self, kind: ChildKind) -> None:
        super().__init__(kind)
        self.parent: Child | None = None
        self._fork = 1  #: number of the fork in which the item's candidates run
        self._tainted = False  #: true if a candidate has run in that fork

    def clean(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call the parent."""
        self.parent = self.parent or self.new_child(self.context)
        return self.call(self.parent, op, timeout_s, **arguments)

    def shared(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call the item's fork."""
        self._tainted = True
        return self.clean(op, timeout_s, fork=self._fork, **arguments)

    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call a fork that is made for this."""
        self._fork += 1
        self.clean("prepare", self.kind.start_timeout_s, fork=self._fork)
        return self.clean(op, timeout_s, fork=self._fork, **arguments)

    def end_item(self) -> None:
        """Take another fork from now on; a call of the parent ends the one before."""
        if not self._tainted:
            return
        self._tainted = False
        if self.parent is not None and self.parent.alive:
            self._fork += 1
            with contextlib.suppress(ChildFault):
                self.clean("prepare", self.kind.start_timeout_s)

    def warm_up(self, context: RunContext) -> None:
        """Start the parent."""
        self.parent = self.parent or self.new_child(context)
        self.parent.start()

    def close(self) -> None:
        """End the parent, and with it its forks."""
        if self.parent is not None:
            self.parent.close()
            self.parent = None


class StartedProcesses(MeasuringProcesses):
    """Processes that are started one by one: one without candidates, which stays, and one for each
    item."""

    def __init__(self, kind: ChildKind, *, one_for_all: bool = False) -> None:
        """`one_for_all`: candidates cannot change the process that measures them; one is for all
        items, and answers `clean`. What starts another takes longer than all finalists, so that
        only finals have one."""
        super().__init__(kind)
        self._one_for_all = one_for_all
        self.kept: Child | None = None  #: process that stays between items
        self._of_item: Child | None = None
        self._tainted = False  #: true if a candidate has run in the item's process

    def _prepare(self) -> None:
        super()._prepare()
        self.shared("prepare", self.kind.start_timeout_s)

    def clean(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call the one that stays."""
        self.kept = self.kept or self.new_child(self.context)
        return self.call(self.kept, op, timeout_s, **arguments)

    def shared(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call the item's."""
        if self._one_for_all:
            return self.clean(op, timeout_s, **arguments)
        self._tainted = True
        self._of_item = self._of_item or self.new_child(self.context)
        return self.call(self._of_item, op, timeout_s, **arguments)

    def fresh(self, op: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Call one that is started for this."""
        if self._one_for_all and not self.finals:
            return self.clean(op, timeout_s, **arguments)
        child = self.new_child(self.context)
        try:
            self.call(child, "prepare", self.kind.start_timeout_s)
            return self.call(child, op, timeout_s, **arguments)
        finally:
            child.close()

    def end_item(self) -> None:
        """End the item's."""
        if self._tainted and self._of_item is not None:
            self._of_item.close()
        self._tainted = False

    def warm_up(self, context: RunContext) -> None:
        """Start both."""
        self.kept = self.kept or self.new_child(context)
        self.kept.start()
        if not self._one_for_all:
            self._of_item = self._of_item or self.new_child(context)
            self._of_item.start()

    def close(self) -> None:
        """End both."""
        for child in (self._of_item, self.kept):
            if child is not None:
                child.close()
        self._of_item = self.kept = None
