"""The page of all tables of the declared study, docs/tables/study.md; study.md has what follows from them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from common.docs import FIGURES

MISSING = "Not declared."
# A line in square brackets is where a table stands.
_PAGE = f"""\
# Tables of the study

Written by `make study`. [Study](../study.md) says what follows, and what the columns are.

## Tasks and methods

**Tasks** (`launch/screening/tasks.py`):

- `mlp` (3,760 steps) and `resnet8` (1,880 steps; *short*: 752) see 12,000 images of Fashion-MNIST, 14x14 pixels.
- `text` (4,000 steps; *short*: 1,500) is a transformer. It predicts the next of 600,000 characters of the docstrings
  of Python's library.
- `regression` (400 steps) maps 40 numbers to 10. Its score is the share of variance explained.

There are two workers unless a name says otherwise. The learning rate rises for 30 % of the steps and falls as a
cosine.

**Methods** (`launch/screening/contenders.py`):

- A number is a constant level in bits per value, up to 2 bits with `without_momentum`.
- *schedule 4-8-16* (the paper's): 15 % of the steps at 4 bits, 25 % at 8, 60 % at 16. *schedule 4-0.25*: 4 bits for
  60 % of the steps.
- *step size x 0.5*: steps of large tensors are half as long as they would be with momentum.
- *fp16* is Horovod's. *PowerSGD* and *top-k* are as their authors have them in the tables of one rate.
- *small at 8*: small tensors are sent at 8 bits. *from 10 %*: uncompressed for the first 10 % of the steps.

## All methods at one rate

[main]

*0.25, a level per tensor* chose the levels of least squared error. It gained nothing, and the library no longer has
it.

![Accuracy against bits per value, one panel per task](../{FIGURES}/pareto_bits.png)

*Bars are standard errors over seeds. The axis is linear within a point. Dotted: 0.64 bits, a fiftieth of float32.*

Some of them, and the regression at a rate at which runs diverge:

[training]

## Longer trainings

[longer]

[longer, text]

## Best rates

Text with SGD:

[tuned, text, sgd]

The same with 24 other seeds, and residuals of bfloat16 in place of float32:

[tuned, text, sgd, again]

Text with SGD, gradients clipped to a norm of 1:

[tuned, text, sgd, clipped]

The same with 24 other seeds:

[tuned, text, sgd, clipped, again]

Regression (a score of 99.6 %, so hundredths count):

[tuned, regression]

MLP:

[tuned, mlp]

The other methods on the MLP, at all four rates with the first of the two seeds that choose. Differences are to
uncompressed gradients at the same rate. With one seed nothing below 0.5 points counts.

[rates of others, mlp]

ResNet-8:

[tuned, resnet8]

Text with AdamW:

[tuned, text, adamw]

## Other workers, shards, batches and sizes

At the task's own rate. *skewed*: no two workers see images of the same class. *decay 0.1*: AdamW with a weight decay
of 0.1 (the others have none). *batch x4*: 32 pieces of text per worker and step. *10 million*: a transformer of 9.9
million values, 1,000 steps.

[breadth]

[large batch]

Each at its best rate, clipped:

[tuned, large batch]

[more workers]

[10 million]

## Momentum

*momentum 0.7* keeps that much, at a rate at which a gradient adds up to the same.

[momentum]

## Error feedback

With more than two workers the owner of a shard quantizes the sum again. *feedback of workers* drops the error of that
quantization, *no feedback* drops both. *8, scale per tensor* is the paper's quantizer read literally: codes round(x /
s) with s = max |x| / 127 per tensor, no error feedback. (Sums are not quantized again and small tensors are float32,
both to its advantage.)

[feedback]

[workers]

## Order of levels

The same levels for as many steps each, in several orders, and a constant level of as many bits.

[order]

## Policies

Names list the levels (*schedule*; *critical*: those of critical and of other epochs). *step* climbs or descends at
the accuracies that uncompressed trainings reach at about 15 and 40 % of their epochs.

[policies]

[policies, text]

## Rates

The regression at three rates. Its best is 0.05.

[rates]

The largest rates of other tasks. A method trains where both of two seeds end at most 5 points below uncompressed
gradients at the task's rate with a warm-up of 30 %.

[largest rates]

Of the regression:

[largest rates, regression]

The first steps at 4 bits, at twice the task's rate:

[first steps]
"""


def page(tables: Mapping[str, str]) -> str:
    """The page with its tables, by name."""
    return re.sub(r"^\[(.+)\]$", lambda found: tables.get(found[1], MISSING), _PAGE, flags=re.MULTILINE)
