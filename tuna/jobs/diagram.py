"""The states of a job as a drawing, made from the table of transitions: `python -m
tuna.jobs.diagram` prints it."""

from __future__ import annotations

from tuna.jobs.states import TRANSITIONS
from tuna.vocabulary import State


def mermaid() -> str:
    """The transition table as a Mermaid state diagram, which code hosts draw."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.NEW.value}"]
    for state, following in TRANSITIONS.items():
        lines += [f"    {state.value} --> {other.value}" for other in State if other in following]
        if not following:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid())
