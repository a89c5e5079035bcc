"""``python -m tests.zoo [name ...]``: measure the models and print the table of ``README.md``."""

from __future__ import annotations

import sys
import warnings

from tqdm import tqdm

from tests.zoo import CASES
from tests.zoo.measure import measure, table


def main(names: list[str]) -> int:
    """Print the table of the named models, or of all; return 1 if any is not as expected."""
    known = [case.name for case in CASES]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no model is called {unknown[0]!r}; the models are {', '.join(known)}")
        return 2
    warnings.simplefilter("ignore")
    chosen = [case for case in CASES if case.name in names or not names]
    rows = [measure(case) for case in tqdm(chosen, desc="models", leave=False)]
    print(table(rows))
    wrong = [row.case.name for row in rows if not row.as_expected]
    if wrong:
        print(f"\nnot as expected: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
