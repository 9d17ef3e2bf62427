"""Public training scripts in small: equal to eager, and never compiled again without a cause."""

import pytest

from scripts import harness

GRADS = "gradients that the step clears before it reads them compile again"
MODES = "modes that the step sets before it reads them compile again"
WORDS = "code that mentions vars, dir or eval makes every global count"
KNOWN: dict[str, str] = {
    "amp_scaler": "GradScaler that is disabled: TR-106",
    "dcgan": GRADS,
    "distillation": f"{MODES}; {WORDS}",
    "fgsm_inputs": GRADS,
    "focal_class_weights": "weights of classes by bincount: TR-102",
    "gan_hinge_spectral": GRADS,
    "gcn_scatter": MODES,
    "maml": f"{GRADS}; {WORDS}",
    "mixup_smoothing": "a number that changes compiles again",
    "moco": "the number of a buffer is asked for: TR-102",
    "pgd_adversarial": GRADS,
    "pgd_data": "``.data =`` of a tensor that the step made is dropped",
    "pinn_burgers": "a leaf of no model that needs a gradient: TR-110",
    "sac": GRADS,
    "skipgram_sparse": "sparse gradients: TR-127",
    "wgan_gp": GRADS,
}
"""Scripts that fail today, and what for."""


def _case(each: harness.Script) -> object:
    marks = [pytest.mark.xfail(reason=KNOWN[each.name], strict=False)] if each.name in KNOWN else []
    return pytest.param(each, id=each.name, marks=marks)


@pytest.mark.parametrize("each", [_case(each) for each in harness.scripts()])
def test_a_script_is_as_in_eager_and_compiles_for_reasons(each):
    assert harness.outcome(each).wrong == []
