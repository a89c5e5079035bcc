"""Factors: lean descriptions of the per-example gradients that one use of a parameter gives.

Symbols, here and everywhere: B examples, T positions, K groups, ``left`` and ``right`` the two
operands whose outer products, summed over positions, are the gradient. A factor holds tensors that
the training step has anyway, and never a (B, d) gradient.

_factor     the protocol of all factors
_outer      linear layers and matrix products; _ragged the same for packed examples and experts
_patches    convolutions; _images the same for examples that differ in number or size of images
_rows       embeddings and integer indexing
_vector     biases, scales and everything else that broadcasts
_masked     weights whose elements were multiplied by constants
_tangent    weights that were normalised
_distances  points from which distances were taken
_segments   examples that differ in their number of rows
_path       which elements of a parameter a tensor derived from it has, and where
"""

from gradstats._factors._distances import Distances as Distances
from gradstats._factors._factor import Changed as Changed
from gradstats._factors._factor import Factor as Factor
from gradstats._factors._factor import Undivided as Undivided
from gradstats._factors._factor import cast as cast
from gradstats._factors._factor import compute_dtype as compute_dtype
from gradstats._factors._factor import elements_of as elements_of
from gradstats._factors._factor import map_tensors as map_tensors
from gradstats._factors._factor import moved as moved
from gradstats._factors._factor import tensors_of as tensors_of
from gradstats._factors._images import Images as Images
from gradstats._factors._masked import Masked as Masked
from gradstats._factors._outer import Outer as Outer
from gradstats._factors._patches import ConvolutionGeometry as ConvolutionGeometry
from gradstats._factors._patches import Patches as Patches
from gradstats._factors._patches import convolved as convolved
from gradstats._factors._patches import weight_gradient as weight_gradient
from gradstats._factors._path import Path as Path
from gradstats._factors._path import in_a_row as in_a_row
from gradstats._factors._ragged import Experts as Experts
from gradstats._factors._ragged import Ragged as Ragged
from gradstats._factors._rows import Lookup as Lookup
from gradstats._factors._rows import Rows as Rows
from gradstats._factors._rows import embedding_rows as embedding_rows
from gradstats._factors._rows import rows_looked_up as rows_looked_up
from gradstats._factors._segments import Segments as Segments
from gradstats._factors._segments import add_at as add_at
from gradstats._factors._segments import added as added
from gradstats._factors._segments import segment_sum as segment_sum
from gradstats._factors._tangent import Tangent as Tangent
from gradstats._factors._vector import Elementwise as Elementwise
from gradstats._factors._vector import Vector as Vector
