"""Which operations are library calls by choice, and why. Any other call is a fallback.

An operation with a rule is a call only if its rule declines; it is listed here if that is intended
(``gather`` has a formula, the sum of several writes to one element has none).
"""

from collections.abc import Mapping

import torch

from treadle.compat.operators.operator_facts import facts_of
from treadle.compat.operators.schemas import OpOverload
from treadle.graph.custom_ops.full_products import FULL_BMM
from treadle.graph.custom_ops.table import CUSTOM_OPS
from treadle.lower.registry import aten_op

aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default: "aten.mm.out",
    aten.addmm.default: "aten.addmm.out",
    aten.bmm.default: "aten.bmm.out",
    aten.baddbmm.default: "aten.baddbmm.out",
    FULL_BMM.op: "treadle.full_bmm.out",
    aten.mv.default: "aten.mv.out",
    aten.addmv.default: "aten.addmv.out",
    aten.dot.default: "aten.dot.out",
    aten._int_mm.default: "aten._int_mm.out",
    aten.mm.dtype: "aten.mm.dtype_out",
    aten.addmm.dtype: "aten.addmm.dtype_out",
}
"""Products, which write into a buffer of ours in any layout."""

OUT_VARIANTS = PRODUCTS | {
    aten._scaled_mm.default: "aten._scaled_mm.out",
    aten.cumsum.default: "aten.cumsum.out",
    aten.cumprod.default: "aten.cumprod.out",
    aten.logcumsumexp.default: "aten.logcumsumexp.out",
    aten.scatter.src: "aten.scatter.src_out",
    aten.scatter.value: "aten.scatter.value_out",
    aten.scatter_add.default: "aten.scatter_add.out",
    aten.scatter_reduce.two: "aten.scatter_reduce.two_out",
    aten.index_add.default: "aten.index_add.out",
    aten.index_copy.default: "aten.index_copy.out",
    aten.index_reduce.default: "aten.index_reduce.out",
    aten.cat.default: "aten.cat.out",
    aten.stack.default: "aten.stack.out",
    aten.searchsorted.Tensor: "aten.searchsorted.Tensor_out",
    aten.bucketize.Tensor: "aten.bucketize.Tensor_out",
}
"""Operations that write into a dense buffer of ours."""


_WHY: Mapping[str, str] = {
    "a product: the vendor's library": """
        mm addmm bmm baddbmm mv addmv dot addbmm mm.dtype addmm.dtype _int_mm _weight_int8pack_mm
        _scaled_mm _trilinear linear_backward _cdist_forward _cdist_backward
    """,
    "a convolution: the vendor's library": """
        convolution convolution_backward _convolution_double_backward cudnn_convolution
        mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward
    """,
    "attention: PyTorch's fused kernel": """
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
        _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_fused_attention_overrideable_backward
        _flash_attention_forward _flash_attention_backward
        _efficient_attention_forward _efficient_attention_backward
    """,
    "a norm for which the graph names the vendor's kernel": """
        cudnn_batch_norm cudnn_batch_norm_backward _batch_norm_with_update_functional
        batch_norm_backward
    """,
    "an order: the library sorts rows": """
        sort sort.stable topk kthvalue median median.dim nanmedian nanmedian.dim mode
        searchsorted.Tensor searchsorted.Scalar bucketize.Tensor bucketize.Scalar
    """,
    "a scan: each element needs the one before it": """
        cumsum cumprod logcumsumexp cummax cummin
    """,
    "indices from data: several writes may hit the same element": """
        embedding_dense_backward scatter.src scatter.value scatter_add scatter_reduce.two
        scatter.reduce scatter.value_reduce index_put _unsafe_index_put index_add index_copy
        index_reduce put masked_scatter masked_scatter_backward max_unpool2d max_unpool3d
        _embedding_bag _embedding_bag_forward_only _embedding_bag_backward
        _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward histc
        repeat_interleave.Tensor grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
        grid_sampler_3d_backward
        upsample_bicubic2d_backward _unsafe_masked_index_put_accumulate
    """,
    (
        "a concatenation of many tensors: a generated kernel would search the right one for each "
        "element"
    ): """
        cat stack
    """,
    "a recursion over time": """
        _ctc_loss _ctc_loss_backward _ctc_loss.Tensor _ctc_loss_backward.Tensor
    """,
    "linear algebra": """
        linalg_lu_factor_ex _linalg_solve_ex linalg_solve_triangular linalg_cholesky_ex
        linalg_inv_ex linalg_qr _linalg_eigh _linalg_svd _linalg_det linalg_lu_solve
        linalg_householder_product triangular_solve cholesky_inverse linalg_lu linalg_eig
        linalg_ldl_factor_ex linalg_ldl_solve _linalg_slogdet linalg_matrix_exp
    """,
    "a Fourier transform": """
        _fft_c2c _fft_c2r _fft_r2c
    """,
}


def _operations(names: str) -> list[OpOverload]:
    """``"mm bernoulli.p"`` -> the operators; those this PyTorch does not have are left out."""
    found: list[OpOverload] = []
    for name in names.split():
        try:
            found.append(aten_op(name if "." in name else f"{name}.default"))
        except AttributeError:  # of a newer or an older PyTorch
            continue
    return found


WHY: Mapping[OpOverload, str] = {
    op: why for why, names in _WHY.items() for op in _operations(names)
} | {custom_op.op: custom_op.library for custom_op in CUSTOM_OPS if custom_op.library}
"""Why an operation that is a library call by choice is one."""


def is_chosen(op: OpOverload) -> bool:
    """Whether the library kernel is the right answer: what draws has eager's stream there."""
    return op in WHY or facts_of(op).draws
