"""The model of the device that is here: measured once, and kept beside compiled code."""

import json

import torch

from treadle.runtime.cache import Cache, content_key
from treadle.runtime.machine import hardware_of
from treadle.targets.measure import from_words, measured, to_words
from treadle.targets.model import DeviceModel
from treadle.targets.record import DeviceTarget


def ceilings(target: DeviceTarget, device: str, cache: Cache) -> DeviceModel:
    """What ``device`` reaches. Another processor, GPU, number of threads or PyTorch is measured
    anew."""
    place = torch.device(device)
    facts = (target.name, hardware_of(place), str(torch.get_num_threads()), torch.__version__)
    key = content_key("ceilings", *facts)
    known = cache.get(key)
    if known is not None:
        return from_words(json.loads(known), target.model)
    with torch.no_grad():
        found = measured(target, place)
    cache.put(key, json.dumps(to_words(found)).encode())
    return found
