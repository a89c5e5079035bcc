"""What is read off machine code: the places of local memory accesses among loops."""

import pytest

from tests.kernels.compiled.sass import Local, local

WORK = "FADD R0, R0, R1\n" * 8


def code(text: str) -> str:
    """Lines as the disassembler writes them: labels at the margin, instructions with addresses."""
    lines, address = ["kernel:"], 0
    for line in text.strip().splitlines():
        if line.endswith(":"):
            lines.append(line)
        else:
            lines.append(f"        /*{address:04x}*/{line:>40} ;")
            address += 16
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"STL [R1], R2\n{WORK}LDL.LU.64 R2, [R1]\nEXIT", Local(once=12)),
        (f".L_x_0:\n{WORK}LDL R2, [R1]\n@P0 BRA `(.L_x_0)\nEXIT", Local(inner=4)),
        (f".L_x_0:\n{WORK}STL.128 [R1], R4\nBRA.U !UP0, `(.L_x_0)\nEXIT", Local(inner=16)),
        # before a loop, in it but outside the one it contains, in that one, after both
        (
            "STL [R1], R2\n"
            f".L_x_0:\nLDL.U8 R2, [R1]\n.L_x_1:\n{WORK}STL.U16 [R1], R2\n@P0 BRA `(.L_x_1)\n"
            "@P1 BRA `(.L_x_0)\nLDL R2, [R1]\nEXIT",
            Local(once=8, outer=1, inner=2),
        ),
        # a loop that waits for a barrier stands behind the code, and is none that does work
        (
            f"MOV R1, R1\n.L_x_0:\n{WORK}SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3\n"
            "@!P0 BRA `(.L_x_2)\n.L_x_1:\nLDL R2, [R1]\n@P1 BRA `(.L_x_0)\nSTL [R1], R2\nEXIT\n"
            ".L_x_2:\nSYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3\n@!P0 BRA `(.L_x_2)\n"
            "BRA `(.L_x_1)",
            Local(once=4, inner=4),
        ),
        # code that a loop branches to and that branches back belongs to it
        (
            f"MOV R1, R1\n.L_x_0:\n{WORK}@P0 BRA `(.L_x_2)\n.L_x_1:\n@P1 BRA `(.L_x_0)\nEXIT\n"
            ".L_x_2:\nLDL R2, [R1]\nBRA `(.L_x_1)",
            Local(inner=4),
        ),
        # a branch back to code that does not lead here again is no loop
        (
            f"@P0 BRA `(.L_x_1)\n.L_x_0:\n{WORK}LDL R2, [R1]\nEXIT\n.L_x_1:\nBRA `(.L_x_0)",
            Local(once=4),
        ),
        # a label is called to leave a loop; a function returns, to where is not read
        (
            f"MOV R1, R1\n.L_x_0:\n{WORK}@P0 CALL.REL.NOINC `(.L_x_1)\nBRA `(.L_x_0)\n"
            ".L_x_1:\nLDL R2, [R1]\nEXIT",
            Local(once=4),
        ),
        (
            "CALL.REL.NOINC `($slow)\nSTL [R1], R2\nEXIT\n$slow:\nLDL R2, [R1]\n"
            "RET.REL.NODEC R2 `(kernel)",
            Local(once=4, inner=4),
        ),
        # nothing leads past an end, and a guarded one may be passed
        ("@P0 EXIT\nSTL [R1], R2\nEXIT\n.L_x_0:\nBRA `(.L_x_0)", Local(once=4)),
    ],
)
def test_places_of_accesses(text, expected):
    assert local(code(text)) == expected


def test_a_branch_that_cannot_be_followed():
    with pytest.raises(AssertionError, match="BRX R2"):
        local(code("BRX R2 -0x10\nEXIT"))
