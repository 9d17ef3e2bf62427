"""Every private name of torch that is used, and the versions that have it.

``tests/compat`` finds what this room names in its sources: nothing can be used and not stand here.
"""

ALL = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""The versions that are tested."""

NAMES: dict[str, tuple[str, ...]] = {
    "torch._C.DisableTorchFunction": ALL,
    "torch._C.DisableTorchFunctionSubclass": ALL,
    "torch._C._autograd._get_current_graph_task_keep_graph": ALL,
    "torch._C._autograd._top_saved_tensors_default_hooks": ALL,
    "torch._C._cuda_clearCublasWorkspaces": ALL,  # of builds for CUDA
    "torch._C._dispatch_keys": ALL,
    "torch._C._distributed_c10d.Logger": ALL,
    "torch._check": ALL,
    "torch._C._distributed_c10d.Reducer": ALL,
    "torch._C._dynamo.guards.TensorGuards": ALL,
    "torch._C._functorch.get_unwrapped": ALL,
    "torch._C._functorch.is_functorch_wrapped_tensor": ALL,
    "torch._C._functorch.maybe_current_level": ALL,
    "torch._C._get_float32_matmul_precision": ALL,
    "torch._C._get_mkldnn_enabled": ALL,
    "torch._C._len_torch_function_stack": ALL,
    "torch._C._set_mkldnn_enabled": ALL,
    "torch._C._storage_Use_Count": ALL,
    "torch._dynamo.backends.common.aot_autograd": ALL,
    "torch._dynamo.config.error_on_nested_fx_trace": ALL,
    "torch._dynamo.source.ConstantSource": ALL,
    "torch._dynamo.utils.counters": ALL,
    "torch._functorch.eager_transforms._wrap_for_grad": ALL,
    "torch._functorch.vmap._add_batch_dim": ALL,
    "torch._guards.detect_fake_mode": ALL,
    "torch._higher_order_ops.associative_scan.associative_scan": ALL,
    "torch._higher_order_ops.cond.cond": ALL,
    "torch._higher_order_ops.map.map": ALL,
    "torch._higher_order_ops.scan.scan": ALL,
    "torch._higher_order_ops.while_loop.while_loop": ALL,
    "torch._inductor.compile": ALL,
    "torch._library.simple_registry.singleton": ALL,
    "torch._ops.OpOverload": ALL,
    "torch._subclasses.fake_tensor.DataDependentOutputException": ALL,
    "torch._subclasses.fake_tensor.DynamicOutputShapeException": ALL,
    "torch._subclasses.fake_tensor.FakeTensor": ALL,
    "torch._subclasses.fake_tensor.FakeTensorMode": ALL,
    "torch._subclasses.fake_tensor.UnsupportedOperatorException": ALL,
    "torch.autograd.Variable._execution_engine": ALL,
    "torch.distributed._functional_collectives": ALL,  # with distributed, like the next
    "torch.distributed._functional_collectives.AsyncCollectiveTensor": ALL,
    "torch.distributed.distributed_c10d._get_process_group_store": ALL,
    "torch.distributed.distributed_c10d._resolve_process_group": ALL,
    "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state": ALL,
    "torch.distributed.tensor._random.OffsetBasedRNGTracker": ALL,
    "torch.distributed.utils._apply_to_tensors": ALL,
    "torch.fx._lazy_graph_module._LazyGraphModule": ALL,
    "torch.fx._lazy_graph_module._use_lazy_graph_module": ALL,
    "torch.fx.experimental.proxy_tensor.HANDLED_TYPES": ALL,
    "torch.fx.experimental.sym_node.SymNode.guard_bool": ALL,
    "torch.fx.experimental.sym_node.SymNode.guard_int": ALL,
    "torch.fx.experimental.symbolic_shapes.ShapeEnv": ALL,
    "torch.fx.experimental.symbolic_shapes.statically_known_true": ALL,
    "torch.nn.modules.batchnorm._BatchNorm": ALL,
    "torch.nn.modules.transformer._detect_is_causal_mask": ALL,
    "torch.nn.utils.rnn._VF._pack_padded_sequence": ALL,
    "torch.nn.utils.rnn._VF._pad_packed_sequence": ALL,
    "torch.ops._c10d_functional": ALL,
    "torch.ops.aten._batch_norm_with_update_functional": ALL,
    "torch.ops.aten._batch_norm_with_update": ALL,
    "torch.ops.aten._is_all_true": ALL,
    "torch.ops.aten._is_any_true": ALL,
    "torch.ops.aten._log_softmax": ALL,
    "torch.ops.aten._native_batch_norm_legit": ALL,
    "torch.ops.aten._native_batch_norm_legit_functional": ALL,
    "torch.ops.aten._softmax": ALL,
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": ALL,
    "torch.ops.mkldnn._is_mkldnn_fp16_supported": ALL,
    "torch.optim.optimizer._global_optimizer_post_hooks": ALL,
    "torch.optim.optimizer._global_optimizer_pre_hooks": ALL,
    "torch.utils._python_dispatch.TorchDispatchMode": ALL,
    "torch.utils._python_dispatch._disable_current_modes": ALL,
    "torch.utils._pytree.GetAttrKey": ALL,
    "torch.utils._pytree.KeyEntry": ALL,
    "torch.utils._pytree.MappingKey": ALL,
    "torch.utils._pytree.SequenceKey": ALL,
    "torch.utils._pytree.TreeSpec": ALL,
    "torch.utils._pytree.keystr": ALL,
    "torch.utils._pytree.register_pytree_node": ALL,
    "torch.utils._pytree.tree_flatten": ALL,
    "torch.utils._pytree.tree_flatten_with_path": ALL,
    "torch.utils._pytree.tree_leaves": ALL,
    "torch.utils._pytree.tree_map": ALL,
    "torch.utils._pytree.tree_unflatten": ALL,
    "torch.utils._sympy.symbol.SymT": ALL,
    "torch.utils._sympy.symbol.symbol_is_type": ALL,
    "torch.utils._sympy.value_ranges.ValueRanges": ALL,
    "torch.utils.checkpoint._CachingTorchDispatchMode": ALL,
    "torch.utils.checkpoint._is_compiling": ALL,
    "torch.utils.checkpoint._recomputation_hook": ALL,
}
"""What modules hold."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "Tensor": (
        "_backward_hooks",
        "_cdata",
        "_is_view",
        "_is_zerotensor",
        "_make_subclass",
        "_post_accumulate_grad_hooks",
    ),
    "UntypedStorage": ("_cdata",),
    "Module": (
        "_backward_hooks",
        "_backward_pre_hooks",
        "_forward_hooks",
        "_forward_pre_hooks",
    ),
    "DistributedDataParallel": (
        "_comm_hooks",
        "_delay_all_reduce_params",
        "_join_config",
        "_use_python_reducer",
    ),
    "DTensor": ("_local_tensor", "_spec"),
    "FSDPState": (
        "_auto_reshard_after_forward",
        "_device",
        "_modules",
        "_mp_policy",
        "_post_forward",
        "_post_forward_hook_handle",
        "_pre_forward",
        "_pre_forward_hook_handle",
    ),
    "FSDPParamGroup": ("_all_gather_comm", "_all_reduce_hook", "_reduce_scatter_comm"),
    "FSDPParam": ("_module_info", "_orig_size", "_sharded_local_tensor"),
    "OffsetBasedRNGTracker": ("_distribute_region",),
    "TensorMeta": ("_replace",),
    "RNNBase": ("_flat_weight_refs", "_flat_weights"),
    "Optimizer": ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
    "OpOverload": ("_op", "_overloadname", "_schema"),
    "ProcessGroup": ("_get_backend",),
    "BackendOptions": ("_timeout",),
    "BatchNorm": ("_check_input_dim",),
    "GradScaler": (
        "_growth_tracker",
        "_lazy_init_scale_growth_tracker",
        "_per_optimizer_states",
        "_scale",
    ),
}
"""What objects hold, by their class, in every version."""

EITHER: dict[str, tuple[str, ...]] = {
    "FSDPState": ("_fsdp_param_groups", "_fsdp_param_group"),
    "FSDPParam": ("_unsharded_dtensor_spec", "_tp_spec"),
    "gathered FSDPParam": ("_unsharded_param",),
}
"""What objects hold under one of several names, the first of them here, or only at times."""

SET: dict[str, str] = {
    "_boxed_call": "torch._functorch._aot_autograd.utils",
    "_is_param": "torch.nn.parameter",
    "_opt_called": "torch.optim.lr_scheduler",
}
"""Attributes that are set here, and the module of PyTorch that asks for them."""

KEYWORDS: dict[str, str] = {
    "_allow_non_fake_inputs": "torch.fx.experimental.proxy_tensor.make_fx",
}
"""Private parameters that are given, and whose they are."""
