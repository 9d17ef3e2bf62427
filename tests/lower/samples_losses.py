"""Samples: losses."""

import torch.nn.functional as F

from lower.operator_table import Family, normal, positive, whole

LOSSES = Family("losses")


def _losses() -> None:
    for reduction in ("mean", "sum", "none"):
        LOSSES.add(
            f"cross_entropy {reduction}",
            lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
            normal(4, 5),
            whole(5, 4),
        )
        LOSSES.add(
            f"cross_entropy weighted {reduction}",
            lambda x, t, w, r=reduction: F.cross_entropy(
                x, t, w.detach(), reduction=r, ignore_index=1
            ),
            normal(4, 5),
            whole(5, 4),
            positive(5),
        )
        LOSSES.add(
            f"cross_entropy smoothed {reduction}",
            lambda x, t, w, r=reduction: [
                F.cross_entropy(x, t, label_smoothing=0.1, reduction=r),
                F.cross_entropy(x, t, w.detach(), label_smoothing=0.1, reduction=r, ignore_index=2),
            ],
            normal(4, 5),
            whole(5, 4),
            positive(5),
        )
    LOSSES.add(
        "cross_entropy of images",
        lambda x, t, w: [F.cross_entropy(x, t), F.cross_entropy(x, t, w.detach(), ignore_index=0)],
        normal(2, 5, 3, 4),
        whole(5, 2, 3, 4),
        positive(5),
    )
    LOSSES.add(
        "cross_entropy of probabilities",
        lambda x, t: F.cross_entropy(x, t.detach().softmax(1)),
        normal(4, 5),
        normal(4, 5),
    )
    LOSSES.add("nll_loss of one", lambda x, t: F.nll_loss(x, t), normal(5), whole(5))
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "soft_margin_loss",
        "poisson_nll_loss",
    ):
        fn = getattr(F, name)
        for reduction in ("mean", "sum", "none"):
            LOSSES.add(
                f"{name} {reduction}",
                lambda x, y, f=fn, r=reduction: f(x, y.detach(), reduction=r),
                normal(3, 5),
                normal(3, 5),
            )
    LOSSES.add(
        "binary_cross_entropy",
        lambda x, y, w: [
            F.binary_cross_entropy(x, y.detach()),
            F.binary_cross_entropy(x, y.detach(), w.detach(), reduction="sum"),
        ],
        positive(3, 5),
        positive(3, 5),
        positive(5),
    )
    LOSSES.add(
        "binary_cross_entropy_with_logits",
        lambda x, y, w: [
            F.binary_cross_entropy_with_logits(x, y.detach()),
            F.binary_cross_entropy_with_logits(x, y.detach(), w.detach(), pos_weight=w.detach()),
        ],
        normal(3, 5),
        positive(3, 5),
        positive(5),
    )
    LOSSES.add(
        "kl_div",
        lambda x, y: [
            F.kl_div(x, y.detach(), reduction="batchmean"),
            F.kl_div(x, y.detach().log(), log_target=True, reduction="sum"),
        ],
        normal(3, 5),
        positive(3, 5),
    )
    LOSSES.add(
        "cosine_embedding_loss",
        lambda x, y, t: F.cosine_embedding_loss(x, y, t * 2 - 1),
        normal(3, 5),
        normal(3, 5),
        whole(2, 3),
    )
    LOSSES.add(
        "margin losses",
        lambda x, y, t: [
            F.margin_ranking_loss(x, y, t * 2 - 1, margin=0.3),
            F.hinge_embedding_loss(x, t * 2 - 1),
            F.triplet_margin_loss(x[:, None], y[:, None], x[:, None] * y[:, None]),
        ],
        normal(4),
        normal(4),
        whole(2, 4),
    )
    LOSSES.add("multi_margin_loss", F.multi_margin_loss, normal(3, 5), whole(5, 3))
    LOSSES.add(
        "multilabel losses",
        lambda x, t: [
            F.multilabel_soft_margin_loss(x, (t > 1).float()),
            F.multilabel_margin_loss(x, t),
        ],
        normal(3, 5),
        whole(5, 3, 5),
    )


_losses()
