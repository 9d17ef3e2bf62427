"""K-FAC: forward pre-hooks and full backward hooks fill dicts by module, eigenvectors every few steps,
a branch on a counter.

again: has other entries
again: optimizer.steps
again: optimizer.steps
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

import treadle

torch.manual_seed(18)


class KFACOptimizer(optim.Optimizer):
    def __init__(
        self,
        model,
        lr=0.01,
        momentum=0.9,
        stat_decay=0.9,
        damping=0.1,
        kl_clip=0.01,
        weight_decay=1e-4,
        TCov=1,
        TInv=3,
    ):
        super().__init__(
            model.parameters(),
            dict(lr=lr, momentum=momentum, damping=damping, weight_decay=weight_decay),
        )
        self.model, self.modules = model, []
        self.steps, self.m_aa, self.m_gg = 0, {}, {}
        self.Q_a, self.Q_g, self.d_a, self.d_g = {}, {}, {}, {}
        self.stat_decay, self.kl_clip, self.TCov, self.TInv = stat_decay, kl_clip, TCov, TInv
        for module in model.modules():
            if module.__class__.__name__ in ("Linear", "Conv2d"):
                self.modules.append(module)
                module.register_forward_pre_hook(self._save_input)
                module.register_full_backward_hook(self._save_grad_output)

    def _save_input(self, module, input):
        if torch.is_grad_enabled() and self.steps % self.TCov == 0:
            a = input[0].data
            if isinstance(module, nn.Conv2d):
                a = (
                    F.unfold(a, module.kernel_size, padding=module.padding, stride=module.stride)
                    .transpose(1, 2)
                    .reshape(-1, module.weight[0].numel())
                )
            if module.bias is not None:
                a = torch.cat([a, a.new(a.size(0), 1).fill_(1)], 1)
            aa = a.t() @ (a / a.size(0))
            if self.steps == 0:
                self.m_aa[module] = torch.diag(aa.new(aa.size(0)).fill_(1))
            self.update_running_stat(aa, self.m_aa[module], self.stat_decay)

    def _save_grad_output(self, module, grad_input, grad_output):
        if self.steps % self.TCov == 0:
            g = grad_output[0].data
            n = g.size(0)
            if isinstance(module, nn.Conv2d):
                g = g.permute(0, 2, 3, 1).reshape(-1, g.size(1))
            gg = (g * n).t() @ (g * n / g.size(0))
            if self.steps == 0:
                self.m_gg[module] = torch.diag(gg.new(gg.size(0)).fill_(1))
            self.update_running_stat(gg, self.m_gg[module], self.stat_decay)

    @staticmethod
    def update_running_stat(aa, m_aa, stat_decay):
        m_aa *= stat_decay / (1 - stat_decay)
        m_aa += aa
        m_aa *= 1 - stat_decay

    def _update_inv(self, m):
        eps = 1e-10
        self.d_a[m], self.Q_a[m] = torch.linalg.eigh(self.m_aa[m])
        self.d_g[m], self.Q_g[m] = torch.linalg.eigh(self.m_gg[m])
        self.d_a[m].mul_((self.d_a[m] > eps).float())
        self.d_g[m].mul_((self.d_g[m] > eps).float())

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        lr, damping = group["lr"], group["damping"]
        updates = {}
        for m in self.modules:
            if self.steps % self.TInv == 0:
                self._update_inv(m)
            G = m.weight.grad.reshape(m.weight.size(0), -1)
            if m.bias is not None:
                G = torch.cat([G, m.bias.grad.view(-1, 1)], 1)
            v1 = self.Q_g[m].t() @ G @ self.Q_a[m]
            v2 = v1 / (self.d_g[m].unsqueeze(1) * self.d_a[m].unsqueeze(0) + damping)
            v = self.Q_g[m] @ v2 @ self.Q_a[m].t()
            v = (
                [v[:, :-1].view_as(m.weight), v[:, -1:].view_as(m.bias)]
                if m.bias is not None
                else [v.view_as(m.weight)]
            )
            updates[m] = v
        vg_sum = 0
        for m in self.modules:
            v = updates[m]
            vg_sum += (v[0] * m.weight.grad * lr**2).sum().item()
            if m.bias is not None:
                vg_sum += (v[1] * m.bias.grad * lr**2).sum().item()
        nu = torch.clamp((self.kl_clip / torch.tensor(abs(vg_sum) + 1e-12)).sqrt(), max=1.0)
        for m in self.modules:
            m.weight.grad.copy_(updates[m][0])
            m.weight.grad.mul_(nu)
            if m.bias is not None:
                m.bias.grad.copy_(updates[m][1])
                m.bias.grad.mul_(nu)
        for p in group["params"]:
            d_p = p.grad
            if group["weight_decay"] != 0 and self.steps >= 2:
                d_p.add_(p, alpha=group["weight_decay"])
            st = self.state[p]
            if "momentum_buffer" not in st:
                buf = st["momentum_buffer"] = torch.zeros_like(p)
                buf.mul_(group["momentum"]).add_(d_p)
            else:
                buf = st["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(d_p)
            p.add_(buf, alpha=-lr)
        self.steps += 1


net = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1, bias=False),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 5),
)
optimizer = KFACOptimizer(net)


def step(x, y):
    optimizer.zero_grad()
    out = net(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    optimizer.step()
    return loss.item()


step = treadle.compile(step, model=net, optimizer=optimizer)
log = [step(torch.randn(8, 1, 8, 8), torch.randint(5, (8,))) for _ in range(8)]
steps, vals = optimizer.steps, list(optimizer.m_aa.values()) + list(optimizer.m_gg.values())
