"""What PyTorch does not say about its operators: lists of them, each with its reason.

``operator_facts.py`` makes the facts about an operator of these lists and of what PyTorch says.
"""

from collections.abc import Mapping

import torch

from treadle.compat.operators.rng_operators import DRAWS, FUNCTIONAL

aten = torch.ops.aten


def _named(names: str, namespace: str = "aten") -> frozenset[str]:
    """``"mm dot"`` -> ``{"aten::mm", "aten::dot"}``: operators by name, with all their overloads.
    One that this PyTorch does not have is of no consequence."""
    return frozenset(f"{namespace}::{name}" for name in names.split())


# Whose an operator is, by its namespace. Any other is a user's or a library's.

NATIVE = frozenset({"aten", "prims"})
OURS = frozenset({"rngprims", "treadle"})
COMMUNICATION = ("c10d", "symm_mem", "dtensor", "treadle_c10d")
"""How namespaces of operators that meet other processes begin, underscores aside."""
FUNCTIONAL_COMMUNICATION = ("c10d_functional", "treadle_c10d")
"""Of those the ones that do that and nothing else."""

# Draws.

DRAW_NOTHING: Mapping[str, str] = {
    "aten::_scaled_dot_product_efficient_attention_backward": "gets its forward's seed",
    "aten::_scaled_dot_product_cudnn_attention_backward": "gets its forward's seed",
    "aten::_cudnn_attention_backward": "gets its forward's seed",
    "aten::_fused_sdp_choice": "looks at layouts and switches alone",
    "aten::initial_seed": "reads a number of a generator",
}
"""Operators that PyTorch tags as random, or that take a generator, and that advance none."""

NO_DRAW_IF: Mapping[str, object] = {
    "dropout_p": 0,
    "dropout": 0,
    "train": False,
    "training": False,
}
"""Arguments and their values with which a random operator advances no generator: attention
without dropout, and dropout, ``rrelu`` and recurrent layers in evaluation."""

SHAPE_ALONE = _named("rand_like randn_like randint_like")
READS_PROBABILITIES = (aten.bernoulli_.Tensor, aten.bernoulli.Tensor)
OVERWRITES = frozenset({*DRAWS, *FUNCTIONAL, aten.bernoulli.p}) - {*READS_PROBABILITIES}
"""Draws for which an operand is a shape: what is overwritten, and what gives it to a new tensor."""

# Writes, memory, the outside.

WRITES_UNDECLARED: Mapping[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that an operator writes to without saying so: running statistics, in training."""

SHARES_UNDECLARED: Mapping[str, str] = {
    "aten::_unsafe_view": "a view in every way but autograd's",
    "aten::unsafe_split": "views in every way but autograd's",
    "aten::unsafe_split_with_sizes": "views in every way but autograd's",
}
"""Operators whose results are memory of an operand's though their schemas do not say so. PyTorch
tags others: ``maybe_aliasing_or_mutating``."""

READ_OUTSIDE: Mapping[str, str] = {
    "aten::_fused_sdp_choice": "switches of attention",
    "aten::_use_cudnn_ctc_loss": "switches of cuDNN",
    "aten::_cufft_get_plan_cache_size": "a cache of the process",
    "aten::_cufft_get_plan_cache_max_size": "a cache of the process",
    "aten::from_file": "a file",
    "aten::initial_seed": "a generator's seed",
}
"""Operators whose results depend on more than arguments and a generator, besides those that have no
arguments at all."""

UNDEFINED = _named("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
"""Operators that give memory as it is."""

CONDITIONS: Mapping[str, str] = {
    "treadle::expect": "looks at what capture took for granted; see util/expected.py"
}

REFUSES = _named("""
    _embedding_bag _embedding_bag_forward_only _linalg_check_errors bernoulli binomial bucketize
    cauchy exponential geometric histc log_normal multilabel_margin_loss_forward multinomial normal
    poisson put repeat_interleave segment_reduce unique_consecutive
""") | _named("ctc_loss", "treadle")
"""Operators whose kernels on CPUs raise for some values of their operands."""

DIVIDES = frozenset({"aten::floor_divide", "aten::remainder", "aten::fmod", "aten::div"})
"""Divisions of integers: the processor has no result for a divisor of zero."""

# Costs.

POINTWISE = _named("""
    __and__ __or__ _efficientzerotensor _to_copy _unsafe_index arange as_strided_copy
    as_strided_scatter cat clone constant_pad_nd contiguous copy diagonal_backward
    diagonal_scatter embedding empty empty_like empty_strided eye fill flip floor_divide full
    full_like gather hardshrink_backward hardswish hardtanh_backward index index_select
    leaky_relu leaky_relu_backward lift_fresh_copy linspace log_sigmoid_backward
    log_sigmoid_forward masked_fill mse_loss_backward new_empty new_empty_strided new_full
    new_ones new_zeros one_hot ones ones_like repeat reshape roll rsub scalar_tensor
    select_backward select_scatter slice_backward slice_scatter smooth_l1_loss_backward
    soft_margin_loss_backward softplus_backward softshrink_backward stack to tril
    tril_indices triu triu_indices upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d
    upsample_nearest3d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d where zero zeros zeros_like
""")
"""One pass over the result, like pointwise operators, though PyTorch does not tag them so."""

REDUCTIONS = _named("""
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _foreach_max _foreach_norm _fused_rms_norm
    _fused_rms_norm_backward _log_softmax _log_softmax_backward_data
    _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _safe_softmax _softmax _softmax_backward_data
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
    _upsample_nearest_exact3d_backward _weight_norm_interface_backward adaptive_max_pool2d
    adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward all amax amin any
    argmax argmin avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward linalg_vector_norm
    logsumexp max max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    max_pool3d_with_indices_backward mean min mse_loss native_batch_norm native_batch_norm_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
    nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward norm
    replication_pad1d_backward
    replication_pad2d_backward replication_pad3d_backward sum upsample_bicubic2d_backward
    upsample_bilinear2d_backward upsample_linear1d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d_backward var
    var_mean
""")
"""One pass over the rows of an operand, or over windows or samples of it; PyTorch tags some of them
since 2.12."""

PRODUCTS = _named("""
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _weight_int8pack_mm linear matmul
""")
"""Besides those that PyTorch has, or was given, a formula of floating-point operations for."""

PRODUCTS_OF_PARTS = _named("_cudnn_rnn _grouped_mm _scaled_grouped_mm mkldnn_rnn_layer") | _named(
    "cudnn_rnn grouped_mm", "treadle"
)
"""Products of parts of an operand, which other operands may say the ends of."""

SLOW_ELEMENTS = _named("""
    _log_softmax _softmax acosh asinh atanh cos cosh erf exp gelu log logsumexp pow sigmoid silu sin
    sinh softplus tanh
""")

CONVERSIONS = _named("_to_copy clone alias detach lift_fresh_copy") | _named(
    "convert_element_type", "prims"
)
"""Element by element, though PyTorch does not tag all of them so."""

ACCUMULATE = frozenset({
    "aten.addmm.out",
    "aten.addmm.dtype_out",
    "aten.baddbmm.out",
    "aten.scatter.src_out",
    "aten.scatter.value_out",
    "aten.scatter_add.out",
    "aten.scatter_reduce.two_out",
    "aten.index_add.out",
    "aten.index_copy.out",
    "treadle_c10d.all_reduce.out",
    "treadle_c10d.broadcast.out",
    "treadle_c10d.wait.out",
    "treadle.arrived.out",
})  # fmt: skip
"""Calls that go on from their first operand, and that may do so in its memory: they copy it into
their result first, unless that is the same memory."""

WAITS = frozenset({"treadle_c10d.wait.out", "treadle.arrived.out"})
"""Calls that end what others started: the stream waits there, and not before."""

STRIDED = frozenset({
    "aten.mm.out",
    "aten.addmm.out",
    "aten.bmm.out",
    "aten.baddbmm.out",
    "treadle.full_bmm.out",
    "aten.mv.out",
    "aten.addmv.out",
})  # fmt: skip
"""Calls that write rows or columns of their result at any distance from each other."""

NEVER_WAIT = _named("""
    mm addmm bmm baddbmm mv addmv dot addbmm _int_mm _weight_int8pack_mm convolution
    convolution_backward
    cudnn_convolution _cudnn_rnn _cudnn_rnn_backward _fft_r2c _fft_c2r _fft_c2c view_as_real
    view_as_complex _conj _neg_view alias as_strided detach diagonal expand lift_fresh permute
    select slice split split_with_sizes squeeze t transpose unbind unfold unsqueeze view
    zeros ones empty arange zeros_like ones_like full_like
    empty_like new_zeros new_ones new_full new_empty new_empty_strided empty_strided fill linspace
    eye slice_scatter select_scatter as_strided_scatter diagonal_scatter slice_backward
    select_backward repeat flip roll cat stack tril triu gather index_select constant_pad_nd im2col
    col2im reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    sum mean amax amin var_mean std var linalg_vector_norm
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
    _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
    cudnn_batch_norm cudnn_batch_norm_backward _batch_norm_with_update_functional
    batch_norm_backward native_batch_norm native_batch_norm_backward native_dropout bernoulli rand
    rand_like randn randn_like randint randint_like normal_functional uniform exponential sort topk
    cumsum cumprod logcumsumexp cummax cummin embedding_dense_backward scatter scatter_add
    scatter_reduce index_put index_add index_copy _embedding_bag _embedding_bag_forward_only
    _embedding_bag_backward _embedding_bag_dense_backward upsample_bicubic2d_backward
    grid_sampler_2d grid_sampler_2d_backward max_unpool2d max_pool2d_with_indices
    max_pool2d_with_indices_backward randperm multi_margin_loss multi_margin_loss_backward
    fake_quantize_per_tensor_affine_cachemask _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
    _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl clone copy _to_copy full add mul
""") | _named(
    """
    cudnn_rnn cudnn_rnn_backward bernoulli uniform exponential incoming_gradient to_host from_host
    arrived
    """,
    "treadle",
)
"""Operators that launch kernels and return, besides pointwise ones."""

COUNTS_MASKS = _named("index index_put index_add index_copy index_select")
"""Operators that count the elements of a mask that they are given, on the host."""

# Invented numbers.

MEASURABLE = _named("""
    _embedding_bag_dense_backward _trilinear _unsafe_index_put batch_norm_backward bucketize
    cudnn_batch_norm cudnn_batch_norm_backward _batch_norm_with_update_functional
    embedding_dense_backward grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    kthvalue linear_backward logcumsumexp max_pool2d_with_indices_backward median
    native_batch_norm_backward native_group_norm_backward native_layer_norm_backward searchsorted
    upsample_bicubic2d_backward _cdist_backward _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention_for_cpu_backward _native_batch_norm_legit_functional
    native_batch_norm _convolution_double_backward cudnn_convolution _fft_c2c cummax cummin mode
    nanmedian _unsafe_masked_index_put_accumulate
""")
"""Arithmetic for which zeros are numbers, and places, like any others; not among PyTorch's core
operators, all of which are."""

UNMEASURABLE: Mapping[str, str] = {
    "treadle::ctc_loss": "the lengths of targets sum to their number",
    "treadle::ctc_loss_backward": "the lengths of targets sum to their number",
    "treadle::while_loop": "values say how often it runs: for zeros that may be for ever",
    "treadle::while_loop_backward": "as its forward",
    "treadle::scan": "all of its slices would run, with PyTorch's kernels",
    "treadle::scan_backward": "as its forward",
    "treadle::incoming_gradient": "the caller brings it: nothing runs",
}
"""Core operators and operators of ours that no invented numbers may be given to."""

ZEROS = "zeros"

INVENTED: Mapping[str, str] = {
    **dict.fromkeys(
        _named("""
            _cholesky_solve_helper _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet
            _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve geqrf
            linalg_cholesky_ex linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex
            linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor_ex
            linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular
            lu_unpack ormqr triangular_solve
        """),
        "matrices",
    ),
    **dict.fromkeys(_named("binomial multinomial poisson"), "ones"),
    **dict.fromkeys(_named("_embedding_bag _embedding_bag_forward_only"), "bags"),
    **dict.fromkeys(_named("_embedding_bag_backward"), "bag sizes"),
}
"""Operators that zeros may not be given to, and what may be: ``matrices`` near multiples of the
identity, with numbers from 1 on for their pivots; ``ones``, which are probabilities and rates; and
``bags`` of equal numbers of indices, whose last offset may have to be the number of indices, or
``bag sizes`` of one: an empty bag has no gradient."""
