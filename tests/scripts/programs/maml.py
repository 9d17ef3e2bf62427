"""Model-agnostic meta-learning on sines: fast weights by autograd.grad with create_graph."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(39)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList(
            [nn.Parameter(torch.randn(*s) * 0.3) for s in ((16, 1), (16,), (1, 16), (1,))]
        )

    def forward(self, x, vars=None):
        w1, b1, w2, b2 = self.vars if vars is None else vars
        return F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)


class Meta(nn.Module):
    def __init__(self, update_lr=0.05, meta_lr=1e-3, task_num=2, update_step=2):
        super().__init__()
        self.update_lr, self.task_num, self.update_step = update_lr, task_num, update_step
        self.net = Net()
        self.meta_optim = torch.optim.Adam(self.net.parameters(), lr=meta_lr)

    def forward(self, x_spt, y_spt, x_qry, y_qry):
        losses_q = [0 for _ in range(self.update_step + 1)]
        for i in range(self.task_num):
            fast = list(self.net.parameters())
            for k in range(self.update_step + 1):
                losses_q[k] = losses_q[k] + F.mse_loss(self.net(x_qry[i], fast), y_qry[i])
                if k == self.update_step:
                    break
                loss = F.mse_loss(self.net(x_spt[i], fast), y_spt[i])
                grad = torch.autograd.grad(loss, fast, create_graph=True)
                fast = [p - self.update_lr * g for g, p in zip(grad, fast)]
        loss_q = losses_q[-1] / self.task_num
        self.meta_optim.zero_grad()
        loss_q.backward()
        self.meta_optim.step()
        return torch.stack([each.detach() for each in losses_q])


maml = Meta()
train = treadle.compile(maml.forward, model=maml.net, optimizer=maml.meta_optim)
table = []
for step in range(5):
    amplitude, phase = torch.rand(2, 1, 1) * 4 + 0.1, torch.rand(2, 1, 1) * 3
    x_spt, x_qry = torch.rand(2, 5, 1) * 10 - 5, torch.rand(2, 5, 1) * 10 - 5
    accs = train(
        x_spt, amplitude * torch.sin(x_spt + phase), x_qry, amplitude * torch.sin(x_qry + phase)
    )
    table.append(accs.tolist())
