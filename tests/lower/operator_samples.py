"""One small call of every operation people train with, forward and backward.

``test_operators.py`` runs this table.
"""

from lower.operator_table import Sample
from lower.samples_layers import LAYERS
from lower.samples_losses import LOSSES
from lower.samples_pointwise import POINTWISE
from lower.samples_random import LISTS, RANDOM
from lower.samples_reductions import REDUCTIONS
from lower.samples_shapes import SHAPES

FAMILIES = (POINTWISE, REDUCTIONS, SHAPES, LAYERS, LOSSES, RANDOM, LISTS)
SAMPLES: tuple[Sample, ...] = tuple(sample for family in FAMILIES for sample in family.samples)
