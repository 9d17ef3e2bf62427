"""Point clouds: a shared network, a learned transform with a regulariser, max over points."""

import torch
import torch.nn as nn
import torch.nn.functional as F

import treadle

torch.manual_seed(48)


class TNet(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k
        self.conv, self.bn = nn.Conv1d(k, 12, 1), nn.BatchNorm1d(12)
        self.fc = nn.Linear(12, k * k)

    def forward(self, x):
        h = torch.max(F.relu(self.bn(self.conv(x))), 2)[0]
        iden = torch.eye(self.k).view(1, -1).repeat(x.size(0), 1)
        return (self.fc(h) + iden).view(-1, self.k, self.k)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stn = TNet(3)
        self.conv1, self.bn1 = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        h = torch.max(F.relu(self.bn1(self.conv1(x))), 2, keepdim=True)[0].view(-1, 16)
        return F.log_softmax(self.fc(h), dim=1), trans


def feature_transform_regularizer(trans):
    eye = torch.eye(trans.size(1))[None]
    return torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - eye, dim=(1, 2)))


classifier = PointNet()
optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-3, betas=(0.9, 0.999))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train_step(points, target):
    optimizer.zero_grad()
    points = points.transpose(2, 1)
    pred, trans = classifier(points)
    loss = F.nll_loss(pred, target)
    loss += feature_transform_regularizer(trans) * 0.001
    loss.backward()
    optimizer.step()
    return loss.detach(), pred.detach().max(1)[1].eq(target).sum()


train_step = treadle.compile(train_step, model=classifier, optimizer=optimizer)
for epoch in range(2):
    for i in range(2):
        points, target = torch.randn(5, 20, 3), torch.randint(4, (5,))
        loss, correct = train_step(points, target)
        print(
            "[%d: %d/2] train loss: %f accuracy: %f" % (epoch, i, loss.item(), correct.item() / 5)
        )
    scheduler.step()
