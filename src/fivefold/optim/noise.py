"""The noise of gradients, from squared norms of sums over few and over many samples."""


def noise_parts(small: float, large: float, small_square: float, large_square: float) -> tuple[float, float]:
    """Unbiased estimates of the squared true gradient and the covariance's trace (arXiv 1812.06162, appendix A.1)."""
    gradient = (large * large_square - small * small_square) / (large - small)
    return gradient, (small_square - large_square) / (1.0 / small - 1.0 / large)
