"""A residual network in the manner of the big example: meters, resume from a checkpoint, StepLR."""

import io
import time

import torch
import torch.nn as nn

import treadle

torch.manual_seed(46)


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class BasicBlock(nn.Module):
    def __init__(self, a, b, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(a, b, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(b), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(b)
        self.downsample = None
        if stride != 1 or a != b:
            self.downsample = nn.Sequential(
                nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


model = nn.Sequential(BasicBlock(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [
            correct[:k].reshape(-1).float().sum(0, keepdim=True) * (100.0 / len(target))
            for k in topk
        ]


def train_step(images, target):
    output = model(images)
    loss = criterion(output, target)
    acc1, acc5 = accuracy(output, target, topk=(1, 5))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach(), acc1, acc5


train_step = treadle.compile(train_step, model=model, optimizer=optimizer)
batch_time, losses, top1 = AverageMeter("Time"), AverageMeter("Loss"), AverageMeter("Acc@1")
file = io.BytesIO()
for epoch in range(2):
    model.train()
    end = time.time()
    for i in range(3):
        loss, acc1, acc5 = train_step(torch.randn(5, 3, 8, 8), torch.randint(6, (5,)))
        losses.update(loss.item(), 5)
        top1.update(acc1[0].item(), 5)
        batch_time.update(time.time() - end)
        end = time.time()
    scheduler.step()
    file.seek(0)
    torch.save(
        {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
        file,
    )
file.seek(0)
checkpoint = torch.load(file)
model.load_state_dict(checkpoint["state_dict"])
optimizer.load_state_dict(checkpoint["optimizer"])
final = [x.item() for x in train_step(torch.randn(5, 3, 8, 8), torch.randint(6, (5,)))]
del batch_time, file, end
