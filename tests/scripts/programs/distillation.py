"""A student learns from a teacher that is put into eval mode within the step itself."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

parser = argparse.ArgumentParser()
parser.add_argument("--T", type=float, default=4.0)
parser.add_argument("--alpha", type=float, default=0.9)
parser.add_argument("--dir", type=str, default="checkpoints")
args = parser.parse_args()
torch.manual_seed(25)

teacher = nn.Sequential(
    nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 5)
)
student = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5))
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4], gamma=0.2)


def loss_fn_kd(outputs, labels, teacher_outputs):
    kd = nn.KLDivLoss(reduction="batchmean")(
        F.log_softmax(outputs / args.T, dim=1), F.softmax(teacher_outputs / args.T, dim=1)
    )
    return kd * (args.alpha * args.T * args.T) + F.cross_entropy(outputs, labels) * (
        1.0 - args.alpha
    )


def train_kd(x, y):
    student.train()
    teacher.eval()
    output = student(x)
    with torch.no_grad():
        teacher_output = teacher(x)
    loss = loss_fn_kd(output, y, teacher_output)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


train_kd = treadle.compile(train_kd, model=[student, teacher], optimizer=optimizer)


class RunningAverage:
    def __init__(self):
        self.steps, self.total = 0, 0

    def update(self, val):
        self.total += val
        self.steps += 1

    def __call__(self):
        return self.total / float(self.steps)


loss_avg = RunningAverage()
for epoch in range(6):
    loss_avg.update(train_kd(torch.randn(16, 8), torch.randint(5, (16,))).item())
    student.eval()
    with torch.no_grad():
        accuracy = (student(torch.randn(20, 8)).argmax(1) == 0).float().mean().item()
    scheduler.step()
    print(f"- {epoch}: {loss_avg():05.3f} acc {accuracy:05.3f} lr {scheduler.get_last_lr()[0]:.4g}")
