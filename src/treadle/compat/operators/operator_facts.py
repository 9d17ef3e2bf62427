"""The one table of facts about operators: what a call does besides its results, and what it costs.

::

    facts_of(aten.bernoulli.p)      draws; a call of the library; draws by no values
    facts_of(aten.relu_.default)    writes; pointwise
    facts_of(mine.scale.default)    unknown: a user's, it happens exactly once and in order

Facts come from what PyTorch says of the operator itself: tags, arguments, results, namespace. So an
unknown operator has its facts as well. Facts that PyTorch does not provide are in the lists of this
file, each with its reason, and nowhere else. ``tests/compat`` compares derived and listed facts for
every operator of the installed PyTorch.
"""

import enum
import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import flop_registry

from treadle.compat.operators.rng_operators import DRAWS, FUNCTIONAL
from treadle.compat.operators.schemas import OpOverload, schema_of, written_arguments

aten = torch.ops.aten


class Effect(enum.Flag):
    """What a call does besides its results."""

    NONE = 0
    DRAWS = enum.auto()  # advances a random generator
    WRITES = enum.auto()  # to an argument
    RAISES = enum.auto()  # gives nothing: called to check values, and may raise; or to print
    CONDITION = enum.auto()  # nothing may be written to an input before it is known to hold
    COMMUNICATES = enum.auto()  # meets other processes
    READS_OUTSIDE = enum.auto()  # the result depends on more than the arguments: switches, files
    UNKNOWN = enum.auto()  # a user's, with anything inside


IN_ORDER = Effect.DRAWS | Effect.UNKNOWN
"""Calls with one of these keep their order among each other."""
MATTERS = (
    Effect.WRITES | Effect.RAISES | Effect.CONDITION | Effect.COMMUNICATES | Effect.UNKNOWN
)  # fmt: skip
"""A call with one of these happens, whether anybody reads its results or not. A draw that nobody
reads may be left out where the numbers after it need not be eager's."""


class CostClass(enum.StrEnum):
    """What an operator costs in comparison with its bytes. Views are free: whether a result is one
    is a matter of its memory, and not of the operator (``reshape``)."""

    POINTWISE = "pointwise"
    REDUCTION = "reduction"  # with what surrounds it in a row: softmax, layer norm
    PRODUCT = "product"  # worth a kernel of its own: mm, bmm, convolution, attention
    LIBRARY = "library"  # a kernel of PyTorch's that is none of these

    @property
    def is_expensive(self) -> bool:
        """Whether a call is a kernel of PyTorch's by itself, instead of a part of a fused one."""
        return self in (CostClass.PRODUCT, CostClass.LIBRARY)


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What is known about an operator.

    ``effects``: those that a call may have; ``call_effects`` says which this one has.
    ``refuses``: a CPU kernel raises for some values of the operands.
    ``draw_reads_values``: the elements of operands decide what it draws, besides the generator.
    ``allocates``: no result is memory of an operand's.
    ``native``: PyTorch's own. ``slow_elements``: a transcendental function of each element.
    ``elementwise``: an element of the result is made of those of the operands at its place.
    ``waits``: on a GPU it may wait for numbers of the device's, or work on the host.
    ``counts_masks``: it waits if one of its arguments is a mask.
    ``measurable``: a call that ``follows_seed`` does not say otherwise of runs on invented numbers
    (zeros) without harm: the operator checks no data, and is PyTorch's own or ours.
    ``invented``: what other numbers its calls may run on (``_INVENTED``); empty if there are none.
    """

    effects: Effect
    refuses: bool
    draw_reads_values: bool
    allocates: bool
    native: bool
    cost: CostClass
    slow_elements: bool
    elementwise: bool
    waits: bool
    counts_masks: bool
    measurable: bool
    invented: str

    @property
    def draws(self) -> bool:
        """Whether a call may advance a random generator."""
        return Effect.DRAWS in self.effects

    @property
    def writes(self) -> bool:
        """Whether a call may write to an argument."""
        return Effect.WRITES in self.effects

    @property
    def communicates(self) -> bool:
        """Whether it exchanges data with other processes."""
        return Effect.COMMUNICATES in self.effects

    @property
    def is_unknown(self) -> bool:
        """Whether it is a user's, with anything inside."""
        return Effect.UNKNOWN in self.effects

    @property
    def may_recompute(self) -> bool:
        """Whether a second call gives the same and does nothing else."""
        return not self.effects


def _named(names: str, namespace: str = "aten") -> frozenset[str]:
    """``"mm dot"`` -> ``{"aten::mm", "aten::dot"}``: operators by name, with all their overloads.
    One that this PyTorch does not have is of no consequence."""
    return frozenset(f"{namespace}::{name}" for name in names.split())


# Whose an operator is, by its namespace. Any other is a user's or a library's.

_NATIVE = frozenset({"aten", "prims"})
_OURS = frozenset({"rngprims", "treadle"})
_COMMUNICATION = ("c10d", "symm_mem", "dtensor", "treadle_c10d")
"""How namespaces of operators that meet other processes begin, underscores aside."""
_FUNCTIONAL_COMMUNICATION = ("c10d_functional", "treadle_c10d")
"""Of those the ones that do that and nothing else."""

# Draws.

_DRAW_NOTHING: Mapping[str, str] = {
    "aten::_scaled_dot_product_efficient_attention_backward": "gets its forward's seed",
    "aten::_scaled_dot_product_cudnn_attention_backward": "gets its forward's seed",
    "aten::_cudnn_attention_backward": "gets its forward's seed",
    "aten::_fused_sdp_choice": "looks at layouts and switches alone",
    "aten::initial_seed": "reads a number of a generator",
}
"""Operators that PyTorch tags as random, or that take a generator, and that advance none."""

_NO_DRAW_IF: Mapping[str, object] = {
    "dropout_p": 0,
    "dropout": 0,
    "train": False,
    "training": False,
}
"""Arguments and their values with which a random operator advances no generator: attention
without dropout, and dropout, ``rrelu`` and recurrent layers in evaluation."""

_SHAPE_ALONE = _named("rand_like randn_like randint_like")
_READS_PROBABILITIES = (aten.bernoulli_.Tensor, aten.bernoulli.Tensor)
_OVERWRITES = frozenset({*DRAWS, *FUNCTIONAL, aten.bernoulli.p}) - {*_READS_PROBABILITIES}
"""Draws for which an operand is a shape: what is overwritten, and what gives it to a new tensor."""

# Writes, memory, the outside.

_WRITES_UNDECLARED: Mapping[str, tuple[str, ...]] = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that an operator writes to without saying so: running statistics, in training."""

_SHARES_UNDECLARED: Mapping[str, str] = {
    "aten::_unsafe_view": "a view in every way but autograd's",
    "aten::unsafe_split": "views in every way but autograd's",
    "aten::unsafe_split_with_sizes": "views in every way but autograd's",
}
"""Operators whose results are memory of an operand's though their schemas do not say so. PyTorch
tags others: ``maybe_aliasing_or_mutating``."""

_READ_OUTSIDE: Mapping[str, str] = {
    "aten::_fused_sdp_choice": "switches of attention",
    "aten::_use_cudnn_ctc_loss": "switches of cuDNN",
    "aten::_cufft_get_plan_cache_size": "a cache of the process",
    "aten::_cufft_get_plan_cache_max_size": "a cache of the process",
    "aten::from_file": "a file",
    "aten::initial_seed": "a generator's seed",
}
"""Operators whose results depend on more than arguments and a generator, besides those that have no
arguments at all."""

_UNDEFINED = _named("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
"""Operators that give memory as it is."""

_CONDITIONS: Mapping[str, str] = {
    "treadle::expect": "looks at what capture took for granted; see util/expected.py"
}

_REFUSES = _named("""
    _embedding_bag _embedding_bag_forward_only _linalg_check_errors bernoulli binomial bucketize
    cauchy exponential geometric histc log_normal multilabel_margin_loss_forward multinomial normal
    poisson put repeat_interleave segment_reduce unique_consecutive
""") | _named("ctc_loss", "treadle")
"""Operators whose kernels on CPUs raise for some values of their operands."""

# Costs.

_POINTWISE = _named("""
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

_REDUCTIONS = _named("""
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
    native_group_norm native_layer_norm native_layer_norm_backward nll_loss2d_backward
    nll_loss2d_forward nll_loss_backward nll_loss_forward norm replication_pad1d_backward
    replication_pad2d_backward replication_pad3d_backward sum upsample_bicubic2d_backward
    upsample_bilinear2d_backward upsample_linear1d_backward upsample_nearest1d_backward
    upsample_nearest2d_backward upsample_nearest3d_backward upsample_trilinear3d_backward var
    var_mean
""")
"""One pass over the rows of an operand, or over windows or samples of it; PyTorch tags some of them
since 2.12."""

_PRODUCTS = _named("""
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
    _weight_int8pack_mm linear matmul
""")
"""Besides those that PyTorch has, or was given, a formula of floating-point operations for."""

_PRODUCTS_OF_PARTS = _named("_cudnn_rnn _grouped_mm _scaled_grouped_mm mkldnn_rnn_layer") | _named(
    "cudnn_rnn grouped_mm", "treadle"
)
"""Products of parts of an operand, which other operands may say the ends of."""

_SLOW_ELEMENTS = _named("""
    _log_softmax _softmax acosh asinh atanh cos cosh erf exp gelu log logsumexp pow sigmoid silu sin
    sinh softplus tanh
""")

_CONVERSIONS = _named("_to_copy clone alias detach lift_fresh_copy") | _named(
    "convert_element_type", "prims"
)
"""Element by element, though PyTorch does not tag all of them so."""

_ACCUMULATE = frozenset({
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
})  # fmt: skip
"""Calls that go on from their first operand, and that may do so in its memory: they copy it into
their result first, unless that is the same memory."""

_STRIDED = frozenset({
    "aten.mm.out",
    "aten.addmm.out",
    "aten.bmm.out",
    "aten.baddbmm.out",
    "aten.mv.out",
    "aten.addmv.out",
})  # fmt: skip
"""Calls that write rows or columns of their result at any distance from each other."""

_NEVER_WAIT = _named("""
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
    "cudnn_rnn cudnn_rnn_backward bernoulli uniform exponential incoming_gradient", "treadle"
)
"""Operators that launch kernels and return, besides pointwise ones."""

_COUNTS_MASKS = _named("index index_put index_add index_copy index_select")
"""Operators that count the elements of a mask that they are given, on the host."""

# Invented numbers.

_MEASURABLE = _named("""
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

_UNMEASURABLE: Mapping[str, str] = {
    "aten::_embedding_bag": "the last offset may have to be the number of indices",
    "treadle::ctc_loss": "the lengths of targets sum to their number",
    "treadle::ctc_loss_backward": "the lengths of targets sum to their number",
    "treadle::while_loop": "values say how often it runs: for zeros that may be for ever",
    "treadle::while_loop_backward": "as its forward",
    "treadle::incoming_gradient": "the caller brings it: nothing runs",
}
"""Core operators and operators of ours that zeros may not be given to."""

_INVENTED: Mapping[str, str] = {
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
``bags`` of equal numbers of indices, or ``bag sizes`` of one: an empty bag has no gradient."""

_DATA_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@functools.cache
def facts_of(op: OpOverload) -> OperatorFacts:
    """The facts about one operator."""
    schema = schema_of(op)
    effects = _effects_of(op)
    return OperatorFacts(
        effects=effects,
        refuses=_may_refuse(op),
        draw_reads_values=Effect.DRAWS in effects and _draw_reads_values(op),
        allocates=_allocates(op),
        native=op.namespace in _NATIVE,
        cost=_cost_of(op),
        slow_elements=schema.name in _SLOW_ELEMENTS,
        elementwise=torch.Tag.pointwise in op.tags or schema.name in _CONVERSIONS,
        waits=not _never_waits(op),
        counts_masks=schema.name in _COUNTS_MASKS,
        measurable=bool(schema.returns)
        and (Effect.DRAWS not in effects or _draws_sometimes(op))
        and schema.name not in _UNMEASURABLE
        and (op.namespace == "treadle" or _is_arithmetic(op)),
        invented=_INVENTED.get(schema.name, ""),
    )


_NOBODY_KNOWS = OperatorFacts(
    effects=Effect.WRITES | Effect.UNKNOWN,
    refuses=False,
    draw_reads_values=True,
    allocates=False,
    native=False,
    cost=CostClass.LIBRARY,
    slow_elements=False,
    elementwise=False,
    waits=True,
    counts_masks=True,
    measurable=False,
    invented="",
)


def facts_by_name(name: str) -> OperatorFacts:
    """The facts about ``"aten.mm.out"``, as artifacts name an operator. Of a name that is none of
    this PyTorch's, the safe ones."""
    try:
        found = operator.attrgetter(name)(torch.ops)
    except AttributeError:
        return _NOBODY_KNOWS
    return facts_of(found) if isinstance(found, OpOverload) else _NOBODY_KNOWS


def call_effects(op: OpOverload, arguments: Mapping[str, object]) -> Effect:
    """What a call with these ``arguments`` (by name, defaults included) does."""
    effects = facts_of(op).effects
    if Effect.DRAWS in effects and not _draws_with(arguments):
        effects &= ~Effect.DRAWS
    if Effect.WRITES in effects and not written_names(op, arguments):
        effects &= ~Effect.WRITES
    return effects


def _draws_with(arguments: Mapping[str, object]) -> bool:
    return not any(
        name in arguments and arguments[name] is not None and arguments[name] == value
        for name, value in _NO_DRAW_IF.items()
    )


def follows_seed(op: OpOverload, arguments: Mapping[str, object]) -> bool:
    """Whether a call makes random numbers, its own or once more those of a seed that it is given:
    dropout within attention, forward and backward."""
    return Effect.DRAWS in call_effects(op, arguments) or bool(arguments.get("dropout_p"))


def is_profiler_mark(op: OpOverload) -> bool:
    """Whether it tells PyTorch's profiler where a range begins or ends, and does nothing else."""
    return op.namespace == "profiler"


def gives_undefined(op: OpOverload) -> bool:
    """Whether its result is whatever memory held: a shape is all that may be asked of it."""
    return schema_of(op).name in _UNDEFINED


def sizes_from_values(op: OpOverload) -> bool:
    """Whether values decide the sizes of what it gives, or a number of Python's."""
    return bool(_DATA_TAGS & set(op.tags))


def raises_for_zeros(op: OpOverload) -> bool:
    """Whether it raises for a divisor of zero if its operands are integers."""
    return schema_of(op).name.removesuffix("_") in _DIVIDES


_DIVIDES = frozenset({"aten::floor_divide", "aten::remainder", "aten::fmod", "aten::div"})
"""Divisions of integers: the processor has no result for a divisor of zero."""


def written_names(op: OpOverload, arguments: Mapping[str, object]) -> tuple[str, ...]:
    """The arguments that a call with these writes to.

    ``add_(self, other)``  ->  ``("self",)``
    """
    names = _WRITES_UNDECLARED.get(schema_of(op).name)
    if names is None:
        return tuple(name for _, name in written_arguments(op))
    return tuple(each for each in names if arguments["training"] and arguments[each] is not None)


def works_on_each(op: OpOverload) -> bool:
    """Whether result ``i`` of an operator of lists is made of the elements ``i`` of its lists, and
    of what else it is given."""
    name, namespace = schema_of(op).name, op.namespace.strip("_")
    if namespace.startswith(_FUNCTIONAL_COMMUNICATION):
        return name.endswith("coalesced")
    return name.startswith("aten::_foreach_")


def elementwise_on_each(op: OpOverload) -> bool:
    """Whether ``op`` does something to each tensor of a list that works on each of its elements:
    ``_foreach_mul``, which is ``mul`` of each, and not ``_foreach_norm`` or ``_foreach_mm``."""
    if not works_on_each(op) or op.namespace != "aten":
        return False
    single = schema_of(op).name.removeprefix("aten::_foreach_")
    packet = getattr(aten, single, None)  # the way to an operator whose name is data
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return single == "copy" or any(torch.Tag.pointwise in each.tags for each in overloads)


def may_accumulate(name: str) -> bool:
    """Whether a call of an operator, named as by artifacts, may write its result where its first
    argument is."""
    return name in _ACCUMULATE


def writes_strided(name: str) -> bool:
    """Whether a call of an operator, named as by artifacts, writes a matrix into a part of a larger
    one as fast as into one of its own: any distance between its rows, or its columns."""
    return name in _STRIDED


def may_wait(name: str, *, masks: bool) -> bool:
    """Whether a call of an operator, named as by artifacts, may wait for the host. ``masks``: some
    of its arguments are."""
    facts = facts_by_name(name)
    return facts.waits or (masks and facts.counts_masks)


def _effects_of(op: OpOverload) -> Effect:
    """All that a call may do."""
    schema, namespace = schema_of(op), op.namespace
    known = (
        namespace in _NATIVE | _OURS
        or namespace.strip("_").startswith(_FUNCTIONAL_COMMUNICATION)
        or torch.Tag.pointwise in op.tags
    )
    found = {
        Effect.DRAWS: _may_draw(op),
        Effect.WRITES: schema.is_mutable or schema.name in _WRITES_UNDECLARED,
        Effect.RAISES: not schema.returns,
        Effect.CONDITION: schema.name in _CONDITIONS,
        Effect.COMMUNICATES: _communicates(op),
        Effect.READS_OUTSIDE: schema.name in _READ_OUTSIDE or not schema.arguments,
        Effect.UNKNOWN: not known,
    }
    return functools.reduce(operator.or_, (each for each in found if found[each]), Effect.NONE)


def _may_draw(op: OpOverload) -> bool:
    if schema_of(op).name in _DRAW_NOTHING:
        return False
    return torch.Tag.nondeterministic_seeded in op.tags or _takes(op, "Generator")


def _may_refuse(op: OpOverload) -> bool:
    draws = _may_draw(op)
    return schema_of(op).name in _REFUSES and (not draws or _draw_reads_values(op))


def _takes(op: OpOverload, kind: str) -> bool:
    """Whether the type of an argument names ``kind``."""
    return any(kind in str(each.type) for each in schema_of(op).arguments)


def _draws_sometimes(op: OpOverload) -> bool:
    """Whether an argument decides if a call draws."""
    return any(each.name in _NO_DRAW_IF for each in schema_of(op).arguments)


def _draw_reads_values(op: OpOverload) -> bool:
    shape_alone = op in _OVERWRITES or schema_of(op).name in _SHAPE_ALONE
    return _takes(op, "Tensor") and not shape_alone


def _communicates(op: OpOverload) -> bool:
    """Operators of ``torch.distributed`` live in namespaces of their own, or take a process
    group."""
    return _takes(op, "c10d") or op.namespace.strip("_").startswith(_COMMUNICATION)


def _allocates(op: OpOverload) -> bool:
    schema = schema_of(op)
    if schema.name in _SHARES_UNDECLARED or torch.Tag.maybe_aliasing_or_mutating in op.tags:
        return False
    return bool(schema.returns) and all(each.alias_info is None for each in schema.returns)


def _cost_of(op: OpOverload) -> CostClass:
    name = schema_of(op).name
    if op.overloadpacket in flop_registry or name in _PRODUCTS | _PRODUCTS_OF_PARTS:
        return CostClass.PRODUCT
    if torch.Tag.reduction in op.tags or name in _REDUCTIONS:
        return CostClass.REDUCTION
    listwise = name.startswith("aten::_foreach_")
    if torch.Tag.pointwise in op.tags or name in _POINTWISE or listwise:
        return CostClass.POINTWISE
    return CostClass.LIBRARY


def _never_waits(op: OpOverload) -> bool:
    pointwise = op.namespace == "aten" and torch.Tag.pointwise in op.tags
    return schema_of(op).name in _NEVER_WAIT or (pointwise and _DATA_TAGS.isdisjoint(op.tags))


def _is_arithmetic(op: OpOverload) -> bool:
    """Whether any numbers are as good as any others for ``op``."""
    if op.namespace != "aten" or not _DATA_TAGS.isdisjoint(op.tags) or not schema_of(op).returns:
        return False
    name = schema_of(op).name
    known = _cost_of(op) is not CostClass.LIBRARY and name not in _PRODUCTS_OF_PARTS
    return torch.Tag.core in op.tags or known or name in _MEASURABLE
