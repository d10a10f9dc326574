"""What went wrong in other libraries does not go wrong here: each fault has a test.

The faults were found by running jmp (J), flax `DynamicScale` (F), MPX (M), optax (O),
Keras (K), the spike skippers of MaxText and Levanter (P), several of them on sharded
data (S), XLA itself (X), the exactness of scaling (E), and from what users report (R).
A test of one of them names its ids in its docstring, before the first colon.
"""

import re
from pathlib import Path

IDS = """
J1 J1b J2 J3 J4 J4b J5 J6 J7 J7b J8 J8b J8c J8d J9 J10 J11 J11b J12 J13 J14 J15
F1 F2 F3 F4 F5 F6 F7 F8 F9 F10 F11 F12 F13 F14  M1 M2 M3 M4 M5 M6 M7
O1 O2 O3 O4 O5 O6 O7 O8 O9 O10  S1 S2 S3 S4 S4b S4d S5 S6 S7 S8
K1 K2 K3 K4  P1 P2 P3 P4a  X1 X2 X3  E1 E2 E3 E4 E5 E6
R1 R2 R3 R4 R5 R6 R7 R8 R9 R10 R11 R12 R13 R14 R15 R16
"""

NOT_APPLICABLE = {
    "J11": "a scale that is no power of two rounds; `dynamic` says so",
    "M6": "a mistake in a test of MPX",
    "O3": "there is no user's condition here",
    "E3": "two programs may be fused differently; not promised",
    "E4": "a control; not promised",
    "E5": "a control; not promised",
    "E6": "as J11",
    "R11": "Orbax's own: restore with a target",
}


def test_every_fault_is_tested_or_cannot_apply():
    cited = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for docstring in re.findall(r'^    """([^:"\n]+): ', path.read_text(), re.M):
            cited.update(re.findall(r"\b[A-Z]\d+[a-d]?\b", docstring))
    assert cited == set(IDS.split()) - set(NOT_APPLICABLE)
