"""How far FP8 products may be from float64, by recipe, and the inputs on which that is measured."""

import torch
from layers import results

# Rounding to 1 + m mantissa bits leaves a relative error of about 2^-(m+1) / sqrt(3), averaged over a binade and
# weighted by size 0.74 of that: 2.65 % for E4M3, 5.3 % for E5M2. Errors of two operands are independent, and those of a
# sum cancel as its terms do, so a product has the root of the sum of their squares: 3.7 %, 5.9 %. What is measured
# over seeds comes within 3 % of that; the bounds leave a tenth.
NARROW, MIXED = 0.041, 0.065
# Values below 2^-6 of the scale lose bits. A scale per tensor meets such ones where outliers set it: a tenth more than
# what was measured, 5.4 % with E4M3 and 6.2 % with E5M2.
STRETCHED, STRETCHED_MIXED = 0.060, 0.068
BOUNDS = {  # y, dx, dw: relative to the norm
    ("current", "hybrid"): (NARROW, MIXED, MIXED), ("current", "e4m3"): (NARROW, NARROW, NARROW),
    ("current", "e5m2"): (MIXED, MIXED, MIXED), ("tokenwise", "hybrid"): (NARROW, MIXED, MIXED),
    ("tokenwise", "e4m3"): (NARROW, NARROW, NARROW), ("rowwise", "hybrid"): (NARROW, MIXED, MIXED),
    ("rowwise", "e5m2"): (MIXED, MIXED, MIXED), ("delayed", "hybrid"): (NARROW, MIXED, MIXED),
    ("delayed", "e4m3"): (NARROW, NARROW, NARROW), ("delayed", "e5m2"): (MIXED, MIXED, MIXED),
    ("blockwise", "hybrid"): (NARROW, NARROW, NARROW),
}  # fmt: skip
KINDS = ("gaussian", "heavy", "outliers")


def bounds(recipe, fmt, kind):
    """Return what the errors of y, dx and dw stay below."""
    own = BOUNDS[recipe, fmt]
    # A Student t of 2 has no variance: the largest of 200,000 draws may stretch one scale as an outlier does.
    if kind == "gaussian" or recipe == "blockwise":
        return own
    return tuple({NARROW: STRETCHED, MIXED: STRETCHED_MIXED}[bound] for bound in own)


def draw(kind, shape, outlier=1e4):
    """Return values; "outliers": one column in all of them is so many times larger."""
    if kind == "heavy":
        return torch.distributions.StudentT(2.0).sample(shape)
    x = torch.randn(shape)
    if kind == "outliers":
        x[..., 5] *= outlier
    return x


def errors(layer, kind, device, outlier=1e4):
    """Return the errors of y, dx and dw of a layer [256, 512], and the median of those of dw's columns."""
    x = draw(kind, (384, 512), outlier)
    gradient = draw("heavy" if kind == "heavy" else "gaussian", (384, 256))
    if kind == "outliers":  # which the weight evens out, else nothing else counts
        with torch.no_grad():
            layer.weight[:, 5] /= outlier
    y, dx, dw = (t.double().cpu() for t in results(layer, x.to(device), gradient.to(device)))
    x, w, gradient = x.double(), layer.weight.detach().double().cpu(), gradient.double()
    exact = (x @ w.T, gradient @ w, gradient.T @ x)
    relative = [float((a - e).norm() / e.norm()) for a, e in zip((y, dx, dw), exact, strict=True)]
    columns = (dw - exact[2]).norm(dim=0) / exact[2].norm(dim=0)
    return relative, float(columns.median())
