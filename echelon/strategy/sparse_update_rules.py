"""The update rules of sparse tables: each describes how a server updates a row with its gradient.

Only rows with a gradient change. ``step`` in a formula is the number of updates of the table, as in
``torch.optim.SparseAdam``; it does not depend on the number of servers.
"""

from __future__ import annotations

from echelon.base.config import require, strict


@strict
class Sgd:
    """Plain SGD: w -= lr * g"""

    lr: float = 0.01

    def __post_init__(self) -> None:
        require(self.lr > 0, self, "lr", "a rate above 0")


@strict
class Momentum:
    """SGD with momentum: v = momentum * v + g;  w -= lr * v  (nesterov: w -= lr * (g + momentum * v))"""

    lr: float = 0.01
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        require(self.lr > 0, self, "lr", "a rate above 0")
        require(0 <= self.momentum < 1, self, "momentum", "a value from 0 up to 1")


@strict
class Adagrad:
    """Adagrad: a += g * g;  w -= lr * g / (sqrt(a) + eps). ``row_wise`` keeps one ``a`` per row: a += mean(g * g)"""

    lr: float = 0.01
    initial_accumulator: float = 0.0
    eps: float = 1e-10
    row_wise: bool = False

    def __post_init__(self) -> None:
        require(self.lr > 0, self, "lr", "a rate above 0")
        require(self.initial_accumulator >= 0, self, "initial_accumulator", "0 or more")
        require(self.eps >= 0, self, "eps", "0 or more")


@strict
class Adam:
    """Adam as in torch.optim.SparseAdam: moments of updated rows, with bias correction by the table's step count."""

    lr: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require(self.lr > 0, self, "lr", "a rate above 0")
        require(0 <= self.beta1 < 1, self, "beta1", "a value from 0 up to 1")
        require(0 <= self.beta2 < 1, self, "beta2", "a value from 0 up to 1")
        require(self.eps > 0, self, "eps", "a value above 0")


@strict
class Ftrl:
    """FTRL-proximal as in echelon.optim.FTRL; l1 makes weights sparse."""

    lr: float = 0.01
    l1: float = 0.0
    l2: float = 0.0
    lr_power: float = -0.5
    initial_accumulator: float = 0.1

    def __post_init__(self) -> None:
        require(self.lr > 0, self, "lr", "a rate above 0")
        require(self.l1 >= 0, self, "l1", "0 or more")
        require(self.l2 >= 0, self, "l2", "0 or more")
        require(self.lr_power <= 0, self, "lr_power", "0 or less")
        require(self.initial_accumulator >= 0, self, "initial_accumulator", "0 or more")


Rule = Sgd | Momentum | Adagrad | Adam | Ftrl

#: The rules that a name selects.
NAMED: dict[str, Rule] = {
    "sgd": Sgd(),
    "momentum": Momentum(),
    "adagrad": Adagrad(),
    "row_adagrad": Adagrad(row_wise=True),
    "adam": Adam(),
    "ftrl": Ftrl(),
}


def state_width(rule: Rule, dim: int) -> int:
    """Return the number of floats of optimizer state of a row with ``dim`` weights."""
    if isinstance(rule, Adagrad):
        return 1 if rule.row_wise else dim
    return {Sgd: 0, Momentum: dim, Adam: 2 * dim, Ftrl: 2 * dim}[type(rule)]
