"""The operators on CPUs: plain torch, one example at a time.

Sums are fp64, and so is what is one number for each example; other results are fp32, or fp64 for
fp64 operands. At most two examples' weight gradients exist at once. Nothing here needs triton.
"""

from gradstats.kernels._reference_convolution import convolution_direction as convolution_direction
from gradstats.kernels._reference_convolution import convolution_gradients as convolution_gradients
from gradstats.kernels._reference_convolution import (
    convolution_gram_sqnorm as convolution_gram_sqnorm,
)
from gradstats.kernels._reference_convolution import convolution_inner as convolution_inner
from gradstats.kernels._reference_convolution import (
    convolution_inner_gram as convolution_inner_gram,
)
from gradstats.kernels._reference_convolution import convolution_sqnorm as convolution_sqnorm
from gradstats.kernels._reference_convolution import (
    convolution_weight_gradient_sqnorm as convolution_weight_gradient_sqnorm,
)
from gradstats.kernels._reference_convolution import pairwise_convolution as pairwise_convolution
from gradstats.kernels._reference_convolution import (
    pairwise_convolution_gram as pairwise_convolution_gram,
)
from gradstats.kernels._reference_linear import collect as collect
from gradstats.kernels._reference_linear import diagonal_gram as diagonal_gram
from gradstats.kernels._reference_linear import direct_inner as direct_inner
from gradstats.kernels._reference_linear import direct_sqnorm as direct_sqnorm
from gradstats.kernels._reference_linear import direction_inner as direction_inner
from gradstats.kernels._reference_linear import gradients as gradients
from gradstats.kernels._reference_linear import gram_sqnorm as gram_sqnorm
from gradstats.kernels._reference_linear import pairwise_direct as pairwise_direct
from gradstats.kernels._reference_linear import pairwise_gram as pairwise_gram
from gradstats.kernels._reference_linear import rank_one_sqnorm as rank_one_sqnorm
from gradstats.kernels._reference_linear import result_dtype as result_dtype
from gradstats.kernels._reference_linear import rows_of as rows_of
from gradstats.kernels._reference_linear import vector_sqnorm as vector_sqnorm
from gradstats.kernels._reference_linear import weight_gradient_sqnorm as weight_gradient_sqnorm
from gradstats.kernels._reference_norms import group_norm_backward as group_norm_backward
from gradstats.kernels._reference_norms import group_norm_sqnorm as group_norm_sqnorm
from gradstats.kernels._reference_norms import group_norm_sum as group_norm_sum
from gradstats.kernels._reference_norms import layer_norm_backward as layer_norm_backward
from gradstats.kernels._reference_norms import layer_norm_sqnorm as layer_norm_sqnorm
from gradstats.kernels._reference_norms import layer_norm_sum as layer_norm_sum
from gradstats.kernels._reference_norms import scale_backward as scale_backward
from gradstats.kernels._reference_norms import scale_direction as scale_direction
from gradstats.kernels._reference_norms import scale_sum as scale_sum
from gradstats.kernels._reference_norms import vector_sum as vector_sum
from gradstats.kernels._reference_rows import pairwise_rows as pairwise_rows
from gradstats.kernels._reference_rows import rows_direction as rows_direction
from gradstats.kernels._reference_rows import rows_inner as rows_inner
from gradstats.kernels._reference_rows import rows_sqnorm as rows_sqnorm
from gradstats.kernels._reference_rows import tables as tables
from gradstats.kernels._reference_rows import tied_inner as tied_inner
