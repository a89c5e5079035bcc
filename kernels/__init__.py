"""Triton kernels for per-example gradient norms and inner products.

One file per family, each a vertical story: device code, then the launcher that checks its input,
chooses a tile and reduces the partial results. Importing this package imports neither torch nor
triton, so that the library works on machines without them.

Symbols: B examples, T positions, `a` layer inputs (B, T, d_in), `g` gradients of the loss with
respect to the layer's outputs (B, T, d_out). The per-example weight gradient is
G_i = sum_t g_it a_it^T, of shape (d_out, d_in), like the weight itself.

Linear layers
    rank_one          one position per example
    gram, direct      squared norms through products of positions, or tile by tile of the gradient
    weight_gradient   squared norms beside the summed weight gradient
    diagonal          inner products of the i-th gradients in two batches
    pairwise, pairwise_direct    inner products of all pairs, in both forms
    direction         inner products with one dense direction
    guard             rounding errors of products of positions, and recomputing doubtful results

Convolutions
    convolution       tile by tile of the gradient
    convolution_gram  through products of patches
    convolution_pairs, convolution_pair_gram    inner products of all pairs, in both forms
    convolution_weight_gradient, depthwise      one input channel in each group
    _patches, _arranged    how patches are addressed, and operands copied for that

Embeddings
    rows, rows_inner, rows_pairs, rows_direction    norms and inner products
    tied              beside the projection that shares the table
    _order, _runs     rows in the order of their ids

Scales, shifts, norm layers
    vector            biases and other sums of vectors
    scale, scale_gradients, scale_backward    scales and shifts
    layer_norm, group_norm    whole norm layers
    statistics, means    means and deviations of normalisation, and what its backward subtracts
    finish, _row_sums    sums of the partial results of a kernel's programs

Used by all of them
    operators, _calls    the operators of torch, and when they are bypassed
    _check            input validation, before any launch
    _config, _streaming, _table    tiles
    _launching, _results    launches, and what they return
    _tile             device helpers
    _precision        whether fp32 products may be rounded to TF32
    _reference, _reference_norms    the same in plain torch
"""
