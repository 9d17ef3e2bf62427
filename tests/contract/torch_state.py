"""State of PyTorch's own and of the process that a step may read."""

# ruff: noqa: E501 -- tables whose rows are programs

from dataclasses import dataclass

from contract.python_state import Edit


@dataclass(frozen=True)
class TorchState:
    """``looks``: terms of a step. ``shared``: the edits are for the process, not for one world."""

    name: str
    before: str
    looks: tuple[str, ...]
    edits: tuple[Edit, ...]
    shared: bool = False


def _modules(name: str, before: str, looks: tuple[str, ...], *edits: Edit) -> TorchState:
    return TorchState(name, before, looks, edits)


def _kept(place: str, value: str) -> Edit:
    return f"_s = {place}; {place} = {value}", f"{place} = _s"


def _switch(name: str, look: str, on: str, off: str) -> TorchState:
    return TorchState(name, "", (look,), ((on, off),), shared=True)


def _patched(place: str, value: str, *looks: str, before: str = "") -> TorchState:
    edits = (_kept(place, value),)
    return TorchState(f"{place} patched", before, looks, edits, shared=True)


_OPTIMIZER = (
    "model.w{n} = nn.Parameter(torch.ones(2, dtype=torch.float64))\n"
    "opt = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.02)\n"
    "opt.param_groups[0]['tag'] = 3\n"
    "sched = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)\n"
    "opt.step(); sched.base = 2"
)


def _group(key: str, value: str, *looks: str) -> TorchState:
    place = f"opt.param_groups[0]['{key}']"
    every = looks or (place, f"opt.state_dict()['param_groups'][0]['{key}']",
                      f"sched.optimizer.param_groups[0]['{key}']",
                      f"[g['{key}'] for g in opt.param_groups][0]",
                      f"(5 if {place} == {value} else 7)")  # fmt: skip
    return TorchState(f"param_groups[0][{key!r}]", _OPTIMIZER, every, (_kept(place, value),))


TORCH = (
    _modules("activation replaced", "model.act{n} = nn.ReLU()", ("model.act{n}(-x)",),
             _kept("model.act{n}", "nn.Sigmoid()"), ("model.act{n}.forward = torch.sin",
                                                     "del model.act{n}.forward")),
    _modules("number of an activation", "model.act{n} = nn.Sequential(nn.LeakyReLU(0.1))",
             ("model.act{n}(-x)", "model.act{n}[0].negative_slope"),
             _kept("model.act{n}[0].negative_slope", "0.7")),
    _modules("part of a Sequential", "model.s{n} = nn.Sequential(nn.Identity(), nn.ReLU())",
             ("model.s{n}(-x)", "len(model.s{n})", "len(list(model.modules()))"),
             _kept("model.s{n}[1]", "nn.Tanh()"),
             ("model.s{n}.append(nn.Tanh())", "del model.s{n}[2]"),
             ("model.s{n}.insert(0, nn.Tanh())", "model.s{n}.pop(0)"),
             ("_s = model.s{n}.pop(1)", "model.s{n}.append(_s)")),
    _modules("Sequential in a Sequential",
             "model.s{n} = nn.Sequential(nn.Sequential(nn.Sequential(nn.ReLU())))",
             ("model.s{n}(-x)",), _kept("model.s{n}[0][0][0]", "nn.Tanh()"),
             ("model.s{n}[0][0].append(nn.Tanh())", "del model.s{n}[0][0][1]")),
    _modules("part of a ModuleList", "model.s{n} = nn.ModuleList([nn.ReLU(), nn.Tanh()])",
             ("[m(-x) for m in model.s{n}][0]", "model.s{n}[0](-x)", "len(model.s{n})",
              "sum(m(-x) for m in model.s{n}[:1])"),
             _kept("model.s{n}[0]", "nn.Sigmoid()"),
             ("model.s{n}.append(nn.Tanh())", "model.s{n}.pop()")),
    _modules("part of a ModuleDict", "model.s{n} = nn.ModuleDict({{'a': nn.ReLU()}})",
             ("model.s{n}['a'](-x)", "[m(-x) for m in model.s{n}.values()][0]", "len(model.s{n})",
              "float('b' in model.s{n})"),
             _kept("model.s{n}['a']", "nn.Tanh()"),
             ("model.s{n}['b'] = nn.Tanh()", "del model.s{n}['b']")),
    _modules("module in a plain list", "model.s{n} = [nn.ReLU()]", ("model.s{n}[0](-x)",),
             _kept("model.s{n}[0]", "nn.Tanh()")),
    _modules("module that is not the model's", "own{n} = nn.Sequential(nn.Dropout(0.0), nn.ReLU())",
             ("own{n}(-x)", "float(own{n}.training)", "float(own{n}[0].training)"),
             _kept("own{n}[1]", "nn.Tanh()"), ("own{n}.eval()", "own{n}.train()"),
             ("own{n}[0].eval()", "own{n}[0].train()")),
    _modules("buffer that is not the model's",
             "own{n} = nn.Module()\nown{n}.register_buffer('b', torch.ones(2))",
             ("x * own{n}.b", "own{n}.get_buffer('b').sum()", "len(list(own{n}.buffers()))"),
             _kept("own{n}.b", "torch.zeros(2)"), ("own{n}.b.add_(2)", "own{n}.b.sub_(2)"),
             _kept("own{n}._buffers['b']", "torch.zeros(2)"),
             ("own{n}.register_buffer('c', torch.ones(2))", "del own{n}.c")),
    _modules("buffer", "model.register_buffer('b{n}', torch.ones(2))",
             ("x * model.b{n}", "model.b{n}.shape[0]", "len(dict(model.named_buffers()))",
              "float('b{n}' in model.state_dict())"),
             _kept("model.b{n}", "torch.zeros(2)"), _kept("model.b{n}", "torch.zeros(1)"),
             ("model.b{n}.add_(2)", "model.b{n}.sub_(2)"),
             ("model._non_persistent_buffers_set.add('b{n}')",
              "model._non_persistent_buffers_set.discard('b{n}')")),
    _modules("parameter", "model.p{n} = nn.Parameter(torch.ones(2))",
             ("x * model.p{n}.detach()", "float(model.p{n}.requires_grad)",
              "sum(float(p.requires_grad) for p in model.parameters())",
              "float(model.p{n}.grad is None)", "x * getattr(model.p{n}, 'gain', 1.0)"),
             _kept("model.p{n}", "nn.Parameter(torch.zeros(2))"),
             _kept("model.p{n}.data", "torch.zeros(2)"),
             ("model.p{n}.requires_grad_(False)", "model.p{n}.requires_grad_(True)"),
             ("model.p{n}.grad = torch.ones(2)", "model.p{n}.grad = None"),
             ("model.p{n}.gain = 3.0", "del model.p{n}.gain")),
    _modules("ParameterList", "model.p{n} = nn.ParameterList([torch.ones(2), torch.ones(2)])",
             ("x * model.p{n}[0].detach()", "len(model.p{n})",
              "sum(p.detach().sum() for p in model.p{n})"),
             _kept("model.p{n}[0]", "nn.Parameter(torch.zeros(2))"),
             ("model.p{n}.append(nn.Parameter(torch.ones(2)))", "model.p{n}.pop()")),
    _modules("modes", "model.s{n} = nn.Sequential(nn.Dropout(0.0), nn.BatchNorm1d(2))",
             ("float(model.s{n}[0].training)", "float(model.training)",
              "(2 if model.s{n}[1].training else 3)", "sum(m.training for m in model.modules())"),
             ("model.s{n}[0].eval()", "model.s{n}[0].train()"), ("model.eval()", "model.train()"),
             _kept("model.s{n}[1].training", "3")),
    _modules("numbers of layers",
             "model.s{n} = nn.Sequential(nn.Dropout(0.0), nn.LayerNorm(2).double())",
             ("model.s{n}[1](x).detach()", "model.s{n}[1].eps"), _kept("model.s{n}[1].eps", "0.5")),
    _modules("hooks", "model.s{n} = nn.Sequential(nn.ReLU())", ("model.s{n}(-x)", "model.s{n}[0](-x)"),
             ("_s = model.s{n}[0].register_forward_hook(lambda m, a, o: o + 1)", "_s.remove()"),
             ("_s = model.s{n}[0].register_forward_pre_hook(lambda m, a: (-a[0],))", "_s.remove()"),
             ("_s = model.s{n}.register_forward_hook(lambda m, a, o: o + 1)", "_s.remove()")),
    TorchState("hooks of all modules", "model.s{n} = nn.Sequential(nn.ReLU())", ("model.s{n}(-x)",),
               (("_s = torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: o + 1)",
                 "_s.remove()"),), shared=True),
    _modules("hook that reads a global",
             "H{n} = 2.0\nmodel.s{n} = nn.Sequential(nn.ReLU())\n"
             "model.s{n}[0].register_forward_hook(lambda m, a, o: o + H{n})",
             ("model.s{n}(-x)",), ("H{n} = 3.0", "H{n} = 2.0")),
    _modules("parametrization",
             "class Twice{n}(nn.Module):\n    by = 2.0\n    def forward(self, w):\n"
             "        return w * self.by\nmodel.l{n} = nn.Linear(2, 2, dtype=torch.float64)\n"
             "nn.init.ones_(model.l{n}.weight)\n"
             "torch.nn.utils.parametrize.register_parametrization(model.l{n}, 'weight', Twice{n}())",
             ("model.l{n}(x).detach()", "model.l{n}.weight.detach().sum()"),
             ("Twice{n}.by = 3.0", "Twice{n}.by = 2.0"),
             ("model.l{n}.parametrizations.weight[0].by = 3.0",
              "del model.l{n}.parametrizations.weight[0].by")),
    _modules("class of a module", "model.s{n} = nn.ReLU()", ("model.s{n}(-x)",),
             ("model.s{n}.__class__ = nn.Tanh", "model.s{n}.__class__ = nn.ReLU")),
    _modules("functional arguments", "model.c{n} = nn.Hardtanh(-1.0, 1.0)", ("model.c{n}(3 * x)",),
             _kept("model.c{n}.max_val", "0.25")),
    _modules("extra state in a deep module", "model.s{n} = nn.Sequential(nn.Sequential(nn.ReLU()))\n"
             "model.s{n}[0][0].options = {{'gain': [1.0]}}",
             ("model.s{n}[0][0].options['gain'][0]", "x * model.get_submodule('s{n}.0.0').options['gain'][0]"),
             ("model.s{n}[0][0].options['gain'][0] = 3.0", "model.s{n}[0][0].options['gain'][0] = 1.0")),
    _group("lr", "0.5", "opt.param_groups[0]['lr']", "(opt.param_groups[0]['lr'] * 2 + 1)",
           "sched.get_last_lr()[0]", "(5 if opt.param_groups[0]['lr'] > 0.2 else 7)",
           "opt.state_dict()['param_groups'][0]['lr']", "float(opt.param_groups[0]['lr'])",
           "math.sqrt(opt.param_groups[0]['lr'])", "[g['lr'] for g in opt.param_groups][0]",
           "tell(f\"{{opt.param_groups[0]['lr']:.3f}}\")", "max(g['lr'] for g in opt.param_groups)",
           "(x * torch.tensor(opt.param_groups[0]['lr']))", "opt.param_groups[0].get('lr', 1.0)",
           "dict(opt.param_groups[0])['lr']", "x.new_full((2,), opt.param_groups[0]['lr'])"),
    _group("weight_decay", "0.5"),
    _group("eps", "0.5"),
    _group("tag", "9"),
    _group("tag", "'text'", "tell(repr(opt.param_groups[0]['tag']))"),
    _group("betas", "(0.1, 0.2)", "opt.param_groups[0]['betas'][0]", "(opt.param_groups[0]['betas'][1] * 2)"),
    _group("maximize", "True", "float(opt.param_groups[0]['maximize'])"),
    _modules("optimizer", _OPTIMIZER,
             ("opt.defaults['lr']", "len(opt.param_groups)", "len(opt.state)", "sched.last_epoch",
              "sched.base", "sched.gamma", "float('new' in opt.param_groups[0])",
              "getattr(opt, 'note', 1)", "sched.get_last_lr()[0]", "sched.base_lrs[0]"),
             _kept("opt.defaults['lr']", "0.5"), _kept("sched.last_epoch", "4"),
             _kept("sched.gamma", "0.25"), _kept("sched.base", "4"), ("opt.note = 4", "del opt.note"),
             ("opt.param_groups[0]['new'] = 4", "del opt.param_groups[0]['new']"),
             _kept("sched._last_lr", "[0.7]"), _kept("sched.base_lrs", "[0.9]"),
             ("_s = sched.state_dict(); sched.step()", "sched.load_state_dict(_s); opt.param_groups[0]['lr'] = 0.1")),
    _modules("state of the optimizer",
             _OPTIMIZER + "\nmodel.w{n}.grad = torch.ones(2, dtype=torch.float64)\nopt.step()\nopt.zero_grad()",
             ("opt.state[model.w{n}]['exp_avg']", "opt.state[model.w{n}]['step']",
              "len(opt.state[model.w{n}])", "len(opt.state)", "opt.state_dict()['state'][0]['exp_avg']",
              "float(model.w{n} in opt.state)", "x * opt.state[model.w{n}].get('own', 1.0)"),
             ("opt.state[model.w{n}]['exp_avg'].add_(2)", "opt.state[model.w{n}]['exp_avg'].sub_(2)"),
             _kept("opt.state[model.w{n}]['exp_avg']", "torch.ones(2, dtype=torch.float64)"),
             ("opt.state[model.w{n}]['own'] = 4.0", "del opt.state[model.w{n}]['own']")),
    _modules("averaged model",
             "from torch.optim.swa_utils import AveragedModel\nnet{n} = nn.Linear(2, 2).double()\n"
             "nn.init.ones_(net{n}.weight)\nnn.init.ones_(net{n}.bias)\navg{n} = AveragedModel(net{n})",
             ("avg{n}(x).detach()", "x * avg{n}.n_averaged", "float(avg{n}.training)"),
             ("avg{n}.n_averaged += 1", "avg{n}.n_averaged -= 1"),
             ("avg{n}.module.weight.data.add_(1)", "avg{n}.module.weight.data.sub_(1)")),
    # PyTorch's switches
    _switch("default dtype", "torch.ones(2) * x", "torch.set_default_dtype(torch.float64)",
            "torch.set_default_dtype(torch.float32)"),
    _switch("default dtype, read", "torch.get_default_dtype().itemsize",
            "torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)"),
    _switch("deterministic algorithms", "float(torch.are_deterministic_algorithms_enabled())",
            "torch.use_deterministic_algorithms(True)", "torch.use_deterministic_algorithms(False)"),
    _switch("warn only", "float(torch.is_deterministic_algorithms_warn_only_enabled())",
            "torch.use_deterministic_algorithms(True, warn_only=True)",
            "torch.use_deterministic_algorithms(False)"),
    _switch("matmul precision", "len(torch.get_float32_matmul_precision())",
            "torch.set_float32_matmul_precision('medium')", "torch.set_float32_matmul_precision('highest')"),
    _switch("threads", "torch.get_num_threads()", "torch.set_num_threads(2)", "torch.set_num_threads(1)"),
    _switch("grad mode", "float(torch.is_grad_enabled())", "torch.set_grad_enabled(False)",
            "torch.set_grad_enabled(True)"),
    _switch("autocast", "float(torch.is_autocast_enabled('cpu'))",
            "torch.set_autocast_enabled('cpu', True)", "torch.set_autocast_enabled('cpu', False)"),
    _switch("anomaly mode", "float(torch.is_anomaly_enabled())", "torch.set_anomaly_enabled(True)",
            "torch.set_anomaly_enabled(False)"),
    _switch("default device", "tell(str(torch.get_default_device()))",
            "torch.set_default_device('cpu:0')", "torch.set_default_device(None)"),
    _switch("cudnn.benchmark", "float(torch.backends.cudnn.benchmark)",
            "torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark = False"),
    _switch("mkldnn flags", "float(torch.backends.mkldnn.deterministic)",
            "torch.backends.mkldnn.deterministic = True", "torch.backends.mkldnn.deterministic = False"),
    _switch("fill of new memory", "float(torch.utils.deterministic.fill_uninitialized_memory)",
            "torch.utils.deterministic.fill_uninitialized_memory = False",
            "torch.utils.deterministic.fill_uninitialized_memory = True"),
    _switch("seed", "torch.initial_seed() % 97", "torch.manual_seed(5)", "torch.manual_seed(0)"),
    _switch("print options", "tell(str(np.get_printoptions()['precision']))",
            "np.set_printoptions(precision=3)", "np.set_printoptions(precision=8)"),
    # other people's code and the process
    _patched("nn.ReLU.forward", "lambda self, x: x * 3", "nn.ReLU()(-x)", "model.r{n}(-x)",
             before="model.r{n} = nn.ReLU()"),
    _patched("F.softplus", "torch.sin", "F.softplus(x)"),
    _patched("F.elu", "lambda x, *a, **k: x * 5", "model.e{n}(x)", before="model.e{n} = nn.ELU()"),
    _patched("torch.expm1", "torch.sin", "torch.expm1(x)"),
    _patched("torch.Tensor.cosh", "torch.Tensor.sin", "x.cosh()"),
    _patched("math.tau", "3.0", "math.tau"),
    _patched("np.pi", "3.0", "np.pi"),
    _patched("builtins.abs", "lambda x: 9.0", "abs(-2)"),
    _patched("operator.neg", "operator.pos", "operator.neg(2)"),
    TorchState("class of the standard library patched", "", ("fractions.Fraction(1, 2).limit_denominator(1).numerator",),
               (_kept("fractions.Fraction.limit_denominator", "lambda self, n: fractions.Fraction(7)"),), shared=True),
    TorchState("environment", "os.environ['TREADLE_WORLD'] = '1'",
               ("float(os.environ['TREADLE_WORLD'])", "float(os.getenv('TREADLE_WORLD', 3))",
                "len(os.environ.get('TREADLE_WORLD_2', ''))", "float('TREADLE_WORLD_2' in os.environ)"),
               (("os.environ['TREADLE_WORLD'] = '2'", "os.environ['TREADLE_WORLD'] = '1'"),
                ("os.environ['TREADLE_WORLD_2'] = '2'", "del os.environ['TREADLE_WORLD_2']")), shared=True),
    TorchState("sys.argv", "", ("len(sys.argv)",), (("sys.argv.append('x')", "sys.argv.pop()"),), shared=True),
    TorchState("recursion limit", "", ("sys.getrecursionlimit()",),
               (("_s = sys.getrecursionlimit(); sys.setrecursionlimit(_s + 50)", "sys.setrecursionlimit(_s)"),), shared=True),
    TorchState("decimal context", "", ("decimal.getcontext().prec", "float(decimal.Decimal(1) / 3)"),
               (("decimal.getcontext().prec = 3", "decimal.getcontext().prec = 28"),), shared=True),
    TorchState("working directory", "import tempfile", ("len(os.getcwd())", "len(str(pathlib.Path.cwd()))"),
               (("_s = os.getcwd(); os.chdir(tempfile.mkdtemp())", "os.chdir(_s)"),), shared=True),
    TorchState("file", "import tempfile\nFILE{n} = tempfile.mktemp()\npathlib.Path(FILE{n}).write_text('ab')",
               ("len(open(FILE{n}).read())", "len(pathlib.Path(FILE{n}).read_text())",
                "os.path.getsize(FILE{n})", "float(os.path.exists(FILE{n} + 'x'))"),
               (("pathlib.Path(FILE{n}).write_text('abcd')", "pathlib.Path(FILE{n}).write_text('ab')"),
                ("pathlib.Path(FILE{n} + 'x').write_text('')", "os.remove(FILE{n} + 'x')"))),
    TorchState("logging level", "import logging\nlog{n} = logging.getLogger('world')",
               ("log{n}.getEffectiveLevel()", "float(log{n}.isEnabledFor(logging.INFO))"),
               (("log{n}.setLevel(logging.DEBUG)", "log{n}.setLevel(logging.NOTSET)"),
                ("logging.getLogger().setLevel(logging.DEBUG)", "logging.getLogger().setLevel(logging.WARNING)")), shared=True),
)  # fmt: skip
