"""The model of the present device: measured once, and cached with compiled code."""

import json

import torch

from treadle.runtime.machine import Machine
from treadle.runtime.store.cache import Cache, content_key
from treadle.targets.measure import from_words, measured, to_words
from treadle.targets.model import DeviceModel
from treadle.targets.record import DeviceTarget


def ceilings(target: DeviceTarget, device: str, cache: Cache, here: Machine) -> DeviceModel:
    """What ``device`` reaches, as part of ``here``. Another GPU, PyTorch, or way to compute (TF32)
    is measured anew. Without memory to measure: what the target says of such devices."""
    key = content_key("ceilings 2", target.name, here.speed)
    known = cache.get(key)
    if known is not None:
        return from_words(json.loads(known), target.model)
    try:
        with torch.no_grad():
            device_model = measured(target, torch.device(device))
    except torch.OutOfMemoryError:
        return target.model
    cache.put(key, json.dumps(to_words(device_model)).encode())
    return device_model
