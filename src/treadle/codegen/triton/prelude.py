"""Device functions that generated Triton modules carry when they use them.

All are written with operations that the compiler and the interpreter (``TRITON_INTERPRET=1``)
share, so what the tests run is what the GPU runs.
"""


def _rounds(x: str, coefficients: tuple[float, ...]) -> str:
    """Lines of a polynomial in ``x`` by Horner's rule, its result in ``p``."""
    return "".join(f"    p = _horner(p, {x}, {c!r})\n" for c in coefficients)


_TANH = (
    -0.00024012864402595902,
    0.0005905148561479433,
    -0.0014559354844101019,
    0.0035921396087143587,
    -0.008863236281146344,
    0.021869488562023115,
    -0.05396825396864022,
    0.13333333333333444,
    -0.33333333333333337,
)
_ERFC = (
    1.752560461090395e-08,
    1.9199785285935027e-08,
    -2.1417377757617212e-07,
    -5.1766286258511114e-08,
    1.6957121903295755e-06,
    -9.78099927946729e-07,
    -1.139939149641738e-05,
    2.2386666286993252e-05,
    5.162577762063891e-05,
    -0.00029015491299394817,
    0.0002937215349257143,
    0.0017556260305671993,
    -0.009746581222643222,
    0.028362277396913042,
    -0.05869339838338856,
    0.09230432116176848,
    -0.10880393015489652,
    0.08227673849011187,
    0.0035854154857922218,
    -0.14024059858554686,
    1.2375126308378261,
)
HELPERS = {
    "_from_e4m3": """
@triton.jit
def _from_e4m3(x):
    # Bits to float32; below the least normal number its last place counts.
    m = x.to(tl.int32) & 0x7F
    y = ((m << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    y = tl.where(m < 8, m.to(tl.float32) * 0.001953125, y)
    y = tl.where(m == 0x7F, float("nan"), y)
    return tl.where(x >= 128, y * -1.0, y)
""",
    "_from_e5m2": """
@triton.jit
def _from_e5m2(x):
    m = x.to(tl.int32) & 0x7F
    y = ((m << 21) + (112 << 23)).to(tl.float32, bitcast=True)
    y = tl.where(m < 4, m.to(tl.float32) * 1.52587890625e-05, y)
    y = tl.where(m == 0x7C, float("inf"), tl.where(m > 0x7C, float("nan"), y))
    return tl.where(x >= 128, y * -1.0, y)
""",
    "_capability": """
# Which instructions there are: without those for float8 a number takes twenty others. They are
# called by name: Triton 3.6 lost every other number of some conversions.
from triton.language.target_info import cuda_capability_geq as _capability
""",
    "_to_e4m3": """
@triton.jit
def _to_e4m3(x):
    # float32 to bits, to the nearest and of two to the even one; what is too large is the largest.
    # Below the least normal number an addition rounds, to one whose last bit is the least number.
    if _capability(8, 9):
        y = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4,
        )
    else:
        b = x.to(tl.int32, bitcast=True)
        a = b & 0x7FFFFFFF
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        near = ((a + 0x7FFFF + ((a >> 20) & 1)) >> 20) - (120 << 3)
        near = tl.where(a < 0x3C800000, small, near)
        near = tl.where(a > 0x43E00000, 0x7E, near)
        near = tl.where(a > 0x7F800000, 0x7F, near)
        y = (near | ((b >> 24) & 0x80)).to(tl.uint8)
    return y
""",
    "_to_e5m2": """
@triton.jit
def _to_e5m2(x):
    # As the one above; what is too large is infinite.
    b = x.to(tl.int32, bitcast=True)
    a = b & 0x7FFFFFFF
    if _capability(8, 9):
        near = tl.inline_asm_elementwise(
            "{ .reg .b16 a, b; cvt.rn.satfinite.e5m2x2.f32 a, $2, $1; "
            "cvt.rn.satfinite.e5m2x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }",
            "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4,
        )
        near = near & 0x7F
        near = tl.where((a >= 0x47700000) & (a <= 0x7F800000), 0x7C, near)
    else:
        small = (tl.abs(x) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        near = ((a + 0xFFFFF + ((a >> 21) & 1)) >> 21) - (112 << 2)
        near = tl.where(a < 0x38800000, small, near)
        near = tl.where(a >= 0x47800000, 0x7C, near)
        near = tl.where(a > 0x7F800000, 0x7F, near)
    return (near | ((b >> 24) & 0x80)).to(tl.uint8)
""",
    "_horner": """
@triton.jit
def _horner(p, x, c: tl.constexpr):
    # One round of a polynomial. A number by itself would be one of 32 bits.
    return tl.fma(p, x, tl.full((), c, p.dtype))
""",
    "_expm1": """
@triton.jit
def _expm1(x):
    # Exact near zero: the error of u - 1 and that of log(u) cancel.
    u = tl.exp(x)
    near = tl.where(u == 1.0, x, (u - 1.0) * x / tl.log(u))
    return tl.where((tl.abs(x) < 0.5) & (u != 1.0), near, tl.where(u == 1.0, x, u - 1.0))
""",
    "_power": """
@triton.jit
def _power(x):
    # exp x, where numbers too small for all their bits may be zero: a third of the instructions.
    return tl.exp2(x * 1.4426950408889634)
""",
    "_log1p": """
@triton.jit
def _log1p(x):
    # Exact near zero: the error of u = 1 + x and that of u - 1 cancel.
    u = x + 1.0
    near = tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(tl.abs(x) < 0.5, near, tl.log(u))
""",
    "_tanh": """
@triton.jit
def _tanh(x):
    # tanh x = x + x * z * p(z), z = x * x, near zero; else from exp(-2 |x|), which cannot overflow.
    z = x * x
    p = _horner(tl.full((), -2.92559343403808e-05, x.dtype), z, 9.568996808803827e-05)
"""
    + _rounds("z", _TANH)
    + """    near = tl.where(x == 0.0, x, tl.fma(x * z, p, x))  # the sum has no -0.0
    e = tl.exp(-2.0 * tl.abs(x))
    far = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(tl.abs(x) < 0.5, near, tl.where(x < 0.0, -far, far))
""",
    "_erfc": """
@triton.jit
def _erfc(x):
    # exp(-a * a) * p(t) / (1 + 2 a), where a = |x|, in float64. Of a * a the first part is exact.
    a = tl.abs(x.to(tl.float64))
    a = tl.where(a > 30.0, 30.0, a)
    t = (a - 3.75) / (a + 3.75)
    p = t * 0.0 + -2.03292172142306e-09
"""
    + _rounds("t", _ERFC)
    + """    near = a.to(tl.float32).to(tl.float64)
    e = tl.exp(-near * near) * tl.exp((near - a) * (near + a)) * p / (1.0 + 2.0 * a)
    return tl.where(x < 0.0, 2.0 - e, e).to(x.dtype)
""",
    "_sigmoid": """
@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
""",
    "_rsqrt": """
@triton.jit
def _rsqrt(x):
    # The GPU's own one takes the least numbers for zeros.
    small = tl.abs(x) < 1.1754943508222875e-38
    root = tl.rsqrt(tl.where(small, x * 16777216.0, x))
    return tl.where(small, root * 4096.0, root)
""",
    "_sin": """
@triton.jit
def _sin(x):
    # The GPU's own one takes the least numbers for zeros.
    return tl.where(tl.abs(x) < 1e-4, x, tl.sin(x))
""",
    "_erf": """
@triton.jit
def _erf(x):
    # The GPU's own one takes the least numbers for zeros.
    return tl.where(tl.abs(x) < 1e-4, x * 1.1283791670955126, tl.erf(x))
""",
    "_floor": """
@triton.jit
def _floor(x):
    # The GPU's own one takes the least numbers for zeros.
    low = tl.floor(x)
    return tl.where(low > x, low - 1.0, low)
""",
    "_ceil": """
@triton.jit
def _ceil(x):
    high = tl.ceil(x)
    return tl.where(high < x, high + 1.0, high)
""",
    "_round": """
@triton.jit
def _round(x):
    # Half to even.
    low = tl.floor(x)
    rest = x - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    up = (rest > 0.5) | ((rest == 0.5) & (odd == 1.0))
    near = tl.where(up, low + 1.0, low)
    return tl.where(near == 0.0, x * 0.0, near)
""",
    "_trunc": """
@triton.jit
def _trunc(x):
    return tl.where(x < 0.0, tl.ceil(x), tl.floor(x))
""",
    "_mod_int": """
@triton.jit
def _mod_int(a, b):
    # The result has the sign of the divisor, as in Python.
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
""",
    "_floordiv_int": """
@triton.jit
def _floordiv_int(a, b):
    rest = a % b
    return (a - rest) // b - ((rest != 0) & ((rest < 0) != (b < 0))).to(a.dtype)
""",
    "_exponent": """
@triton.jit
def _exponent(x):
    # The binary exponent of a positive float64, and 1023.
    tiny = x < 2.2250738585072014e-308
    bits = tl.where(tiny, x * 18014398509481984.0, x).to(tl.int64, bitcast=True)
    return (bits >> 52) - tl.where(tiny, 54, 0).to(tl.int64)
""",
    "_two_to": """
@triton.jit
def _two_to(n):
    return ((n + 1023) << 52).to(tl.float64, bitcast=True)
""",
    "_fmod": """
@triton.jit
def _fmod(a, b):
    # Long division in float64: each round takes 22 bits of the quotient at least, and nothing
    # is rounded, since y is cut into two parts whose products with q are exact.
    x = tl.abs(a).to(tl.float64)
    y = tl.abs(b).to(tl.float64)
    known = (x < float("inf")) & (y > 0.0)
    x = tl.where(known, x, 0.0)
    y = tl.where(known, y, 1.0)
    while tl.max((x >= y).to(tl.int32) + tl.zeros([1], tl.int32)) > 0:
        n = _exponent(x) - _exponent(y) - 22
        n = tl.where((n > 0) & (y < float("inf")), n, 0)
        third = n // 3
        part = _two_to(third)
        half = tl.where(x > 1e300, 0.5, 1.0)  # q * z may be above x
        z = y * part * part * _two_to(n - 2 * third) * half
        q = tl.floor(x * half / z + 0.5)
        high = (z.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
        rest = (x * half - q * high) - q * (z - high)
        rest = tl.where(rest < 0.0, rest + z, rest) / half
        x = tl.where(x >= y, rest, x)
    rest = tl.where(x == 0.0, a * 0.0, tl.where(a < 0.0, x * -1.0, x).to(a.dtype))
    return tl.where(known, rest, float("nan"))
""",
    "_mod_float": """
@triton.jit
def _mod_float(a, b):
    rest = _fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
""",
    "_floordiv_float": """
@triton.jit
def _floordiv_float(a, b):
    rest = _fmod(a, b)
    exact = (a - rest) / b - ((rest != 0) & ((rest < 0) != (b < 0))).to(a.dtype)
    low = tl.floor(exact)
    low = tl.where(exact - low > 0.5, low + 1.0, low)
    low = tl.where(exact == 0.0, a / b * 0.0, low)
    return tl.where(b == 0, a / b, low)
""",
    "_pow_float": """
@triton.jit
def _pow_float(x, y):
    # In float64, so that a float32 result is right to its last bits.
    base = x.to(tl.float64)
    power = y.to(tl.float64)
    size = tl.exp2(power * tl.log2(tl.abs(base)))
    size = tl.where((tl.abs(base) == 1.0) & (tl.abs(power) == float("inf")), 1.0, size)
    whole = tl.floor(power) == power
    odd = whole & (power - 2.0 * tl.floor(power * 0.5) == 1.0)
    below = (base < 0.0) | ((base == 0.0) & (1.0 / base < 0.0))
    signed = tl.where(below & odd, size * -1.0, size)  # a minus has no -0.0
    root = (base < 0.0) & (base > float("-inf")) & (whole == 0)
    signed = tl.where(root, float("nan"), signed)
    signed = tl.where((power == 0.0) | (base == 1.0), 1.0, tl.where(power == 1.0, base, signed))
    return signed.to(x.dtype)
""",
    "_pow_int": """
@triton.jit
def _pow_int(x, y):
    result = (x + y) * 0 + 1
    square = x + y * 0
    left = y + x * 0
    for _ in range(x.dtype.primitive_bitwidth):
        result = tl.where((left & 1) != 0, result * square, result)
        square = square * square
        left = left >> 1
    # Of negative powers only those of 1 and -1 are whole; the others are rounded to zero.
    sign = 1 - 2 * (y & 1)
    whole = tl.where(x == 1, 1, tl.where(x == -1, sign, 0)).to(result.dtype)
    return tl.where(y < 0, whole, result)
""",
    "_mul": """
@triton.jit
def _mul(a, b):
    return a * b
""",
    "_or": """
@triton.jit
def _or(a, b):
    return a | b
""",
    "_top": """
@triton.jit
def _top(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_bottom": """
@triton.jit
def _bottom(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "_arg_max": """
@triton.jit
def _arg_max(a, i, b, j):
    # NaN is above everything; of equals the first wins.
    tie = (a == b) | ((a != a) & (b != b))
    first = ((a > b) | ((a != a) & (b == b))) | (tie & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)
""",
    "_arg_min": """
@triton.jit
def _arg_min(a, i, b, j):
    tie = (a == b) | ((a != a) & (b != b))
    first = ((a < b) | ((a != a) & (b == b))) | (tie & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)
""",
}
"""Text of each helper, by name."""
