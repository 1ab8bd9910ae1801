"""How exactly a measurement knows the scale of an error."""


def scale_standard_error(num_elements: int) -> float:
    """Return the standard error of a measured scale as a fraction of it, for independent Gaussian errors."""
    # The mean square of n errors of known mean 0 has variance 2 sigma^4 / n, so its root has sigma / sqrt(2 n): Ahn and
    # Fessler 2003, "Standard Errors of Mean, Variance, and Standard Deviation Estimators".
    return float((2 * num_elements) ** -0.5)
