"""Models that gradstats is checked on, in one list for the test and for ``README.md``."""

from tests.zoo import awkward, hugging_face, spectral, torch_nn

CASES = [*hugging_face.CASES, *torch_nn.CASES, *awkward.CASES, *spectral.CASES]
