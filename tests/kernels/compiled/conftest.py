"""This lane compiles kernels, so it needs a process in which triton does not interpret them."""

import os

# Said aloud, because triton 3.9 warns where it is not; the kernels' sums do not depend on it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["test_*.py"]
