"""How reports print an estimate."""


def shown(mean, error, digits=2):
    while error > 0 and float(f"{error:.{digits}f}") == 0:
        digits += 1
    return f"{mean:.{digits}f} ± {error:.{digits}f}"
