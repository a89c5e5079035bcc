"""Where machine code touches local memory, which is where registers spill to.

The code is read with the disassemblers that triton ships and its branches are followed, so that a
word stored once per program is told from one that every step of a contraction reads again.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

LABEL = re.compile(r"(\S+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +(@\S+ +)?([A-Z][\w.]*) *([^;]*)")
TARGET = re.compile(r"`\((\S+)\)")
# bytes that one instruction moves, by a suffix of its name; 4 where it has none of them
WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
INDIRECT = ("BRX", "JMX", "CALL.ABS")
# a loop of fewer instructions does nothing but wait for a barrier
WORK = 8

Edges = list[set[int]]


class Local(NamedTuple):
    """Bytes per thread that the instructions of a kernel move to and from local memory.

    Attributes:
        once: by instructions outside all loops.
        outer: by instructions in a loop, but outside the loops that it contains.
        inner: by instructions in an innermost loop.
    """

    once: int = 0
    outer: int = 0
    inner: int = 0


def read(cubin: bytes) -> tuple[int, Local]:
    """Registers per thread of a compiled kernel, and its traffic with local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = output_of(triton.knobs.nvidia.cuobjdump.path, "-res-usage", path)
        registers = max(map(int, re.findall(r"\bREG:(\d+)", usage)))
        if not any(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage))):
            return registers, Local()
        return registers, local(output_of(triton.knobs.nvidia.nvdisasm.path, "-c", path))


def output_of(*command: object) -> str:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def local(code: str) -> Local:
    """Traffic with local memory of disassembled code.

    What stands in a function that is called counts as an innermost loop: who calls it is not read.

    Raises:
        AssertionError: if the code holds branches whose targets are not written in it.
    """
    names, after, before = graph(code)
    entered = reached(0, after, set(range(len(names)))) | {0}
    nest = loops(after, before, entered)
    moved = {"once": 0, "outer": 0, "inner": 0}
    for index, name in enumerate(names):
        parts = name.split(".")
        if parts[0] not in ("LDL", "STL"):
            continue
        width = next((WIDTHS[part] for part in parts if part in WIDTHS), 4)
        innermost = [contains for loop, contains in nest if index in loop][-1:]
        if index not in entered or innermost == [False]:
            moved["inner"] += width
        else:
            moved["outer" if innermost else "once"] += width
    return Local(**moved)


def graph(code: str) -> tuple[list[str], Edges, Edges]:
    """Instructions by name, and for each which may come after it and which before."""
    instructions, labels = [], {}
    for line in map(str.strip, code.splitlines()):
        if found := INSTRUCTION.match(line):
            instructions.append(found.groups())
        elif found := LABEL.fullmatch(line):
            labels[found[1]] = len(instructions)
    after: Edges = [set() for _ in instructions]
    for index, (guard, name, operands) in enumerate(instructions):
        assert not name.startswith(INDIRECT), f"{name} {operands}: a branch that cannot be followed"
        kind, target = name.partition(".")[0], TARGET.search(operands)
        # a call of a label is a branch; a call of a function comes back
        function = kind in ("CALL", "RET") and not (target and target[1].startswith(".L"))
        if target and not function:
            after[index].add(labels[target[1]])
        always = not guard and (
            kind in ("EXIT", "RET") or (kind == "BRA" and TARGET.fullmatch(operands.strip()))
        )
        if not always and index + 1 < len(instructions):
            after[index].add(index + 1)
    before: Edges = [set() for _ in instructions]
    before[0].add(-1)  # a launch enters here
    for index, following in enumerate(after):
        for other in following:
            before[other].add(index)
    return [name for _, name, _ in instructions], after, before


def reached(start: int, edges: Edges, within: set[int]) -> set[int]:
    """Instructions that paths of at least one edge lead to."""
    found: set[int] = set()
    pending = [start]
    while pending:
        new = (edges[pending.pop()] & within) - found
        found |= new
        pending += new
    return found


def loops(after: Edges, before: Edges, within: set[int]) -> list[tuple[set[int], bool]]:
    """Every loop, before those it contains, and whether it contains any that does work."""
    nest: list[tuple[set[int], bool]] = []
    seen: set[int] = set()
    for index in sorted(within):
        # every loop has a branch that leads back
        if index in seen or all(other > index for other in after[index] & within):
            continue
        loop = reached(index, after, within) & reached(index, before, within)
        seen |= loop
        if loop:
            # without the instructions at which it is entered only what it contains still turns
            inner = loops(after, before, {each for each in loop if before[each] <= loop})
            nest.append((loop, any(len(each) >= WORK for each, _ in inner)))
            nest += inner
    return nest
